"""The timeline: live, of a recording, and of a simulated run in a file."""

from __future__ import annotations

import json
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
    ids = page.evaluate(
        """async (url) => {
            const body = JSON.stringify({ prompt: "def", max_tokens: 40, ignore_eos: true });
            const headers = { "content-type": "application/json" };
            const send = () => fetch(url, { method: "POST", headers, body });
            const one = async () => (await (await send()).json()).id;
            return Promise.all(Array.from({ length: 30 }, one));
        }""",
        f"{address}/v1/completions",
    )
    page.get_by_text("Requests, newest first").click()
    for name in ids:
        listed = page.get_by_role("listitem").filter(has_text=name.removeprefix("cmpl-"))
        expect(listed).to_have_count(1)
    assert canvas.evaluate(COLOURED) > 300
    page.get_by_role("button", name="Pause").click()
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
    (tmp_path / "calls.jsonl").write_text('{"kind": "engine", "version": 3}\n')
    page.get_by_label("Open a recording").set_input_files(tmp_path / "calls.jsonl")
    expect(page.get_by_text("quickstep replay calls.jsonl --report")).to_be_visible()


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


def test_a_plan_has_its_memory_and_its_roofline(browser: Browser, tmp_path: Path) -> None:
    report = tmp_path / "plan.html"
    flags = ["llama-3.1-8b", "--hardware", "h100", "--rate", "2", "--report", str(report)]
    subprocess.run([PYTHON, "-m", "quickstep", "plan", *flags], check=True, capture_output=True)
    context = browser.new_context(offline=True)
    page = context.new_page()
    watched = Watched(page, "file:")
    page.goto(report.as_uri())
    expect(page.get_by_role("listitem").filter(has_text="KV cache: ")).to_be_visible()
    chart = page.get_by_label("Roofline of a device", exact=False)
    assert chart.locator("canvas").evaluate(COLOURED) > 1000
    assert not watched.problems
    context.close()


def test_a_sweep_has_a_grid_of_its_simulations(browser: Browser, tmp_path: Path) -> None:
    report = tmp_path / "sweep.html"
    flags = ["llama-3.2-1b", "--hardware", "l4", "--sweep", "policy", "--rate", "1,4"]
    command = [PYTHON, "-m", "quickstep", "simulate", *flags, "--tpot-ms", "100"]
    command += ["--num-prompts", "40"]
    subprocess.run([*command, "--report", str(report)], check=True, stdout=subprocess.DEVNULL)
    context = browser.new_context(offline=True)
    page = context.new_page()
    watched = Watched(page, "file:")
    page.goto(report.as_uri())
    grid = page.get_by_role("table").nth(1)
    expect(grid.get_by_role("columnheader")).to_have_text(["1/s", "4/s"])
    expect(grid.get_by_role("row")).to_have_count(4)
    expect(grid.get_by_role("img").first).to_have_attribute(
        "aria-label", "enough of the requests are within the targets"
    )
    assert not watched.problems
    context.close()


def test_tenants_have_their_parts_of_the_device(page: Page, tmp_path: Path) -> None:
    timings = {
        **{"arrival_s": 0.0, "first_token_s": 0.5, "finished_s": 1.0, "queue_s": 0.1},
        **{"num_output_tokens": 4, "activities": [["queue", 0.0], ["decode", 0.5]]},
    }
    lines = [
        {
            **{"kind": "sequence", "request_id": f"r{place}", "index": 0, "tenant": tenant},
            "timings": {**timings, "device_s": device_s},
        }
        for place, (tenant, device_s) in enumerate([("a", 0.1), ("b", 0.2), ("a", 0.1)])
    ]
    steps = tmp_path / "steps.jsonl"
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page.get_by_role("tab", name="Timeline").click()
    page.get_by_label("Open a recording").set_input_files(steps)
    rows = page.locator(".tenants tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="50.0 %")).to_have_count(2)
    expect(rows.first).to_contain_text("500 / 500")
    canvas = page.get_by_label("Requests over time", exact=False)
    before = canvas.evaluate(COLOURED)
    page.get_by_label("group by tenant").check()
    assert canvas.evaluate(COLOURED) != before
