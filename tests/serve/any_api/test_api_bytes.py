"""Bodies that are no JSON, JSON that no schema draws, and headers of any kind: answered in shape.

The routes and the shapes come from our own document, as in `test_api_cases`.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from api_cases import JSON, OpenApp, default_api, endpoints, num_cases
from hypothesis import given
from hypothesis import strategies as st

API = default_api()
WITH_JSON = [
    (method, path)
    for method, path in endpoints(API.document)
    if JSON in API.document["paths"][path][method.lower()].get("requestBody", {}).get("content", ())
]
NAMES = sorted(
    {
        name
        for schema in API.document["components"]["schemas"].values()
        for name in schema.get("properties", ())
    }
)
NUMBERS = st.one_of(
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**53, 2**63, 2**64, -(2**70), 10**40]),
    st.floats(),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3)
HEADER_NAMES = st.sampled_from(
    [
        "accept",
        "accept-encoding",
        "anthropic-version",
        "authorization",
        "content-type",
        "cookie",
        "expect",
        "host",
        "origin",
        "range",
        "user-agent",
        "x-api-key",
        "x-forwarded-for",
        "x-request-id",
    ]
)
HEADER_VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=40)
HEADERS = st.dictionaries(HEADER_NAMES, HEADER_VALUES.map(lambda text: text.encode("latin-1")))


TAKE_LISTS = ("/lora-adapters",)


def deep(depth: int, opening: str, closing: str) -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


RAW = [
    b"",
    b"null",
    b"[]",
    b"NaN",
    b'"\xff"',
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b'{"\xc3": 1}',
    b'{"n": NaN}',
    b'{"temperature": Infinity}',
    b'{"n": 1e999}',
    b'{"n": ' + b"9" * 6000 + b"}",
    b'{"n": -' + b"9" * 400 + b"}",
    b'{"n": 1, "n": 2',
    b'{"stop": "\\ud800"}',
    b'{"stop": "\\u00"}',
    b'{"stop": "a\x00b"}',
    b'{"a": 1}{"b": 2}',
    b" " * 10_000,
    deep(100_000, "[", "]"),
    deep(100_000, '{"a":', "}"),
    deep(2_000, '{"response_format":', "}"),
    b'{"tools": ' + deep(5_000, "[", "]") + b"}",
    b'{"chat_template_kwargs": ' + deep(500, '{"a":', "}") + b"}",
]


Answer = Callable[[bytes, dict[str, bytes]], int]


def answer_of(
    app: OpenApp, method: str, path: str, content: bytes, headers: dict[str, bytes]
) -> int:
    """The status of an answer, which is in shape and leaves no stream open."""
    url = path.replace("{", "").replace("}", "")
    response = app.send(method=method, url=url, content=content, headers=headers)
    API.judge_shape(method, path, response)
    assert not app.engine.open_streams
    assert response.status_code < 500
    return response.status_code


@contextmanager
def answering(method: str, path: str) -> Iterator[Answer]:
    """Gives the status of each answer, all of one app."""
    with OpenApp() as app:
        yield partial(answer_of, app, method, path)


@pytest.fixture(scope="module")
def refusing() -> Iterator[OpenApp]:
    """An app for all requests that are refused, which leave no stream open."""
    with OpenApp() as app:
        yield app


@pytest.mark.parametrize(("method", "path"), WITH_JSON)
@pytest.mark.parametrize("body", RAW, ids=range(len(RAW)))
def test_bytes_that_are_no_request_are_refused(
    refusing: OpenApp, method: str, path: str, body: bytes
) -> None:
    status = answer_of(refusing, method, path, body, {"content-type": b"application/json"})
    assert is_as_expected(status, path, body)


def is_as_expected(status: int, path: str, body: bytes) -> bool:
    """What is no request is refused; to a route that takes lists, an empty one is a request."""
    if body.strip() == b"[]" and path in TAKE_LISTS:
        return status == 200
    return 400 <= status < 500


@pytest.mark.parametrize(("method", "path"), WITH_JSON)
def test_any_bytes_are_refused_in_shape(method: str, path: str) -> None:
    with answering(method, path) as answer:

        @num_cases(25)
        @given(st.binary(max_size=60))
        def each(body: bytes) -> None:
            assert is_as_expected(answer(body, {}), path, body)

        each()


@pytest.mark.parametrize(("method", "path"), WITH_JSON)
def test_a_cut_off_object_is_refused_in_shape(method: str, path: str) -> None:
    with answering(method, path) as answer:

        @num_cases(25)
        @given(OBJECTS.map(json.dumps), st.floats(0, 1, exclude_max=True))
        def each(text: str, share: float) -> None:
            assert 400 <= answer(text[: int(len(text) * share)].encode(), {}) < 500

        each()


@pytest.mark.parametrize(("method", "path"), WITH_JSON)
def test_any_object_of_known_names_is_answered_in_shape(method: str, path: str) -> None:
    with answering(method, path) as answer:

        @num_cases(30)
        @given(OBJECTS)
        def each(fields: dict[str, Any]) -> None:
            answer(json.dumps(fields).encode(), {})

        each()


@pytest.mark.parametrize(("method", "path"), list(endpoints(API.document)))
def test_any_headers_are_answered_in_shape(method: str, path: str) -> None:
    with answering(method, path) as answer:

        @num_cases(15)
        @given(HEADERS)
        def each(headers: dict[str, bytes]) -> None:
            answer(b"", headers)

        each()
