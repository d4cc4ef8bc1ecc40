"""Every field of every request schema, nested ones included: honoured, or refused by name.

The rows are those of the reference (`field_reference`), the effects stand in `field_cases`, the
bounds in `field_bounds`; the first tests demand that none of them lacks a field.
"""

import asyncio
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import httpx
import msgspec
import pytest
from api_cases import exchange
from bound_values import beyond
from client import MESSAGES
from fake_engine import FakeEngine, FakeTemplate, FakeTokenizer
from field_cases import OPENAI_CASES, Case, Seen
from field_places import PLACES, Place, json_routes, minimal, structs_in
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from quickstep.engine.tool_calls.formats import formats_of
from quickstep.server.api_route import ApiRoute
from quickstep.server.app import create_app
from quickstep.server.field_bounds import SchemaFacts, bounds_of
from quickstep.server.field_reference import REFUSED_FORMS, Honoured, Row, reference_of
from quickstep.server.options import RequestLimits, ServerOptions
from quickstep.server.refused import Refusal
from quickstep.server.schema_types import branches, reachable_structs
from quickstep.server.schemas import ChatRequest, CompletionRequest

CASES = OPENAI_CASES
REQUIRED: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "a"},
}
OPENAI: dict[type[msgspec.Struct], Any] = {
    ChatRequest: chat_create_params.CompletionCreateParamsBase,
    CompletionRequest: completion_create_params.CompletionCreateParamsBase,
}
LIMITS = RequestLimits(logit_bias=9)  # so few that the fake vocabulary has ids for them
FACTS = SchemaFacts(LIMITS, vocab_size=FakeTokenizer.vocab_size)


def post(route: ApiRoute, body: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    app = create_app(engine or FakeEngine(), ServerOptions(limits=LIMITS))
    return asyncio.run(exchange(app, method="POST", url=route.path, json=body))


def assert_names(response: httpx.Response, path: str) -> None:
    """400, and the error is about `path` or what is in it."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    # Anthropic's errors have no place for the field's name, so the message begins with it
    param = error["param"] if "param" in error else error["message"].split()[0].rstrip(":")
    assert param == path or param.startswith((f"{path}.", f"{path}[")), error


def requests_types() -> Iterator[type[msgspec.Struct]]:
    for route in json_routes():
        assert route.request is not None
        yield from reachable_structs(route.request)


def cases_of(struct: type[msgspec.Struct]) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for parent in reversed(struct.__mro__):
        found |= CASES.get(parent, {})
    return found


def _forms(declared: Any) -> list[type[msgspec.Struct]]:
    inner = {struct for struct, more in structs_in(declared) if more}
    return sorted(inner & set(REFUSED_FORMS), key=lambda struct: struct.__name__)


def _row(place: Place) -> Row | None:
    return reference_of(place.struct).get(place.name)


# The effects of the other surfaces' fields stand in tables of their own (`test_*_fields`).
TRIED_HERE = {struct for schema in REQUIRED for struct in reachable_structs(schema)}
HONOURED = [
    place
    for place in PLACES
    if place.route.request in REQUIRED and isinstance(_row(place), Honoured)
]
REFUSED = [place for place in PLACES if isinstance(_row(place), Refusal)]


def refusal_of(place: Place) -> Refusal:
    row = reference_of(place.struct)[place.name]
    assert isinstance(row, Refusal)
    return row


@pytest.mark.parametrize("struct", sorted(set(requests_types()), key=lambda item: item.__name__))
def test_every_field_has_a_row_and_every_honoured_one_a_case(struct: type[msgspec.Struct]) -> None:
    rows = reference_of(struct)
    declared = {field.encode_name for field in msgspec.structs.fields(struct)}
    if struct in REFUSED_FORMS:
        assert rows == {}
        return
    assert set(rows) == declared
    assert set(bounds_of(struct, FACTS)) <= declared
    if struct in TRIED_HERE:
        assert set(cases_of(struct)) == {n for n, row in rows.items() if isinstance(row, Honoured)}


@pytest.mark.parametrize("schema", OPENAI)
def test_every_field_of_openais_client_is_in_the_schema(schema: type[msgspec.Struct]) -> None:
    assert set(OPENAI[schema].__annotations__) - set(schema.__struct_fields__) == set()


@pytest.mark.parametrize("place", HONOURED, ids=str)
def test_an_honoured_field_takes_effect(place: Place) -> None:
    case = cases_of(place.struct)[place.name]
    engine = FakeEngine()
    assert place.route.request is not None
    response = post(place.route, {**REQUIRED[place.route.request], **case.fields}, engine)
    assert response.status_code == 200, response.text
    template = engine.chat_template
    assert template is not None
    assert case.holds(Seen(engine.submitted[0], template.rendered, response.text))


@pytest.mark.parametrize("place", REFUSED, ids=str)
def test_a_refused_field_is_400_with_its_name(place: Place) -> None:
    refusal = refusal_of(place)
    fitting = minimal(place.declared) if place.declared is not Any else {"x": 1}
    values = (True, False, "x", [1], 2, fitting)
    value = next(v for v in values if _fits(v, place) and not refusal.allows(v))
    engine = FakeEngine()
    response = post(place.route, place.with_value(value), engine)
    assert_names(response, place.path)
    assert f"{place.path} is not supported" in response.json()["error"]["message"]
    assert not engine.submitted


@pytest.mark.parametrize("place", REFUSED, ids=str)
def test_a_refused_field_passes_where_it_asks_for_nothing(place: Place) -> None:
    for value in (None, *refusal_of(place).passes):
        assert post(place.route, place.with_value(value)).status_code == 200


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_null_means_not_given(place: Place) -> None:
    """It is wrong where the field has to be there, else the engine gets the same without it."""
    if place.is_required:
        assert_names(post(place.route, place.with_value(None)), place.path)
        return
    absent, null = FakeEngine(), FakeEngine()
    answers = [
        post(place.route, place.without(), absent),
        post(place.route, place.with_value(None), null),
    ]
    assert answers[0].status_code == answers[1].status_code
    assert absent.submitted == null.submitted


@pytest.mark.parametrize("place", [place for place in PLACES if place.declared is not Any], ids=str)
def test_a_wrong_type_is_400_with_the_fields_path(place: Place) -> None:
    engine = FakeEngine()
    wrong = next(value for value in ({}, 1.5, "a", True) if not _fits(value, place))
    assert_names(post(place.route, place.with_value(wrong), engine), place.path)
    assert not engine.submitted


def _fits(value: Any, place: Place) -> bool:
    try:
        msgspec.convert(value, place.declared)
    except msgspec.ValidationError:
        return False
    return True


def item_of(place: Place) -> Any:
    """An entry, where the field may be a list."""
    lists = [branch for branch in branches(place.declared) if get_origin(branch) is list]
    return minimal(get_args(lists[0])[0]) if lists else None


BOUNDED = [
    pytest.param(place, outside, inside, id=f"{place}:{number}")
    for place in PLACES
    if not isinstance(_row(place), Refusal)
    for number, (outside, inside) in enumerate(
        beyond(bounds_of(place.struct, FACTS).get(place.name, {}), item_of(place))
    )
]


@pytest.mark.parametrize(("place", "outside", "inside"), BOUNDED)
def test_a_value_beyond_a_bound_is_400_and_one_at_it_is_taken(
    place: Place, outside: Any, inside: Any
) -> None:
    engine = FakeEngine()
    assert_names(post(place.route, place.with_value(outside), engine), place.path)
    assert not engine.submitted
    thinks = FakeEngine(chat_template=FakeTemplate(formats_of("<tool_call></think>")))
    response = post(place.route, place.with_value(inside), thinks)
    if response.status_code != 200:  # for another reason than the bound
        error = response.json()["error"]
        assert error.get("param") != place.path or "is not supported" in error["message"]


@pytest.mark.parametrize("route", json_routes(), ids=lambda route: route.path)
@pytest.mark.parametrize("name", ["temprature", "best_off", "", "x" * 1000, "ä", "a`b"])
def test_an_unknown_field_is_400_with_its_name(route: ApiRoute, name: str) -> None:
    error = post(route, {**minimal(route.request), name: 1}).json()["error"]
    assert "unknown" in error["message"]
    assert error.get("param", name) == name


@pytest.mark.parametrize("place", [place for place in PLACES if _forms(place.declared)], ids=str)
def test_a_refused_form_is_400_with_its_path(place: Place) -> None:
    for form in _forms(place.declared):
        engine = FakeEngine()
        response = post(place.route, place.with_value([minimal(form)]), engine)
        assert_names(response, f"{place.path}[0]")
        assert not engine.submitted
