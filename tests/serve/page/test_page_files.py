"""The page's files as a browser gets them: types, policy, copies, keys, size."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import vendor_page
from client import client_of
from fake_engine import FakeEngine

from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions
from quickstep.server.page.endpoint import page_files
from quickstep.server.usage.api_keys import ApiKeys
from quickstep.types import Activity

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEYED = ServerOptions(api_keys=ApiKeys(["ann=AAAA"]))
MOST_BYTES = 250_000
NAMES = [name for name, _ in page_files()]
NOTICE = Path(__file__).parents[3] / "NOTICE"


def get(path: str, options: ServerOptions | None = None, **headers: str) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine(), options)) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def test_a_browser_gets_the_page_and_other_clients_the_text_of_ollama() -> None:
    assert get("/", **BROWSER).headers["content-type"].startswith("text/html")
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        response = get("/", **headers)
        assert response.text == "Ollama is running"
        assert response.headers["vary"] == "accept"


def test_without_the_page_a_browser_gets_the_text_too() -> None:
    without = ServerOptions(page=False)
    assert get("/", without, **BROWSER).text == "Ollama is running"
    assert get("/page/app.js", without).status_code == 404


def test_the_files_need_no_key_but_every_other_spelling_of_a_path_does() -> None:
    assert get("/", KEYED, **BROWSER).status_code == 200
    assert {get(f"/page/{name}", KEYED).status_code for name in NAMES} == {200}
    for path in ("/page/", "/page/no.js", "/page//app.js", "/page/app%2Ejs", "/page/vendor"):
        assert get(path, KEYED).status_code == 401, path
    assert get("/v1/models", KEYED).status_code == 401


def test_only_the_files_of_the_page_are_served() -> None:
    for name in ("vendor/checksums.txt", "../endpoint.py", "..%2f__init__.py"):
        assert get(f"/page/{name}").status_code == 404, name


def test_every_file_has_the_policy_and_is_sent_once() -> None:
    for path in ("/", *(f"/page/{name}" for name in NAMES)):
        response = get(path, **BROWSER)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        copy = {"if-none-match": response.headers["etag"]}
        again = get(path, **BROWSER, **copy)
        assert (again.status_code, again.content) == (304, b"")


def test_a_file_is_compressed_for_clients_that_accept_it() -> None:
    plain = get("/page/app.js", **{"accept-encoding": "identity"})
    packed = get("/page/app.js", **{"accept-encoding": "gzip, br"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])


def test_all_files_have_at_most_250_kilobytes_compressed() -> None:
    sizes = [get(f"/page/{name}").headers["content-length"] for name in NAMES]
    assert sum(map(int, sizes)) <= MOST_BYTES


def test_the_page_has_no_script_or_style_inside_and_refers_to_its_own_files_only() -> None:
    files = {name: item.read_text(encoding="utf-8") for name, item in page_files()}
    page = files["index.html"]
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\bstyle=|\bon\w+=", page)
    for reference in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert reference == "docs" or reference.removeprefix("page/") in files
    for name, text in files.items():
        folder = name.rpartition("/")[0]
        for path in re.findall(r'\b(?:from|import)\s*"([\w@./-]*\w)"', text):
            assert path.startswith("./"), (name, path)
            assert f"{folder}/{path[2:]}".lstrip("/") in files, (name, path)


def test_every_activity_of_a_request_has_a_name_and_a_colour() -> None:
    files = {name: path.read_text(encoding="utf-8") for name, path in page_files()}
    names = files["texts.js"].partition("activities: {")[2].partition("}")[0]
    for activity in Activity:
        assert re.search(rf"\b{activity.value}: ", names)
        assert (
            f".swatch.{activity.value} {{ background: var(--{activity.value})" in files["style.css"]
        )
        assert files["style.css"].count(f"--{activity.value}: #") == 3  # light, and dark twice


def test_libraries_are_as_they_were_fetched_and_in_the_notice() -> None:
    assert vendor_page.changed_files() == []
    notice = NOTICE.read_text(encoding="utf-8").lower()
    for package in vendor_page.PACKAGES:
        name = package.name.removeprefix("@").partition("/")[0]
        assert name.replace("highlightjs", "highlight.js") in notice
