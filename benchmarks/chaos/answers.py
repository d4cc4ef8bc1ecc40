"""What a response says, without what may differ between two runs of the same request.

`read_answer` makes one value of a stream or of a JSON body: texts, tokens, log-probabilities,
calls, counts of tokens and ends, by choice. Ids, times and what was cached are left out, and the
places where a stream was cut into chunks. Two answers are the same if these values are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ["Answer", "read_answer"]

# of the OpenAI and Anthropic APIs: differ from run to run, or say what was cached
_VARIES = frozenset(
    {
        *("id", "call_id", "item_id", "created", "created_at", "completed_at", "object"),
        *("prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"),
        *("cache_creation_input_tokens", "quickstep", "metrics", "draft", "timeout_s"),
    }
)
_TIMED_OUT = frozenset({"timeout", "deadline"})


class Answer(msgspec.Struct):
    """A response that was read to its end, or as far as it came.

    Attributes:
        content: What a repeated request has to give again.
        texts: Of the choices, in their order.
        is_over: It has its last event, or is a complete JSON value.
        is_late: A time limit ended it.
        error: The message of its error, "" without one.
        num_outputs: Tokens that were generated for it; None if it does not say.
    """

    content: Any = None
    texts: list[str] = msgspec.field(default_factory=list)
    is_over: bool = False
    is_late: bool = False
    error: str = ""
    num_outputs: int | None = None


def read_answer(kind: str, streams: bool, body: bytes) -> Answer:
    """The answer of a response with this body, which may be cut anywhere."""
    answer = Answer()
    try:
        values = list(_events(body)) if streams else [json.loads(body)]
    except ValueError:
        return answer
    answer.is_over = not streams or _has_end(body)
    for value in values:
        if message := _error_of(value):
            answer.error, answer.is_over = message, True
    if kind == "messages":
        _read_message(answer, values, streams)
    elif kind == "responses":
        _read_response(answer, values)
    elif kind in ("chat", "completions"):
        _read_choices(answer, values)
    elif values:
        answer.content = _steady(values[-1])
    return answer


def _events(body: bytes) -> Iterator[Any]:
    for block in body.split(b"\n\n")[:-1]:
        for line in block.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


def _has_end(body: bytes) -> bool:
    ends = (b"data: [DONE]", b"event: message_stop", b"event: response.completed")
    return any(end in body for end in (*ends, b"event: response.incomplete"))


def _error_of(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    found = value.get("error") or (value.get("response") or {}).get("error")
    return str(found.get("message")) if isinstance(found, dict) else ""


def _steady(value: Any) -> Any:
    """The value without the fields that vary."""
    if isinstance(value, dict):
        return {name: _steady(part) for name, part in value.items() if name not in _VARIES}
    return [_steady(part) for part in value] if isinstance(value, list) else value


def _read_choices(answer: Answer, values: list[Any]) -> None:
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for value in values:
        usage = value.get("usage") or usage
        for part in value.get("choices") or ():
            choice = choices.setdefault(part["index"], {"text": "", "calls": {}, "logprobs": {}})
            _add(choice, part)
    reasons = [choice.get("finish_reason") for _, choice in sorted(choices.items())]
    answer.is_late = any(reason in _TIMED_OUT for reason in reasons)
    answer.texts = [choice["text"] for _, choice in sorted(choices.items())]
    answer.num_outputs = usage.get("completion_tokens")
    answer.content = [sorted(choices.items()), _steady(usage)]


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a chunk's choice, or a complete one, to what came before of it."""
    message = part.get("delta") or part.get("message") or {}
    choice["text"] += part.get("text") or message.get("content") or ""
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        choice["reasoning"] = choice.get("reasoning", "") + reasoning
    for place, call in enumerate(message.get("tool_calls") or ()):
        known = choice["calls"].setdefault(call.get("index", place), {"name": "", "arguments": ""})
        for name in known:
            known[name] += (call.get("function") or {}).get(name) or ""
    for name, listed in (part.get("logprobs") or {}).items():
        choice["logprobs"].setdefault(name, []).extend(listed or ())
    for name in ("finish_reason", "stop_reason"):
        choice[name] = part.get(name) or choice.get(name)


def _read_message(answer: Answer, values: list[Any], streams: bool) -> None:
    if not streams:
        values = [{"message": values[0], "delta": values[0]}]
    blocks: dict[int, str] = {}
    reason: str | None = None
    usage: dict[str, Any] = {}
    for value in values:
        delta = value.get("delta") or {}
        if "index" in value:
            text = delta.get("text") or delta.get("partial_json") or delta.get("thinking") or ""
            blocks[value["index"]] = blocks.get(value["index"], "") + text
        reason = delta.get("stop_reason") or reason
        usage |= (value.get("message") or {}).get("usage") or value.get("usage") or {}
        for place, block in enumerate((value.get("message") or {}).get("content") or ()):
            blocks[place] = block.get("text") or json.dumps(block.get("input"))
    answer.is_late = reason in _TIMED_OUT
    answer.texts = [text for _, text in sorted(blocks.items())]
    answer.num_outputs = usage.get("output_tokens")
    answer.content = [answer.texts, reason, answer.num_outputs]  # its input is what was not cached


def _read_response(answer: Answer, values: list[Any]) -> None:
    last = values[-1] if values else {}
    response = last.get("response") or last
    answer.is_late = (response.get("incomplete_details") or {}).get("reason") in _TIMED_OUT
    parts = (part for item in response.get("output") or () for part in item.get("content") or ())
    answer.texts = [part.get("text") or "" for part in parts]
    answer.num_outputs = (response.get("usage") or {}).get("output_tokens")
    kept = ("output", "status", "incomplete_details", "usage")
    answer.content = _steady({name: response.get(name) for name in kept})
