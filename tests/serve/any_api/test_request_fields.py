"""Every field of every request schema, nested ones included: honoured, reported or refused.

The rows are those of the reference (`field_reference`), the effects stand in `field_cases`, the
bounds in `field_bounds`; the first tests demand that none of them lacks a field.
"""

import asyncio
import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

import httpx
import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from bound_values import beyond
from client import client_of
from fake_engine import FakeEngine, FakeTokenizer, Submitted
from field_cases import OPENAI_CASES
from field_cases_messages import MESSAGES_CASES
from field_cases_ollama import OLLAMA_CASES
from field_cases_others import COMPLETION_LINE, OTHER_CASES
from field_cases_responses import RESPONSES_CASES
from field_effects import Case, Seen, thinking
from field_places import PLACES, Place, Struct, json_routes, minimal, structs_in, url_of
from openai.types import batch_create_params, completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from quickstep.core.fallback import read_routes
from quickstep.server.anthropic.request_types import (
    AdaptiveThinking,
    AnyChoice,
    AnyTool,
    AutoChoice,
    CountTokensRequest,
    CustomToolSpec,
    DocumentBlock,
    EnabledThinking,
    JsonOutput,
    MessagesRequest,
    OutputConfig,
    PlainBlock,
    SearchResultBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from quickstep.server.app import create_app
from quickstep.server.batches.request_types import BatchRequest
from quickstep.server.fields.field_classes import (
    Hint,
    Honoured,
    Note,
    RefusedField,
    Row,
    requests_nothing,
)
from quickstep.server.fields.shared_fields import FunctionSpec
from quickstep.server.http.route import ApiRoute
from quickstep.server.openai.request_types import ChatRequest, CompletionRequest, EmbeddingRequest
from quickstep.server.openai.tokenize import ApplyTemplateRequest, TokenizeRequest
from quickstep.server.options import FieldRules, RequestLimits, ServerOptions
from quickstep.server.reference.field_reference import (
    SchemaFacts,
    bounds_of,
    form_refusal,
    reference_of,
)
from quickstep.server.reference.openapi import branches, parts_of, reachable_structs
from quickstep.server.responses.request_types import ResponsesRequest

CASES = OPENAI_CASES | RESPONSES_CASES | MESSAGES_CASES | OLLAMA_CASES | OTHER_CASES
CLIENTS: dict[type[msgspec.Struct], Any] = {
    ChatRequest: chat_create_params.CompletionCreateParamsBase,
    CompletionRequest: completion_create_params.CompletionCreateParamsBase,
    ResponsesRequest: response_create_params.ResponseCreateParamsBase,
    EmbeddingRequest: embedding_create_params.EmbeddingCreateParams,
    BatchRequest: batch_create_params.BatchCreateParams,
    MessagesRequest: message_create_params.MessageCreateParamsBase,
    CountTokensRequest: message_count_tokens_params.MessageCountTokensParams,
}
HEADERS = {"user_profile_id", "workspace_id"}  # Anthropic's client sends these as headers
# Where a field is read but changes nothing, though it does on other routes.
WITHOUT_EFFECT: dict[tuple[Struct, Struct, str], str] = {
    (CountTokensRequest, CustomToolSpec, "strict"): "nothing is called",
    (TokenizeRequest, FunctionSpec, "strict"): "nothing is called",
    (ApplyTemplateRequest, FunctionSpec, "strict"): "nothing is called",
    (CountTokensRequest, AutoChoice, "disable_parallel_tool_use"): "nothing is called",
    (CountTokensRequest, AnyChoice, "disable_parallel_tool_use"): "nothing is called",
    (CountTokensRequest, AnyTool, "name"): "nothing is called",
    (CountTokensRequest, EnabledThinking, "budget_tokens"): "nothing is generated",
    (CountTokensRequest, OutputConfig, "format"): "nothing is generated",
    (CountTokensRequest, JsonOutput, "schema"): "nothing is generated",
    **{
        (CountTokensRequest, struct, "cache_control"): "nothing is added to the cache"
        for struct in (
            *(CountTokensRequest, CustomToolSpec, PlainBlock, ToolResultBlock, ToolUseBlock),
            *(DocumentBlock, SearchResultBlock),
        )
    },
}
# What a note needs around it.
BESIDE_NOTES: dict[tuple[Struct, str], Mapping[str, Any]] = {
    (ResponsesRequest, "stream_options"): {"stream": True},
    (AnyTool, "disable_parallel_tool_use"): {"tools": [{"name": "a", "input_schema": {}}]},
    (EnabledThinking, "display"): {"max_tokens": 50},
    (AdaptiveThinking, "display"): {"max_tokens": 50},
}
LIMITS = RequestLimits(logit_bias=9)  # so few that the fake vocabulary has ids for them
OPTIONS = ServerOptions(
    limits=LIMITS,
    served_model_names=("fake", "second"),
    routes=read_routes({"second": [{"speculation": False}]}),
)
STRICT = ServerOptions(
    limits=LIMITS,
    served_model_names=("fake", "second"),
    field_rules=FieldRules(refuse_unknown=True, refuse_hints=True),
)
FACTS = SchemaFacts(LIMITS, vocab_size=FakeTokenizer.vocab_size)


Post = Callable[[ApiRoute, dict[str, Any]], httpx.Response]


def post(
    route: ApiRoute,
    body: dict[str, Any],
    engine: FakeEngine | None = None,
    options: ServerOptions = OPTIONS,
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine(), options)) as client:
            given = body
            if route.request is BatchRequest and body.get("input_file_id") == "file-1":
                given = {**body, **await COMPLETION_LINE(client)}  # a file that exists
            return await client.post(url_of(route.path), json=given)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def post_refused() -> Iterator[Post]:
    """Posts what is refused, which leaves nothing behind: one app takes the posts of all tests."""
    engine = FakeEngine()
    opened = client_of(create_app(engine, OPTIONS))

    def post(route: ApiRoute, body: dict[str, Any]) -> httpx.Response:
        response = runner.run(client.post(url_of(route.path), json=body))
        assert response.status_code == 400, response.text
        assert not engine.submitted
        return response

    with asyncio.Runner() as runner:
        client = runner.run(opened.__aenter__())
        yield post
        runner.run(opened.__aexit__(None, None, None))


def shows_effect(place: Place, case: Case, given: bool) -> bool:
    """Whether the case's request, or the same without the field, leads to what the case says."""

    async def run() -> bool:
        engine = case.engine()
        async with client_of(create_app(engine, OPTIONS)) as client:
            before = {} if case.before is None else await case.before(client)
            body = asked(place, case, before) if given else unasked(place, case, before)
            response = await client.post(url_of(place.route.path), json=body)
            later = None
            if response.status_code == 200 and case.after is not None:
                later = await case.after(client, response.json())
        if given:
            assert response.status_code == case.status, response.text
        return response.status_code == case.status and case.holds(
            Seen(engine, response.text, later)
        )

    return asyncio.run(run())


def asked(place: Place, case: Case, before: Mapping[str, Any]) -> dict[str, Any]:
    value = before.get(place.name, case.value)
    body = place.body if case.whole is not None else place.with_value(value)
    return {**body, **case.beside, **before, **(case.whole or {})}


def unasked(place: Place, case: Case, before: Mapping[str, Any]) -> dict[str, Any]:
    """A required field keeps the plain value of the small body."""
    plain = place.body if place.is_required or case.whole is not None else place.without()
    around = {name: value for name, value in before.items() if name != place.name}
    return {**plain, **case.beside, **around}


def assert_names(response: httpx.Response, path: str) -> None:
    """400, and the error is about `path` or what is in it."""
    assert response.status_code == 400, response.text
    error = error_of(response)
    # other errors than OpenAI's have no place for the field's name, so the message begins with it
    param = error["param"] if "param" in error else error["message"].split()[0].rstrip(":")
    assert param == path or param.startswith((f"{path}.", f"{path}[")), error


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error; Ollama's is its message alone."""
    error = response.json()["error"]
    return {"message": error} if isinstance(error, str) else error


# Of an answer, what differs each time.
_FLEETING = re.compile(
    r'"(?:\w*id|created\w*|completed_at|expires_at|\w*_ms|\w*_second|\w*_duration)": *[^,}]+'
)


def told(response: httpx.Response) -> str:
    """An answer without what differs each time."""
    return _FLEETING.sub("", response.text)


def requests_types() -> Iterator[Struct]:
    for route in json_routes():
        assert route.request is not None
        yield from reachable_structs(route.request)


def case_of(place: Place) -> Case | None:
    for struct in place.struct.__mro__:
        found = CASES.get(struct, {}).get(place.name)
        if found is not None:
            return found
    return None


def _forms(declared: Any) -> list[Struct]:
    inner = {struct for struct, more in structs_in(declared) if more}
    refused = (struct for struct in inner if form_refusal(struct) is not None)
    return sorted(refused, key=lambda struct: struct.__name__)


def _row(place: Place) -> Row:
    return reference_of(place.struct)[place.name]


def _key(place: Place) -> tuple[Struct, Struct, str]:
    assert place.route.request is not None
    return place.route.request, place.struct, place.name


def has_one_value(place: Place) -> bool:
    """Whether it only says which form this is: there is nothing to choose."""
    values = [branch for branch in branches(place.declared) if branch is not type(None)]
    return all(get_origin(v) is Literal and len(get_args(v)) == 1 for v in values)


HINTS = [place for place in PLACES if isinstance(_row(place), Hint)]
REFUSED = [place for place in PLACES if isinstance(_row(place), RefusedField)]
NOTES = [
    place for place in PLACES if isinstance(_row(place), Note) or _key(place) in WITHOUT_EFFECT
]
HONOURED = [
    place
    for place in PLACES
    if isinstance(_row(place), Honoured)
    and _key(place) not in WITHOUT_EFFECT
    and not has_one_value(place)
]


def refusal_of(place: Place) -> RefusedField:
    row = reference_of(place.struct)[place.name]
    assert isinstance(row, RefusedField)
    return row


@pytest.mark.parametrize("struct", sorted(set(requests_types()), key=lambda item: item.__name__))
def test_every_field_has_a_row(struct: Struct) -> None:
    rows = reference_of(struct)
    declared = {field.encode_name for field in msgspec.structs.fields(struct)}
    if form_refusal(struct) is not None:
        assert rows == {}
        return
    assert set(rows) == declared
    assert set(bounds_of(struct, FACTS)) <= declared


def test_every_case_is_of_a_field_that_is_honoured() -> None:
    tried = {(struct, place.name) for place in HONOURED for struct in place.struct.__mro__}
    for struct, known in CASES.items():
        assert [name for name in known if (struct, name) not in tried] == []
    assert {_key(place) for place in PLACES} >= set(WITHOUT_EFFECT)


@pytest.mark.parametrize("schema", CLIENTS)
def test_every_field_of_the_client_is_in_the_schema(schema: Struct) -> None:
    theirs = set(CLIENTS[schema].__annotations__)
    assert theirs - set(schema.__struct_fields__) - HEADERS == set()


@pytest.mark.parametrize("place", HONOURED, ids=str)
def test_an_honoured_field_takes_effect_and_without_it_there_is_none(place: Place) -> None:
    case = case_of(place)
    assert case is not None, "no case shows the effect"
    assert shows_effect(place, case, given=True)
    assert not shows_effect(place, case, given=False)


@pytest.mark.parametrize("place", NOTES, ids=str)
def test_a_note_is_accepted_and_changes_nothing(place: Place) -> None:
    case = case_of(place) if isinstance(_row(place), Honoured) else None
    beside = BESIDE_NOTES.get((place.struct, place.name), {} if case is None else case.beside)
    assert place.route.request is not None
    known = place.route.request.__struct_fields__
    beside = {name: value for name, value in beside.items() if name in known}
    value = "yo" if place.declared is str else minimal(place.declared)
    noted = place.with_value(value if case is None else case.value)
    results = []
    for body in (noted, place.body if place.is_required else place.without()):
        engine = thinking()
        response = post(place.route, {**body, **beside}, engine)
        assert response.status_code == 200, response.text
        assert engine.chat_template is not None
        results.append((engine.submitted, engine.chat_template.texts, told(response)))
    assert results[0] == results[1]


def asking_value(place: Place, declared: Hint | RefusedField) -> Any:
    """A value that fits the type and asks for something."""
    fitting = minimal(place.declared) if place.declared is not Any else {"x": 1}
    values = (True, False, "x", "omitted", "low", [1], ["x"], [{"x": 1}], {"x": 1}, 2, fitting)
    return next(v for v in values if _fits(v, place) and not requests_nothing(declared, v))


@pytest.mark.parametrize("place", HINTS, ids=str)
def test_a_hint_without_effect_is_reported_and_changes_nothing(place: Place) -> None:
    hint = reference_of(place.struct)[place.name]
    assert isinstance(hint, Hint)
    beside = BESIDE_NOTES.get((place.struct, place.name), {})
    assert place.route.request is not None
    known = place.route.request.__struct_fields__
    beside = {name: value for name, value in beside.items() if name in known}
    given = {**place.with_value(asking_value(place, hint)), **beside}
    results = []
    for body in (given, {**place.without(), **beside}):
        engine = thinking()
        response = post(place.route, body, engine)
        assert response.status_code == 200, response.text
        assert engine.chat_template is not None
        reported = reports(response, place.path)
        results.append((engine.submitted, engine.chat_template.texts, reported))
    assert results[0] == (*results[1][:2], True)
    assert not results[1][2]
    strict = post(place.route, given, thinking(), STRICT)
    assert_names(strict, place.path)
    assert f"has no effect: {hint.why}" in error_of(strict)["message"]


@pytest.mark.parametrize("place", HINTS, ids=str)
def test_a_hint_that_requests_nothing_is_not_reported(place: Place) -> None:
    hint = reference_of(place.struct)[place.name]
    assert isinstance(hint, Hint)
    beside = BESIDE_NOTES.get((place.struct, place.name), {})
    assert place.route.request is not None
    beside = {n: v for n, v in beside.items() if n in place.route.request.__struct_fields__}
    for value in (None, *hint.passes):
        body = {**place.with_value(value), **beside}
        response = post(place.route, body, thinking(), STRICT)
        assert response.status_code == 200, response.text
        assert not reports(response, place.path)


def reports(response: httpx.Response, path: str) -> bool:
    """Whether the answer says that the field at `path` has no effect."""
    return re.sub(r"\[\d+\]", "[]", path) in response.headers.get("x-quickstep-ignored", "").split(
        ", "
    )


@pytest.mark.parametrize("place", REFUSED, ids=str)
def test_a_refused_field_is_400_with_its_name(place: Place, post_refused: Post) -> None:
    refusal = refusal_of(place)
    value = asking_value(place, refusal)
    response = post_refused(place.route, place.with_value(value))
    assert_names(response, place.path)
    assert f"{place.path} is not supported: {refusal.why}" in error_of(response)["message"]


@pytest.mark.parametrize("place", REFUSED, ids=str)
def test_a_refused_field_passes_where_it_requests_nothing(place: Place) -> None:
    for value in (None, *refusal_of(place).passes):
        assert post(place.route, place.with_value(value)).status_code == 200


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_null_means_not_given(place: Place, post_refused: Post) -> None:
    """It is wrong where the field has to be there, else the engine gets the same without it."""
    if place.is_required:
        assert_names(post_refused(place.route, place.with_value(None)), place.path)
        return
    null = outcome_of(place.route, json.dumps(place.with_value(None)))
    assert null == outcome_of(place.route, json.dumps(place.without()))


@cache
def outcome_of(route: ApiRoute, body: str) -> tuple[int, list[Submitted]]:
    """The status of a response, and what its engine got. Many fields have one body without them."""
    engine = FakeEngine()
    return post(route, json.loads(body), engine).status_code, engine.submitted


@pytest.mark.parametrize("place", [place for place in PLACES if place.declared is not Any], ids=str)
def test_a_wrong_type_is_400_with_the_fields_path(place: Place, post_refused: Post) -> None:
    wrong = next(value for value in ({}, 1.5, "a", True) if not _fits(value, place))
    assert_names(post_refused(place.route, place.with_value(wrong)), place.path)


def _fits(value: Any, place: Place) -> bool:
    try:
        msgspec.convert(value, place.declared)
    except msgspec.ValidationError:
        return False
    return True


def item_of(place: Place) -> Callable[[int], Any]:
    """The entries, where the field may be a list; no two have the same name."""
    lists = [branch for branch in branches(place.declared) if get_origin(branch) is list]
    parts = parts_of(place.struct).get(place.name)
    smallest = minimal(parts[0] if parts else get_args(lists[0])[0] if lists else None)

    def item(index: int) -> Any:
        if place.name != "tools":
            return smallest  # the same object: a list may take a million
        value = copy.deepcopy(smallest)
        value.get("function", value)["name"] = f"f{index}"
        return value

    return item


BOUNDED = [
    pytest.param(place, outside, inside, id=f"{place}:{number}")
    for place in PLACES
    if not isinstance(_row(place), RefusedField)
    for number, (outside, inside) in enumerate(
        beyond(bounds_of(place.struct, FACTS).get(place.name, {}), item_of(place))
    )
]


@pytest.mark.parametrize(("place", "outside", "inside"), BOUNDED)
def test_a_value_beyond_a_bound_is_400_and_one_at_it_is_taken(
    place: Place, outside: Any, inside: Any, post_refused: Post
) -> None:
    assert_names(post_refused(place.route, place.with_value(outside)), place.path)
    thinks = thinking()
    thinks.max_model_len = 2**16  # room for every tool
    response = post(place.route, place.with_value(inside), thinks)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("route", json_routes(), ids=lambda route: route.path)
@pytest.mark.parametrize("name", ["temprature", "best_off", "", "x" * 1000, "ä", "a`b"])
def test_an_unknown_field_is_reported_or_400_with_its_name(route: ApiRoute, name: str) -> None:
    body = {**minimal(route.request), name: 1}
    reported = post(route, body)
    # the only model of a server stays
    expected = 400 if route.path == "/v1/models/unload" else 200
    assert reported.status_code == post(route, minimal(route.request)).status_code == expected
    told = reported.headers["x-quickstep-ignored"]
    assert told == name.encode("unicode_escape").decode()[:1024]
    error = error_of(post(route, body, options=STRICT))
    assert "unknown" in error["message"]
    assert error.get("param", name) == name


@pytest.mark.parametrize("place", [place for place in PLACES if _forms(place.declared)], ids=str)
def test_a_refused_form_is_400_with_its_path(place: Place, post_refused: Post) -> None:
    for form in _forms(place.declared):
        response = post_refused(place.route, place.with_value([minimal(form)]))
        assert_names(response, f"{place.path}[0]")
