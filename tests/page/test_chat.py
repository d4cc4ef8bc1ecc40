"""Talking to the model: streams, stop, branches, tokens, errors, hostile answers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from page_actions import begin_long_answer, last_answer, send, text_of, write_answers
from playwright.sync_api import Browser, Page, Route, expect

AXE = Path(os.environ.get("AXE", ".venv-page/node_modules/axe-core/axe.min.js"))

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<img src='https://evil.example/pixel.png'>",
    "![pixel](https://evil.example/pixel.png)",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<svg onload=alert(1)><script>alert(1)</script></svg>",
    "<style>@import 'https://evil.example/a.css'; body { display: none }</style>",
    "<p style='position:fixed;inset:0'>over all</p>",
    "[click](javascript:alert(1)) <a href=' javascript:alert(1)'>b</a>",
    "<form action='https://evil.example'><input name=key><button id=page>Send</button></form>",
    "<base href='https://evil.example/'>"
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<link rel=stylesheet href='https://evil.example/a.css'>"
    "<object data='https://evil.example'></object>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)></style></mglyph></table>"
    "</mtext></math>",
    "```html\n<img src=x onerror=alert(1)></code></pre><script>alert(1)</script>\n```",
    '<a href="https://evil.example" onclick="alert(1)" id="panel" class="bar">link</a>',
    "</div></body></html><script>alert(1)</script>",
    r"$\href{javascript:alert(1)}{x}$ \(\text{<img src=x onerror=alert(1)>}\)"
    r" $$\includegraphics{https://evil.example/a.png} \style{position:fixed}{x}$$",
    r"\[\def\x{\x\x}\x\]",
)

FORMULAS = (
    (r"so $x^2$ is", 1),
    (r"\(\frac{a_1}{b_2}\) and \[\sum_{i=0}^n i\]", 2),
    ("$$\na * b * c\n$$", 1),
    ("it costs $5 or $6", 0),
    ("`$x$` and\n```\n$$y$$\n```", 0),
    (r"$\nosuchcommand{$", 0),
)


def test_a_chat_streams_and_shows_its_figures(page: Page) -> None:
    page.get_by_label("max_tokens", exact=True).fill("12")
    answer = send(page, "def add(a, b):")
    assert text_of(answer)
    for name in ("TTFT", "TPOT", "device", "seed"):
        expect(answer.get_by_text(name, exact=True)).to_be_visible()


def test_the_same_seed_gives_the_same_text_as_another_branch(page: Page) -> None:
    page.get_by_label("max_tokens", exact=True).fill("20")
    first = text_of(send(page, "What does itertools.chain do?"))
    page.get_by_role("button", name="Again, same seed").click()
    page.get_by_text("2 of 2").wait_for()
    assert text_of(last_answer(page)) == first
    page.get_by_label("Previous branch").click()
    page.get_by_text("1 of 2").wait_for()
    assert text_of(last_answer(page)) == first


def test_stop_keeps_the_text_and_continue_gives_the_rest(page: Page) -> None:
    begin_long_answer(page, "count", 1900)
    page.get_by_role("button", name="Stop", exact=True).click()
    answer = last_answer(page)
    expect(answer.get_by_text("Stopped.")).to_be_visible()
    page.get_by_label("max_tokens", exact=True).fill("10")
    page.get_by_label("max_tokens", exact=True).blur()
    kept = text_of(answer)
    answer.get_by_role("button", name="Continue", exact=True).click()
    expect(last_answer(page).get_by_text("limit of tokens")).to_be_visible()
    assert len(text_of(last_answer(page))) > len(kept)


def test_a_broken_connection_keeps_the_text_and_continue_sends_it(page: Page) -> None:
    bodies = write_answers(page, [["one ", "two "], ["three"]], is_cut=True)
    answer = send(page, "count")
    expect(answer.get_by_text("connection ended")).to_be_visible()
    assert text_of(answer) == "one two"
    answer.get_by_role("button", name="Continue", exact=True).click()
    expect(answer.locator(".markdown")).to_have_text("one two three")
    assert bodies[1]["messages"][-1] == {"role": "assistant", "content": "one two "}
    assert bodies[1]["continue_final_message"] is True
    assert bodies[1]["seed"] == bodies[0]["seed"]


def test_an_edited_message_is_a_branch(page: Page) -> None:
    bodies = write_answers(page, [["first"], ["second"]])
    send(page, "one")
    page.get_by_label("You", exact=True).get_by_role("button", name="Edit").click()
    page.get_by_label("Edit", exact=True).fill("two")
    page.get_by_role("button", name="Send as a new branch").click()
    expect(page.get_by_label("Assistant", exact=True).locator(".markdown")).to_have_text("second")
    assert bodies[1]["messages"] == [{"role": "user", "content": "two"}]
    page.get_by_label("Previous branch").click()
    expect(page.get_by_label("Assistant", exact=True).locator(".markdown")).to_have_text("first")


def test_an_alternative_token_is_a_branch(page: Page) -> None:
    page.get_by_label("max_tokens", exact=True).fill("12")
    answer = send(page, "def add(a, b):")
    answer.get_by_role("button", name="Tokens", exact=True).click()
    answer.locator(".token").nth(1).click()
    first = answer.locator(".token").nth(0).inner_text()
    answer.get_by_role("button", name=re.compile("Continue with")).first.click()
    page.get_by_text("2 of 2").wait_for()
    assert text_of(last_answer(page)).startswith(first.strip())


def test_tokens_that_were_drafts_are_marked(page: Page) -> None:
    def with_drafts(route: Route) -> None:  # the engine drafts where it predicts that it pays
        answer = route.fetch()
        lines, num_marked = [], 0
        for line in answer.text().split("\n"):
            chunk = json.loads(line[6:]) if line.startswith("data: {") else {}
            choice = next(iter(chunk.get("choices", ())), {})
            choice["draft"] = bool(choice.get("logprobs")) and num_marked < 3
            num_marked += choice["draft"]
            for sequence in chunk.get("quickstep", {}).get("sequences", ()):
                sequence.update(num_drafts=4, num_accepted=3)
            lines.append("data: " + json.dumps(chunk) if chunk else line)
        route.fulfill(response=answer, body="\n".join(lines))

    page.get_by_label("max_tokens", exact=True).fill("12")
    page.get_by_label("temperature", exact=True).fill("0")
    page.route("**/v1/chat/completions", with_drafts)
    answer = send(page, "def add(a, b):")
    expect(answer.get_by_text("3/4", exact=True)).to_be_visible()
    answer.get_by_role("button", name="Tokens", exact=True).click()
    expect(answer.locator(".token.draft")).to_have_count(3)


def test_an_adapter_answers_under_its_name(page: Page) -> None:
    page.get_by_label("max_tokens", exact=True).fill("12")
    page.get_by_label("temperature", exact=True).fill("0")
    plain = text_of(send(page, "def add(a, b):"))
    page.get_by_role("combobox", name="Model", exact=True).select_option("demo-sql")
    with page.expect_request("**/v1/chat/completions") as sent:
        adapted = text_of(send(page, "def add(a, b):"))
    assert sent.value.post_data_json["model"] == "demo-sql"
    assert adapted != plain


def test_conversations_are_there_after_a_reload(page: Page) -> None:
    write_answers(page, [["stored"]])
    send(page, "remember this")
    page.reload()
    page.get_by_role("button", name="remember this", exact=True).click()
    expect(page.get_by_label("Assistant", exact=True).locator(".markdown")).to_have_text("stored")
    page.get_by_label("Delete: remember this").click()
    expect(page.get_by_role("button", name="remember this", exact=True)).to_have_count(0)


def test_an_error_is_reported_at_its_field(page: Page) -> None:
    page.get_by_label("temperature", exact=True).fill("-1")
    page.get_by_label("Message", exact=True).fill("a")
    page.get_by_role("button", name="Send").click()
    field = page.get_by_label("temperature", exact=True)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("alert")).to_contain_text("temperature")


def test_the_levels_of_effort_are_a_menu(page: Page) -> None:
    effort = page.get_by_label("reasoning_effort", exact=True)
    effort.select_option('"low"')
    page.get_by_label("max_tokens", exact=True).fill("2")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "def add(a, b):")
    assert sent.value.post_data_json["reasoning_effort"] == "low"


def test_bounds_are_those_of_the_document(page: Page, address: str) -> None:
    document = page.request.get(f"{address}/openapi.json").json()
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    for name in ("temperature", "presence_penalty", "frequency_penalty"):
        found = fields[name]["anyOf"][0]
        field = page.get_by_label(name, exact=True)
        assert float(field.get_attribute("min") or "nan") == found["minimum"]
        if "maximum" in found:
            assert float(field.get_attribute("max") or "nan") == found["maximum"]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_answer_executes_and_loads_nothing(page: Page, hostile: str) -> None:
    write_answers(page, [[hostile, "\n\nthe end"]])
    answer = send(page, hostile)
    expect(answer.get_by_text("the end")).to_be_visible()
    assert page.evaluate("document.querySelectorAll('#page').length") == 1
    content = answer.locator(".markdown")
    elements = content.evaluate("e => [...e.querySelectorAll('*')].map((x) => x.tagName)")
    assert not {"SCRIPT", "IMG", "IFRAME", "SVG", "STYLE", "FORM", "INPUT", "LINK"} & {*elements}
    attributes = content.evaluate(
        "e => [...e.querySelectorAll(':not(math, math *)')].flatMap((x) => x.getAttributeNames())"
    )
    in_formulas = content.evaluate(
        "e => [...e.querySelectorAll('math, math *')].flatMap((x) => x.getAttributeNames())"
    )
    assert not {"href", "style", "src", "onerror"} & {*in_formulas}
    assert {*attributes} <= {"href", "class", "target", "rel"}
    for link in content.get_by_role("link").all():
        assert (link.get_attribute("href") or "").startswith("https://")


@pytest.mark.parametrize(("text", "count"), FORMULAS)
def test_formulas_are_displayed(page: Page, text: str, count: int) -> None:
    write_answers(page, [[text, "\n\nthe end"]])
    answer = send(page, "a")
    expect(answer.get_by_text("the end")).to_be_visible()
    expect(answer.locator(".markdown math")).to_have_count(count)
    expect(answer.locator(".markdown [style]")).to_have_count(0)


def test_code_names_the_request(page: Page) -> None:
    write_answers(page, [["x"]])
    send(page, "it's")
    for name, part in (("curl", "curl -N"), ("Python", "OpenAI("), ("JavaScript", "fetch(")):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator(".settings pre")).to_contain_text(part)


def test_without_its_key_a_server_says_so(browser: Browser, address: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    error = '{"error": {"message": "an API key is missing", "type": "a", "param": null}}'
    refused = lambda route: route.fulfill(status=401, body=error)  # noqa: E731
    page.route(f"{address}/v1/models", refused)
    page.goto(address)
    expect(page.get_by_role("alert")).to_contain_text("an API key is missing")
    page.unroute(f"{address}/v1/models")
    page.get_by_label("API key").fill("k")
    with page.expect_request(f"{address}/v1/models") as request:
        page.get_by_label("API key").blur()
    assert request.value.headers["authorization"] == "Bearer k"
    assert page.evaluate("JSON.stringify(localStorage)").find('"k"') == -1
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.get_by_label("max_tokens", exact=True).fill("12")
    send(page, "def add(a, b):").get_by_role("button", name="Tokens", exact=True).click()
    for tab in ("Chat", "Timeline"):
        page.get_by_role("tab", name=tab).click()
        page.evaluate(AXE.read_text())
        found = page.evaluate("axe.run()")["violations"]
        assert [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found] == []
