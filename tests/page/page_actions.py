"""What a user does on the page, and answers that a test writes instead of the model."""

from __future__ import annotations

import json
from collections.abc import Sequence

from playwright.sync_api import Locator, Page, Route, expect


def send(page: Page, text: str) -> Locator:
    """Send a message and wait for the end of its answer, which is returned."""
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()
    return last_answer(page)


def begin_long_answer(page: Page, text: str, num_tokens: int) -> None:
    """Send a message that so many tokens answer, and wait for the first ones."""
    page.get_by_label("max_tokens", exact=True).fill(str(num_tokens))
    page.get_by_text("More fields").click()
    page.get_by_label("ignore_eos", exact=True).select_option("true")
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Assistant", exact=True).locator(".markdown")).not_to_be_empty()


def last_answer(page: Page) -> Locator:
    """The last answer, after it has ended."""
    answer = page.get_by_label("Assistant", exact=True).last
    answer.get_by_role("button", name="Again, same seed").wait_for()
    return answer


def text_of(answer: Locator) -> str:
    return answer.locator(".markdown").inner_text()


def write_answers(page: Page, answers: Sequence[Sequence[str]], *, is_cut: bool = False) -> list:
    """Have the next requests answered with these pieces; returns their bodies. With `is_cut` the
    first answer ends without its last events.
    """
    bodies: list = []

    def fulfil(route: Route) -> None:
        pieces = answers[min(len(bodies), len(answers) - 1)]
        bodies.append(json.loads(route.request.post_data or ""))
        events = [{"id": "a", "choices": [_choice(piece)]} for piece in pieces]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        if not is_cut or len(bodies) > 1:
            lines += ["data: [DONE]\n\n"]
        route.fulfill(content_type="text/event-stream", body="".join(lines))

    page.route("**/v1/chat/completions", fulfil)
    return bodies


def _choice(piece: str) -> dict:
    token = {"token": piece, "bytes": list(piece.encode()), "logprob": -0.1, "top_logprobs": []}
    return {"index": 0, "delta": {"content": piece}, "logprobs": {"content": [token]}}
