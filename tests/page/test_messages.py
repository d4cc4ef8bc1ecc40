"""What a message may carry, and answers that outlive the page: tools, files, reloads."""

from __future__ import annotations

import json
from pathlib import Path

from page_actions import begin_long_answer, last_answer, send, text_of, write_answers
from playwright.sync_api import Browser, Page, Route, expect

CALL = {
    "index": 0,
    "id": "call-7",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
}


def write_call(page: Page) -> list:
    """Have the first request answered with a call, the next with a text; returns the bodies."""
    bodies: list = []

    def fulfil(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        delta = {"tool_calls": [CALL]} if len(bodies) == 1 else {"content": "It rains."}
        event = {"id": "a", "choices": [{"index": 0, "delta": delta}]}
        route.fulfill(
            content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        )

    page.route("**/v1/chat/completions", fulfil)
    return bodies


def test_the_result_of_a_call_is_written_by_hand(page: Page) -> None:
    bodies = write_call(page)
    page.get_by_text("Tools", exact=True).click()
    page.get_by_role("button", name="Add a tool").click()
    page.get_by_label("Name", exact=True).fill("weather")
    page.get_by_label("Description", exact=True).fill("The weather of a city")
    parameters = page.get_by_label("Parameters, as JSON schema")
    parameters.fill("{")
    parameters.blur()
    expect(page.get_by_text("This is no valid JSON.")).to_be_visible()
    parameters.fill('{"type": "object", "properties": {"city": {"type": "string"}}}')
    parameters.blur()
    answer = send(page, "Does it rain in Bonn?")
    function = bodies[0]["tools"][0]["function"]
    assert (function["name"], function["description"]) == ("weather", "The weather of a city")
    assert function["parameters"]["properties"] == {"city": {"type": "string"}}
    expect(answer.locator(".call")).to_have_text('weather({"city": "Bonn"})')
    answer.get_by_label("Result of weather").fill("rain")
    answer.get_by_role("button", name="Send results").click()
    expect(last_answer(page).locator(".markdown")).to_have_text("It rains.")
    asked, called, returned = bodies[1]["messages"]
    assert asked == {"role": "user", "content": "Does it rain in Bonn?"}
    function = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    assert called["tool_calls"] == [{"id": "call-7", "type": "function", "function": function}]
    assert returned == {"role": "tool", "content": "rain", "tool_call_id": "call-7"}


def test_a_text_file_goes_with_a_message(page: Page, tmp_path: Path) -> None:
    bodies = write_answers(page, [["read"]])
    (tmp_path / "notes.md").write_text("```python\nx = 1\n```\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    attach = page.get_by_label("Attach", exact=True)
    attach.set_input_files(tmp_path / "image.png")
    expect(page.get_by_role("alert")).to_contain_text("image.png is no text in UTF-8")
    attach.set_input_files(tmp_path / "notes.md")
    send(page, "What is x?")
    content = bodies[0]["messages"][0]["content"]
    assert content == "What is x?\n\nnotes.md:\n````\n```python\nx = 1\n```\n\n````"
    expect(page.get_by_label("You", exact=True).get_by_text("notes.md (")).to_be_visible()


def test_an_answer_goes_on_after_a_reload(page: Page) -> None:
    begin_long_answer(page, "count", 900)
    page.reload()
    answer = last_answer(page)
    expect(answer.get_by_text("limit of tokens")).to_be_visible()
    text = text_of(answer)
    answer.get_by_role("button", name="Again, same seed").click()
    page.get_by_text("2 of 2").wait_for()
    assert text_of(last_answer(page)) == text


def test_a_connection_that_breaks_is_taken_up_again(page: Page) -> None:
    sent = []

    def cut(route: Route) -> None:
        answer = route.fetch()
        sent.append(answer.text())
        route.fulfill(response=answer, body=sent[0][: len(sent[0]) // 2])

    page.route("**/v1/chat/completions", cut)
    page.get_by_label("max_tokens", exact=True).fill("40")
    answer = send(page, "def add(a, b):")
    events = [line[6:] for line in sent[0].split("\n") if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"] for event in events]
    complete = "".join(choice[0]["delta"].get("content") or "" for choice in deltas if choice)
    answer.get_by_role("button", name="Tokens", exact=True).click()
    tokens = "".join(answer.locator(".token").all_inner_texts()).removesuffix("<|im_end|>")
    assert tokens.replace("⏎", "").split() == complete.split()


def test_another_conversation_leaves_an_answer_running(page: Page) -> None:
    begin_long_answer(page, "count on", 600)
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="count on", exact=True).click()
    expect(last_answer(page).get_by_text("limit of tokens")).to_be_visible()


def opened_with(browser: Browser, address: str, key: str) -> Page:
    """The chat in a new profile, with conversations on the server too."""
    page = browser.new_context().new_page()
    page.set_default_timeout(20_000)
    page.goto(address)
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").blur()
    page.get_by_label("Keep them on the server too").check()
    page.get_by_label("max_tokens", exact=True).fill("8")
    return page


def test_conversations_of_a_key_are_there_in_another_browser(
    browser: Browser, keyed_address: str
) -> None:
    first = opened_with(browser, keyed_address, "AAAA")
    with first.expect_response(lambda response: response.url.endswith("/v1/files")):
        send(first, "def add(a, b):")
    text = text_of(last_answer(first))
    second = opened_with(browser, keyed_address, "AAAA")
    second.get_by_role("button", name="def add(a, b):", exact=True).click()
    assert text_of(last_answer(second)) == text
    with second.expect_response(lambda response: response.url.endswith("/v1/files")):
        send(second, "and sub?")
    first.reload()
    first.get_by_role("button", name="def add(a, b):", exact=True).click()
    expect(first.get_by_text("and sub?", exact=True)).to_be_visible()
    other = opened_with(browser, keyed_address, "BBBB")
    expect(other.locator(".conversations li")).to_have_count(0)
    with second.expect_response(lambda response: response.request.method == "DELETE"):
        second.get_by_label("Delete: def add(a, b):").click()
    first.reload()
    expect(first.locator(".conversations li")).to_have_count(0)
    for page in (first, second, other):
        page.context.close()


def test_a_key_that_is_typed_stays_while_the_page_learns_that_it_needs_one(
    browser: Browser, keyed_address: str
) -> None:
    page = browser.new_context().new_page()
    held: list[Route] = []
    for path in ("**/v1/models", "**/openapi.json"):
        page.route(path, lambda route: held.append(route))
    with page.expect_request("**/openapi.json"):
        page.goto(keyed_address)
    page.get_by_label("API key").fill("AAAA")
    for route in held:
        route.continue_()
    expect(page.get_by_text("an API key is missing")).to_be_visible()
    expect(page.get_by_label("API key")).to_have_value("AAAA")
    page.context.close()


def test_what_is_typed_stays_while_an_answer_is_drawn(page: Page) -> None:
    begin_long_answer(page, "count", 400)
    parameters = page.get_by_label("json_schema", exact=True)
    parameters.press_sequentially('{"type": "object"}', delay=20)
    assert parameters.input_value() == '{"type": "object"}'
