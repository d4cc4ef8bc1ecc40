"""Write the pictures of the page in docs/images: `make page` first, then
`.venv-page/bin/python tools/page_screenshots.py`, which starts a server with the demo model.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from playwright.sync_api import Page, Playwright, sync_playwright

_ROOT = Path(__file__).parent.parent
_IMAGES = _ROOT / "docs/images"
_QUICKSTEP = [str(_ROOT / ".venv/bin/python"), "-m", "quickstep"]
_SERVE = ["serve", "demo", "--port", "0", "--threads", "1", "--seed", "1"]
_ADDRESS = re.compile(r" serving .* at (http\S+)/v1$")
_PLAN = ["plan", "llama-3.1-8b", "--hardware", "h100", "--rate", "5", "--report"]
_SEND_30 = """async () => {
    const headers = { "content-type": "application/json" };
    const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
    const send = async (place) => {
        await wait(30 * place);
        const prompt = "def f(x):\\n".repeat(1 + place % 7);
        const fields = { prompt, max_tokens: 20 + place, ignore_eos: true, seed: place };
        await (await fetch("v1/completions", {
            method: "POST", headers, body: JSON.stringify(fields),
        })).text();
    };
    await Promise.all(Array.from({ length: 30 }, (_, place) => send(place)));
}"""
_TIMEOUT_MS = 20_000


def main() -> None:
    _IMAGES.mkdir(exist_ok=True)
    with (
        sync_playwright() as playwright,
        subprocess.Popen([*_QUICKSTEP, *_SERVE], stderr=subprocess.PIPE, text=True) as server,
    ):
        try:
            _take(playwright, server)
        finally:
            server.terminate()


def _take(playwright: Playwright, server: subprocess.Popen[str]) -> None:
    assert server.stderr is not None
    address = next(found[1] for line in server.stderr if (found := _ADDRESS.search(line.rstrip())))
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
    page.set_default_timeout(_TIMEOUT_MS)
    page.goto(address)
    _chat(page)
    _timeline(page)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.html")
        subprocess.run([*_QUICKSTEP, *_PLAN, str(plan)], check=True, stdout=subprocess.DEVNULL)
        page.goto(plan.as_uri())
        page.get_by_label("Roofline of a device", exact=False).wait_for()
        _save(page, "plan")


def _chat(page: Page) -> None:
    page.get_by_label("max_tokens", exact=True).fill("60")
    page.get_by_label("temperature", exact=True).fill("0")
    page.get_by_label("Message", exact=True).fill("What does itertools.chain do?")
    page.get_by_role("button", name="Send").click()
    answer = page.get_by_label("Assistant", exact=True).last
    answer.get_by_role("button", name="Tokens", exact=True).click()
    answer.locator(".token").nth(2).click()
    _save(page, "chat")


def _timeline(page: Page) -> None:
    page.get_by_role("tab", name="Timeline").click()
    page.get_by_label("Seconds").first.select_option("5")
    page.evaluate(_SEND_30)
    page.get_by_role("button", name="Pause").click()
    _save(page, "timeline")


def _save(page: Page, name: str) -> None:
    page.wait_for_timeout(500)
    page.screenshot(path=_IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
