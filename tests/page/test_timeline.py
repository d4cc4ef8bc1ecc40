"""The timeline: live, of a recording, and of a simulated run in a file."""

from __future__ import annotations

import subprocess
from pathlib import Path

from conftest import PYTHON, Watched
from page_actions import send
from playwright.sync_api import Browser, Page, expect

# pixels of a canvas that are not empty
COLOURED = """e => {
    const pixels = e.getContext("2d").getImageData(0, 0, e.width, e.height).data;
    let count = 0;
    for (let i = 3; i < pixels.length; i += 4) count += pixels[i] > 0;
    return count;
}"""


def test_the_timeline_moves_while_requests_run(page: Page, address: str) -> None:
    page.get_by_role("tab", name="Timeline").click()
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    canvas = page.get_by_label("Steps over time", exact=False)
    before = canvas.evaluate(COLOURED)
    page.evaluate(
        """async (url) => {
            const body = JSON.stringify({ prompt: "def", max_tokens: 40, ignore_eos: true });
            const headers = { "content-type": "application/json" };
            const one = () => fetch(url, { method: "POST", headers, body }).then((r) => r.text());
            await Promise.all(Array.from({ length: 30 }, one));
        }""",
        f"{address}/v1/completions",
    )
    page.wait_for_function(
        f"([e, n]) => ({COLOURED})(e) > n + 200", arg=[canvas.element_handle(), before]
    )
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Requests, newest first").click()
    page.get_by_role("listitem").get_by_role("button").first.click()
    expect(page.get_by_text("without other requests")).to_be_visible()


def test_the_steps_of_a_chat_open_as_a_recording(page: Page, address: str, tmp_path: Path) -> None:
    send(page, "def add(a, b):")
    steps = tmp_path / "steps.jsonl"
    steps.write_bytes(page.request.get(f"{address}/debug/steps?last_s=600").body())
    page.get_by_role("tab", name="Timeline").click()
    page.get_by_label("Open a recording").set_input_files(steps)
    expect(page.get_by_text("recording steps.jsonl")).to_be_visible()
    assert page.get_by_label("Steps over time", exact=False).evaluate(COLOURED) > 300
    page.get_by_role("button", name="Back to live").click()
    expect(page.get_by_text("live", exact=True)).to_be_visible()


def test_a_file_without_records_is_refused(page: Page, tmp_path: Path) -> None:
    page.get_by_role("tab", name="Timeline").click()
    (tmp_path / "other.json").write_text('{"a": 1}')
    page.get_by_label("Open a recording").set_input_files(tmp_path / "other.json")
    expect(page.get_by_text("other.json has no records")).to_be_visible()


def test_a_simulated_run_is_one_file(browser: Browser, tmp_path: Path) -> None:
    report = tmp_path / "out.html"
    flags = ["llama-3.2-1b", "--hardware", "l4", "--rate", "2,8", "--num-prompts", "40"]
    command = [PYTHON, "-m", "quickstep", "simulate", *flags, "--report", str(report)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    context = browser.new_context(offline=True)
    page = context.new_page()
    watched = Watched(page, "file:")
    page.goto(report.as_uri())
    expect(page.locator(".wide tbody tr")).to_have_count(2)
    page.get_by_role("tab", name="Timeline").click()
    assert page.get_by_label("Steps over time", exact=False).evaluate(COLOURED) > 300
    page.get_by_text("Requests, newest first").click()
    page.get_by_role("listitem").get_by_role("button").first.click()
    expect(page.get_by_text("without other requests")).to_be_visible()
    assert not watched.problems
    context.close()
