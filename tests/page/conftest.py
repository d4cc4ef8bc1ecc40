"""The page at `/` in Debian's chromium, on the real `quickstep serve` with the demo model.

The server runs in a process of its own with the packages of `.venv`. After each test the browser
must have sent nothing to another origin, and no script may have failed or been refused.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("QUICKSTEP_PYTHON", str(ROOT / ".venv/bin/python"))
CHROMIUM = os.environ.get("QUICKSTEP_CHROMIUM", "/usr/bin/chromium")
SERVE = [
    *("-m", "quickstep", "serve", "demo", "--port", "0", "--threads", "1", "--num-blocks", "400"),
    *("--drain-timeout-s", "0"),
]
ADDRESS = re.compile(r" serving .* at (http\S+)/v1$")


class Watched:
    """What a page did that it must not do."""

    def __init__(self, page: Page, url: str) -> None:
        self.url = url
        self.problems: list[str] = []
        page.on("request", self._on_request)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self._on_console(message.type, message.text))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.url, "blob:", "data:", "file:")):
            self.problems.append(f"request to {request.url}")

    def _on_console(self, kind: str, text: str) -> None:
        if "Content Security Policy" in text:
            self.problems.append(text)


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """The address of a server, without `/v1`."""
    with subprocess.Popen([PYTHON, *SERVE, *flags], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := ADDRESS.search(line.rstrip()):
                    yield found[1]
                    break
            else:
                raise AssertionError("the server did not start")
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """A server without keys, with an adapter."""
    with served("--lora-modules", "demo-sql=demo-sql") as address:
        yield address


@pytest.fixture(scope="session")
def keyed_address() -> Iterator[str]:
    """A server with the keys AAAA and BBBB of two users."""
    with served("--api-key", "ann=AAAA", "--api-key", "ben=BBBB") as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    """The chat, in a new profile."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    context.set_default_timeout(20_000)
    page = context.new_page()
    watched = Watched(page, address)
    page.goto(address)
    page.get_by_label("temperature", exact=True).wait_for()
    yield page
    assert not watched.problems
    context.close()
