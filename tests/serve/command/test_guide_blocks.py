"""README and docs/guide show what works: their blocks against one server, in this process.

`make docs-test` runs all of them as a reader does (`tools/run_guides.py`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shlex
import shutil
import urllib.parse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from live_server import LiveServer, live_server
from run_guides import PAGES, SERVE, SHELLS, blocks, reason_not_to_run, statements

from quickstep.cli.flags.parsing import Parser
from quickstep.cli.main import COMMANDS
from quickstep.config import CacheConfig, EngineConfig, LoRAConfig
from quickstep.engine.assembly import open_engine
from quickstep.model.checkpoint.source import bundled_adapter
from quickstep.server.options import ServerOptions

ROOT = Path(__file__).parents[3]

STATEMENTS = [
    (page, statement)
    for page in PAGES
    for block in blocks(page)
    if block.language in SHELLS
    for statement in statements(block.text)
]
ADDRESS = re.compile(r"(localhost|127\.0\.0\.1):8000")


def of_language(*languages: str) -> list[object]:
    return [
        pytest.param(block.text, id=f"{page.stem}-{place}")
        for page in PAGES
        for place, block in enumerate(blocks(page))
        if block.language in languages
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("adapters")
    types = bundled_adapter("demo-annotations")
    assert types is not None
    shutil.copytree(types, folder / "types")
    modules = (("docs", "demo-docstrings"), ("sql", "demo-sql"))
    lora = LoRAConfig(modules, allowed_dirs=(str(folder),))
    options = ServerOptions(drain_s=0.0, adapter_names=("docs", "sql"))
    cache = CacheConfig(slot_save_path=str(folder / "slots"))
    with live_server(open_engine(EngineConfig(cache=cache, lora=lora)), options) as one:
        yield one


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_requests_of_a_page_succeed(server: LiveServer, page: Path) -> None:
    # one engine in this process has no TLS and no replicas: tools/run_guides.py sends the others
    others = ("https:", "/admin/replicas/")
    for of_page, statement in STATEMENTS:
        is_for_it = not any(part in statement for part in others)
        if of_page == page and statement.startswith("curl") and is_for_it:
            status, answer = sent(server, statement)
            assert status in (200, 204), f"{statement}\n{answer}"


def sent(server: LiveServer, statement: str) -> tuple[int, str]:
    """Send what a `curl` sends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("-X", help="the method")
    parser.add_argument("--json")
    parser.add_argument("-d")
    parser.add_argument("-H", action="append", default=[], help="a header")
    options = parser.parse_args(shlex.split(statement.replace("\\\n", " "))[1:])
    url = urllib.parse.urlsplit(f"http://{options.url}")
    assert url.netloc == "localhost:8000"
    body = options.json or options.d
    headers = dict(header.split(": ", 1) for header in options.H)
    if options.json:
        headers["content-type"] = "application/json"
    method = options.X or ("GET" if body is None else "POST")
    path = urllib.parse.urlunsplit(("", "", url.path, url.query, ""))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_the_first_answer_of_the_readme_is_the_one_it_shows(server: LiveServer) -> None:
    (first,) = [one for page, one in STATEMENTS if page.stem == "README" and "curl" in one]
    _, answer = sent(server, first)
    content = json.loads(answer)["choices"][0]["message"]["content"]
    shown = (ROOT / "README.md").read_text().replace("\\", "").replace("\n", " ")
    assert content[:100] in shown


@pytest.mark.parametrize("text", of_language("python"))
def test_a_program_runs(server: LiveServer, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if reason_not_to_run(text) is not None:
        compile(text, "page", "exec")
        return
    exec(compile(ADDRESS.sub(f"127.0.0.1:{server.port}", text), "page", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("statement", [one for _, one in STATEMENTS if "quickstep " in one])
def test_a_command_takes_its_flags(
    statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(statement, comments=True)
    if words[0] != "quickstep" and not SERVE.match(statement):
        return  # `docker build -t quickstep`
    arguments = words[words.index("quickstep") + 1 :]
    for word in arguments:
        if Path(word).suffix and "/" not in word:
            (tmp_path / word).touch()
    parser = Parser(prog="quickstep")
    subparsers = parser.add_subparsers()
    assert arguments[0] in COMMANDS
    import_module(f"quickstep.cli.{arguments[0]}").add_parser(subparsers)
    if "--help" not in arguments:
        parser.parse_args(arguments)


@pytest.mark.parametrize("text", of_language("json"))
def test_json_is_valid(text: str) -> None:
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("text", of_language("yaml"))
def test_yaml_is_valid(text: str) -> None:
    assert isinstance(yaml.safe_load(text), dict)


def test_a_block_of_an_unknown_language_is_not_overlooked() -> None:
    known = {*SHELLS, "python", "json", "yaml", "text"}
    assert {block.language for page in PAGES for block in blocks(page)} <= known


def test_statements_end_where_the_shell_ends_them() -> None:
    text = "a 'b\nc' \\\n  d  # e\ncat <<'END'\nit's\nEND\n\nlast"
    assert list(statements(text)) == ["a 'b\nc' \\\n  d  # e", "cat <<'END'\nit's\nEND", "last"]
