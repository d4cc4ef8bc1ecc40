"""The requests of `benchmarks.flood`: one case for each route of the server.

A case says what a client sends once before it measures, before and after each request, and then
again and again. `cases_of` fails if a route has no case, or a case no route.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

__all__ = ["Case", "Sent", "cases_of", "flooding", "prepared", "request_of"]

_TEXT = "def add(a, b):\n    return a + b\n\n"
_LONG = _TEXT * 3000  # 100 KB, too long for a prompt but not for the tokenizer
_MESSAGES = [{"role": "user", "content": "What does itertools.chain do?"}]
_OK = frozenset({200})
_ADAPTERS = Path(__file__).parent.parent / "src" / "quickstep" / "bundled"
_BOUNDARY = "flood"
_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
_BODY = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
_FILE = json.dumps({**_LINE, "body": _BODY})


class Sent(msgspec.Struct, frozen=True):
    """A request; `{NAME}` in the path and in strings of the body is what was prepared."""

    method: str
    path: str
    body: Any = None
    form: str = ""

    def filled(self, names: Mapping[str, str]) -> Sent:
        """The request with what was prepared."""
        body = self.body
        if body is not None:
            text = json.dumps(body)
            for name, value in names.items():
                text = text.replace(f"{{{name}}}", value)
            body = json.loads(text)
        path = self.path
        for name, value in names.items():
            path = path.replace(f"{{{name}}}", value)
        return Sent(self.method, path, body, self.form)


class Case(msgspec.Struct, frozen=True):
    """What clients send to one route.

    Attributes:
        body: Of the quiet client's requests.
        floods: Of the flooding client's in turns; () for the same.
        once: What is sent before; the `id` of its response has this name.
        before: The same, before each request.
        after: Sent after each request.
        url: The path with its query, if it is not the route's.
        statuses: Those of a good response.
    """

    body: Any = None
    floods: tuple[Any, ...] = ()
    once: tuple[tuple[str, Sent], ...] = ()
    before: tuple[tuple[str, Sent], ...] = ()
    after: tuple[Sent, ...] = ()
    url: str = ""
    form: str = ""
    statuses: frozenset[int] = _OK


def _generation(**fields: Any) -> Case:
    """A short generation, and a flood of longer ones."""
    limits = ("max_output_tokens", "n_predict", "max_tokens")
    limit = next(name for name in limits if name in fields)
    return Case(fields, ({**fields, limit: 64},))


_UPLOAD = Sent("POST", "/v1/files", form=_FILE)
_BATCH = Sent(
    "POST",
    "/v1/batches",
    {"input_file_id": "{file}", "endpoint": "/v1/completions", "completion_window": "24h"},
)
_STORED = Sent("POST", "/v1/responses", {"input": "a", "max_output_tokens": 4, "store": True})
_IN_BACKGROUND = Sent(
    "POST", "/v1/responses", {"input": "a", "max_output_tokens": 64, "background": True}
)
_LORA = {
    "lora_name": "{client}-sql",
    "lora_path": str(_ADAPTERS / "demo-sql"),
    "load_inplace": True,
}
_CHAT = {"messages": _MESSAGES, "max_tokens": 4}
_EMBEDDING = {"model": "demo", "input": _TEXT}
_RERANK = {"query": "a", "documents": [_TEXT, "b"]}
_PAIR = {"text_1": "a", "text_2": _TEXT}
_REFUSED = frozenset({400})
_NOT_THERE = frozenset({404})
_WITH_FILE = (("file", _UPLOAD),)
_WITH_BATCH = (("file", _UPLOAD), ("batch", _BATCH))
_CANCELLED = (Sent("POST", "/v1/batches/{batch}/cancel"),)

_CASES: dict[tuple[str, str], Case] = {
    ("POST", "/v1/chat/completions"): _generation(**_CHAT),
    ("POST", "/v1/completions"): _generation(prompt=_TEXT, max_tokens=4),
    ("POST", "/v1/embeddings"): Case(_EMBEDDING, (_EMBEDDING, {"input": [_TEXT] * 16})),
    ("POST", "/v1/rerank"): Case(_RERANK, (_RERANK, {**_RERANK, "documents": [_TEXT] * 16})),
    ("POST", "/v2/rerank"): Case(_RERANK, (_RERANK,)),
    ("POST", "/v1/score"): Case(_PAIR, (_PAIR,)),
    ("POST", "/v1/classify"): Case({"input": "a"}, ({"input": _TEXT},), statuses=_REFUSED),
    ("POST", "/invocations"): _generation(prompt=_TEXT, max_tokens=4),
    ("POST", "/v1/responses"): _generation(input="a", max_output_tokens=4),
    ("GET", "/v1/responses/{response_id}"): Case(
        once=(("response", _STORED),), url="/v1/responses/{response}"
    ),
    ("DELETE", "/v1/responses/{response_id}"): Case(
        before=(("response", _STORED),), url="/v1/responses/{response}"
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Case(
        before=(("response", _IN_BACKGROUND),), url="/v1/responses/{response}/cancel"
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): Case(
        once=(("response", _STORED),), url="/v1/responses/{response}/input_items"
    ),
    # no conversation's: a header would have to name it
    ("GET", "/v1/stream/{conversation_id}"): Case(url="/v1/stream/none", statuses=_NOT_THERE),
    ("DELETE", "/v1/stream/{conversation_id}"): Case(
        url="/v1/stream/none", statuses=frozenset({204})
    ),
    ("GET", "/v1/stream"): Case(url="/v1/stream?conv_id=none", statuses=_NOT_THERE),
    ("DELETE", "/v1/stream"): Case(url="/v1/stream?conv_id=none", statuses=frozenset({204})),
    ("GET", "/v1/streams"): Case(),
    ("POST", "/v1/streams/lookup"): Case({"conversation_ids": ["none"]}),
    ("POST", "/v1/messages"): _generation(model="demo", messages=_MESSAGES, max_tokens=4),
    ("POST", "/v1/messages/count_tokens"): Case(
        {"model": "demo", "messages": _MESSAGES},
        ({"model": "demo", "messages": [{"role": "user", "content": _LONG}]},),
    ),
    ("POST", "/v1/files"): Case(form=_FILE, after=(Sent("DELETE", "/v1/files/{answer}"),)),
    ("GET", "/v1/files"): Case(once=_WITH_FILE),
    ("GET", "/v1/files/{file_id}"): Case(once=_WITH_FILE, url="/v1/files/{file}"),
    ("DELETE", "/v1/files/{file_id}"): Case(before=_WITH_FILE, url="/v1/files/{file}"),
    ("GET", "/v1/files/{file_id}/content"): Case(once=_WITH_FILE, url="/v1/files/{file}/content"),
    ("POST", "/v1/batches"): Case(
        _BATCH.body, once=_WITH_FILE, after=(Sent("POST", "/v1/batches/{answer}/cancel"),)
    ),
    ("GET", "/v1/batches"): Case(),
    ("GET", "/v1/batches/{batch_id}"): Case(once=_WITH_BATCH, url="/v1/batches/{batch}"),
    ("POST", "/v1/batches/{batch_id}/cancel"): Case(
        once=_WITH_FILE, before=(("batch", _BATCH),), url="/v1/batches/{batch}/cancel"
    ),
    ("POST", "/tokenize"): Case({"prompt": _TEXT}, ({"prompt": _LONG}, {"prompt": _TEXT})),
    ("POST", "/detokenize"): Case(
        {"tokens": [5] * 50}, ({"tokens": [5] * 20_000}, {"tokens": [5] * 50})
    ),
    ("GET", "/tokenizer_info"): Case(),
    ("POST", "/apply-template"): Case(
        {"messages": _MESSAGES}, ({"messages": _MESSAGES * 100}, {"messages": _MESSAGES})
    ),
    ("POST", "/completion"): _generation(prompt=_TEXT, n_predict=4),
    ("GET", "/props"): Case(),
    ("GET", "/slots"): Case(),
    ("POST", "/slots/{id_slot}"): Case(url="/slots/0?action=erase"),
    ("GET", "/lora-adapters"): Case(),
    ("POST", "/lora-adapters"): Case([]),
    ("GET", "/load"): Case(),
    ("POST", "/api/chat"): Case(
        {"model": "demo", "messages": _MESSAGES, "stream": False, "options": {"num_predict": 4}},
        ({"model": "demo", "messages": _MESSAGES, "options": {"num_predict": 64}},),
    ),
    ("POST", "/api/generate"): Case(
        {"model": "demo", "prompt": _TEXT, "stream": False, "options": {"num_predict": 4}},
        ({"model": "demo", "prompt": _TEXT, "options": {"num_predict": 64}},),
    ),
    ("POST", "/api/embed"): Case(_EMBEDDING, ({"model": "demo", "input": [_TEXT] * 16},)),
    ("POST", "/api/embeddings"): Case({"model": "demo", "prompt": _TEXT}),
    ("POST", "/api/show"): Case({"model": "demo"}),
    ("GET", "/api/tags"): Case(),
    ("GET", "/api/ps"): Case(),
    ("GET", "/api/version"): Case(),
    ("GET", "/"): Case(),
    ("POST", "/api/pull"): Case({"model": "a"}, statuses=_REFUSED),
    ("POST", "/api/push"): Case({"model": "a"}, statuses=_REFUSED),
    ("POST", "/api/create"): Case({"model": "a"}, statuses=_REFUSED),
    ("POST", "/api/copy"): Case({"source": "a", "destination": "b"}, statuses=_REFUSED),
    ("DELETE", "/api/delete"): Case({"model": "a"}, statuses=_REFUSED),
    ("GET", "/v1/models"): Case(),
    ("GET", "/v1/models/{model}"): Case(url="/v1/models/demo"),
    ("POST", "/v1/models/load"): Case({"model": "demo"}),
    ("POST", "/v1/models/unload"): Case({"model": "demo"}, statuses=frozenset({400})),
    ("POST", "/sleep"): Case(statuses=frozenset({400})),
    ("POST", "/wake_up"): Case(),
    ("GET", "/is_sleeping"): Case(),
    ("GET", "/health"): Case(),
    ("GET", "/ready"): Case(),
    ("GET", "/metrics"): Case(),
    ("GET", "/version"): Case(),
    ("GET", "/ping"): Case(),
    ("POST", "/ping"): Case(),
    ("GET", "/debug/steps"): Case(url="/debug/steps?last_s=1"),
    ("GET", "/debug/requests/{request_id}"): Case(
        once=(("completion", Sent("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})),),
        url="/debug/requests/{completion}",
    ),
    ("POST", "/reset_prefix_cache"): Case(),
    # one that is not there: the others need theirs
    ("POST", "/admin/replicas/{replica}/drain"): Case(
        url="/admin/replicas/99/drain", statuses=_NOT_THERE
    ),
    ("POST", "/admin/replicas/{replica}/restart"): Case(
        url="/admin/replicas/99/restart", statuses=_NOT_THERE
    ),
    ("POST", "/v1/load_lora_adapter"): Case(_LORA),
    ("POST", "/v1/unload_lora_adapter"): Case(
        {"lora_name": "{client}-sql"}, before=(("-", Sent("POST", "/v1/load_lora_adapter", _LORA)),)
    ),
    ("GET", "/openapi.json"): Case(),
    ("GET", "/docs"): Case(),
    ("GET", "/page/{file}"): Case(url="/page/app.js"),
}


def cases_of(routes: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Case]:
    """The case of each route, a method and a path. Raises KeyError if they are not the same."""
    wanted = list(routes)
    missing, unknown = set(wanted) - set(_CASES), set(_CASES) - set(wanted)
    if missing or unknown:
        raise KeyError(f"routes without a case: {sorted(missing)}; without a route: {unknown}")
    return {route: _CASES[route] for route in wanted}


def request_of(route: tuple[str, str], case: Case, names: Mapping[str, str]) -> Sent:
    """The quiet client's request."""
    method, path = route
    return Sent(method, case.url or path, case.body, case.form).filled(names)


def flooding(route: tuple[str, str], case: Case, names: Mapping[str, str]) -> list[Sent]:
    """The flooding client's requests, which it sends in turns."""
    method, path = route
    bodies = case.floods or (case.body,)
    return [Sent(method, case.url or path, body, case.form).filled(names) for body in bodies]


def prepared(
    client: httpx.Client, steps: Iterable[tuple[str, Sent]], names: Mapping[str, str]
) -> dict[str, str]:
    """Send what comes before; returns the names with the ids of the responses."""
    known = dict(names)
    for name, step in steps:
        sent = step.filled(known)
        if sent.form:
            response = client.post(sent.path, data={"purpose": "batch"}, files={"file": sent.form})
        else:
            response = client.request(sent.method, sent.path, json=sent.body)
        response.raise_for_status()
        if name != "-":
            known[name] = response.json()["id"]
    return known


def encoded(sent: Sent, host: str, key: str) -> bytes:
    """The bytes of a request, which accepts a compressed response, as browsers and SDKs do."""
    kind, body = "application/json", b""
    if sent.form:
        kind = f"multipart/form-data; boundary={_BOUNDARY}"
        body = (
            f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
            f"{sent.form}\r\n--{_BOUNDARY}--\r\n"
        ).encode()
    elif sent.body is not None:
        body = json.dumps(sent.body).encode()
    lines = [
        f"{sent.method} {sent.path} HTTP/1.1",
        f"host: {host}",
        f"x-api-key: {key}",
        "accept-encoding: gzip",
        f"content-type: {kind}",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
