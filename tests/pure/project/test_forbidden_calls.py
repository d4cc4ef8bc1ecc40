"""What the code that handles strangers' data must not do, read from its source.

No pickle, no evaluated text, no shell, no connection to an address of a client's, and no `assert`
where a client's data is checked.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quickstep

SOURCE = Path(quickstep.__file__).parent
FILES = sorted(path for part in ("server", "engine") for path in (SOURCE / part).rglob("*.py"))
MODULES = {
    "pickle": "runs code that it reads",
    "cPickle": "runs code that it reads",
    "marshal": "trusts what it reads",
    "shelve": "is pickle",
    "dill": "is pickle",
    "cloudpickle": "is pickle",
    "joblib": "is pickle",
    "multiprocessing": "sends pickles",
    "concurrent.futures.process": "sends pickles",
    "yaml": "may build objects",
    "urllib.request": "fetches",
    "urllib3": "fetches",
    "http.client": "fetches",
    "requests": "fetches",
    "httpx": "fetches",
    "aiohttp": "fetches",
    "ftplib": "fetches",
    "smtplib": "sends",
    "telnetlib": "connects",
    "huggingface_hub": "fetches",
}
# The operator's own files, with the loader that builds no objects (`test_price_book` tries it).
YAML_READER = SOURCE / "yaml_file.py"
# Connect to addresses of the operator (`--engines`, `routes:`), and of other engines of the same
# server.
CONNECTORS = (
    SOURCE / "server" / "upstream" / "client.py",
    SOURCE / "engine" / "remote" / "host.py",
    SOURCE / "engine" / "handover" / "sender.py",
)
CALLS = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}
ATTRIBUTES = {
    ("os", "system"),
    ("os", "popen"),
    ("socket", "create_connection"),
    ("asyncio", "open_connection"),
    ("asyncio", "create_subprocess_shell"),
    ("torch", "load"),
    ("importlib", "import_module"),
}


def faults(tree: ast.AST, in_server: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        elif isinstance(node, ast.Call):
            yield from called(node)
        elif isinstance(node, ast.Assert) and in_server and not says_why(node):
            yield f"{node.lineno}: assert without a reason: is it a client's data?"


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
    for name in names:
        for module, why in MODULES.items():
            if name == module or name.startswith(f"{module}."):
                yield f"{node.lineno}: {module} {why}"


def called(node: ast.Call) -> Iterator[str]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in CALLS:
        yield f"{node.lineno}: {function.id}()"
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        name = (function.value.id, function.attr)
        if name in ATTRIBUTES:
            yield f"{node.lineno}: {'.'.join(name)}()"
    for keyword in node.keywords:
        if keyword.arg == "shell" and not is_false(keyword.value):
            yield f"{node.lineno}: a shell"


def is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def says_why(node: ast.Assert) -> bool:
    """An assert of an invariant says it; the others are checks."""
    return node.msg is not None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_file_does_nothing_that_is_forbidden(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = faults(tree, in_server=path.is_relative_to(SOURCE / "server"))
    if path == YAML_READER:
        found = (fault for fault in found if ": yaml " not in fault)
    if path in CONNECTORS:
        found = (fault for fault in found if "_connection()" not in fault)
    assert list(found) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import urllib.request as fetch",
        "from urllib import request",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "asyncio.open_connection(host, 80)",
        "assert len(prompt) < limit",
    ],
)
def test_what_is_forbidden_is_found(code: str) -> None:
    assert list(faults(ast.parse(code), in_server=True))
