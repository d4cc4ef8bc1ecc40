"""Fallback chains: which step a request gets, and which chains are refused at start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickstep.core.fallback import (
    Cause,
    Decision,
    NoSpeculation,
    OtherModel,
    Refuse,
    Route,
    ShorterOutput,
    Situation,
    Upstream,
    check_names,
    decide,
    read_routes,
)
from quickstep.errors import ConfigError

UPSTREAM = Upstream("https://api.example.com/v1", "big", "KEY")
STEPS = (
    ShorterOutput(64),
    NoSpeculation(),
    OtherModel("small"),
    UPSTREAM,
)
ROUTE = Route("big", STEPS)
SECTION = {
    "big": [
        {"max_tokens": 64},
        {"speculation": False},
        {"model": "small"},
        {"upstream": "https://api.example.com/v1/", "model": "big", "key_env": "KEY"},
    ]
}


@pytest.mark.parametrize(
    ("situation", "step"),
    [
        (Situation(Cause.RATE_LIMIT), STEPS[0]),
        (Situation(Cause.RATE_LIMIT, max_tokens=64), None),
        (Situation(Cause.MEMORY, max_tokens=65), STEPS[0]),
        (Situation(Cause.DEADLINE, max_tokens=65), STEPS[2]),
        (Situation(Cause.OVERLOAD), STEPS[2]),
        (Situation(Cause.FAILURE), STEPS[1]),
        (Situation(Cause.FAILURE, speculates=False), STEPS[2]),
        (Situation(Cause.OVERLOAD, unavailable=frozenset({"small"})), UPSTREAM),
        (Situation(Cause.OVERLOAD, left_s=1.0, first_byte_s={"small": 2.0}), UPSTREAM),
        (Situation(Cause.OVERLOAD, num_tried=3), UPSTREAM),
        (Situation(Cause.OVERLOAD, num_tried=3, is_openai=False), Refuse(503)),
        (Situation(Cause.OVERLOAD, num_tried=3, left_s=0.01), Refuse(503)),
        (Situation(Cause.OVERLOAD, keeps_model=True), Refuse(503)),
        (Situation(Cause.FAILURE, left_s=0.0), Refuse(503)),
        (Situation(Cause.FAILURE, num_tried=4), Refuse(503)),
        (Situation(Cause.MEMORY, num_tried=4), None),
    ],
)
def test_first_step_that_helps_is_chosen(situation, step):
    decision = decide(ROUTE, situation)
    assert (None if decision is None else decision.step) == step


SITUATIONS = st.builds(
    Situation,
    cause=st.sampled_from(Cause),
    max_tokens=st.none() | st.integers(1, 100),
    speculates=st.booleans(),
    keeps_model=st.booleans(),
    is_openai=st.booleans(),
    left_s=st.none() | st.floats(-1.0, 3.0),
    unavailable=st.frozensets(st.sampled_from(["small", UPSTREAM.url])),
    first_byte_s=st.dictionaries(st.sampled_from(["small", UPSTREAM.url]), st.floats(0.0, 4.0)),
)


@given(st.permutations(STEPS), SITUATIONS)
def test_chain_ends_and_tries_each_step_once(steps, situation):
    route, tried = Route("big", tuple(steps)), []
    decision: Decision | None = Decision(NoSpeculation(), 0)
    while (decision := decide(route, situation)) is not None:
        tried.append(decision.step)
        if isinstance(decision.step, Refuse):
            break
        situation = Situation(
            **{field: getattr(situation, field) for field in situation.__struct_fields__}
            | {"num_tried": decision.num_tried}
        )
    assert len(tried) == len(set(tried)) <= len(steps) + 1
    if situation.keeps_model:
        assert not any(isinstance(step, OtherModel | Upstream) for step in tried)
    left_s = situation.left_s
    for step in tried:
        name = getattr(step, "name", getattr(step, "url", None))
        if name is not None:
            assert name not in situation.unavailable
            assert left_s is None or situation.first_byte_s.get(name, 0.0) < left_s


def test_routes_are_read():
    assert read_routes(SECTION) == {"big": ROUTE}
    check_names(read_routes(SECTION), ("big", "small"))


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([], "must be a list of 1 to 16 steps"),
        ({"max_tokens": 1}, "must be a list"),
        ([3], "must have one of max_tokens, speculation"),
        ([{"max_token": 3}], "must have one of"),
        ([{"max_tokens": 3, "model": "x"}], "has 'model', which max_tokens does not take"),
        ([{"max_tokens": True}], "max_tokens is True, it must be at least 1"),
        ([{"max_tokens": 8}, {"max_tokens": 9}], "it must be below the 8"),
        ([{"speculation": True}], "can only be false"),
        ([{"model": "big"}], "leads back to big, where the chain began"),
        ([{"model": "x"}, {"model": "x"}], "repeats model=x"),
        ([{"refuse": 503}, {"model": "x"}], "is never tried"),
        ([{"refuse": 404}], "must be 429 or 503"),
        ([{"upstream": "file:///etc", "model": "x"}], "must be a URL such as"),
        ([{"upstream": "http://host:port/v1", "model": "x"}], "must be a URL such as"),
        ([{"upstream": "http://ann:pw@host/v1", "model": "x"}], "no user, password"),
        ([{"upstream": "http://host/v1"}], "model is None, it must be a name"),
    ],
)
def test_bad_chain_is_refused(steps, problem):
    with pytest.raises(ConfigError, match=problem):
        read_routes({"big": steps})


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="there is no model 'small'; the server has big"):
        check_names(read_routes(SECTION), ("big",))
    with pytest.raises(ConfigError, match="there is no model 'big'"):
        check_names(read_routes(SECTION), ("small",))
