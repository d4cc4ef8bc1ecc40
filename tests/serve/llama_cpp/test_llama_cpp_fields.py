"""llama.cpp's `/completion`: values that are refused, and fields that take several forms.

Each field alone is tried in `test_request_fields`.
"""

import asyncio
from typing import Any

import httpx
import pytest
from client import client_of
from fake_engine import WORDS, FakeEngine

from quickstep.server.app import create_app
from quickstep.server.llama_cpp.request import SAMPLERS


def post(fields: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine())) as client:
            return await client.post("/completion", json={"prompt": "a", **fields})

    return asyncio.run(run())


def test_silence_is_no_limit_unless_the_model_has_one() -> None:
    for fields in ({}, {"n_predict": -1}, {"seed": -1}):
        engine = FakeEngine()
        post(fields, engine)
        assert engine.submitted[0].sampling.max_tokens is None
        assert engine.submitted[0].sampling.seed is None
    engine = FakeEngine(default_sampling={"max_tokens": 3})
    assert post({}, engine).json()["tokens_predicted"] == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": -3}, "n_predict"),
        ({"n_predict": 3, "max_tokens": 4}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"presence_penalty": 1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"dry_penalty_last_n": -2, "dry_multiplier": 1}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_probs": -1}, "n_probs"),
        ({"n_cmpl": 33}, "n_cmpl"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        ({"samplers": ["top_p", "top_k"]}, "samplers"),
        ({"samplers": ["top_k", "top_k"]}, "samplers"),
        ({"samplers": ["top_k", "temperature"], "temperature": 0.5}, "samplers"),
        ({"samplers": ["magic"]}, "samplers"),
        ({"logit_bias": [[5, True]]}, "logit_bias"),
        ({"logit_bias": [[5, 101]]}, "logit_bias"),
        ({"logit_bias": [[256, 1]]}, "logit_bias"),
        ({"logit_bias": {"-5": "x"}}, "logit_bias[...]"),
        ({"logit_bias": [["x" * 300, 1]]}, "logit_bias"),
        ({"logit_bias": [[5]]}, "logit_bias[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
        ({"response_fields": ["a"] * 65}, "response_fields"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    response = post(fields, engine)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
    assert not engine.submitted


@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [
        ("ab", [(1, 97, 98)]),
        ([1, 2], [(1, 2)]),
        (["a", 5], [(1, 97, 5)]),
        ([5, "a", "b"], [(5, 97, 98)]),
        (["a", "b"], [(1, 97), (1, 98)]),
        ([[1, 2], "b", {"prompt_string": "c"}], [(1, 2), (1, 98), (1, 99)]),
        ([[1, "b"]], [(1, 98)]),
        ({"prompt_string": "c"}, [(1, 99)]),
    ],
)
def test_prompts_take_all_of_llama_cpps_shapes(prompt: Any, submitted: list[Any]) -> None:
    engine = FakeEngine()
    answer = post({"prompt": prompt}, engine).json()
    assert [item.prompt for item in engine.submitted] == submitted
    assert isinstance(answer, list) == (len(submitted) > 1)


def test_several_completions_are_a_list() -> None:
    answer = post({"n_cmpl": 2, "prompt": ["a", "b"], "n_predict": 1}).json()
    assert [item["index"] for item in answer] == [0, 1, 2, 3]
    assert {item["content"] for item in answer} == {WORDS[0]}


@pytest.mark.parametrize(
    ("bias", "by_id"),
    [
        ([[5, False]], {5: -100.0}),
        ([["ab", -0.5]], {97: -0.5, 98: -0.5}),
        ({"5": 1, "ab": 2}, {5: 1.0, 97: 2.0, 98: 2.0}),
        ([["5", 1]], {53: 1.0}),
        ([], {}),
    ],
)
def test_biases_are_pairs_or_an_object_of_ids_or_texts(bias: Any, by_id: dict[int, float]) -> None:
    engine = FakeEngine()
    assert post({"logit_bias": bias}, engine).status_code == 200
    assert engine.submitted[0].sampling.logit_bias == by_id


def test_samplers_that_are_left_out_are_off() -> None:
    everything = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.5,
        "typical_p": 0.5,
        "repeat_penalty": 1.5,
        "presence_penalty": 1.0,
        "dry_multiplier": 1.0,
        "xtc_probability": 0.5,
    }
    engine = FakeEngine()
    post({**everything, "samplers": []}, engine)
    post({**everything, "samplers": list(SAMPLERS)}, engine)
    off, on = (item.sampling for item in engine.submitted)
    assert (off.temperature, off.top_k, off.top_p, off.min_p, off.typical_p) == (1, 0, 1, 0, 1)
    assert (off.repetition_penalty, off.presence_penalty, off.dry_multiplier) == (1, 0, 0)
    assert off.xtc_probability == 0
    assert (on.temperature, on.top_k, on.typical_p, on.xtc_probability) == (0.5, 5, 0.5, 0.5)


def test_llama_cpps_own_order_passes_where_the_temperature_changes_nothing() -> None:
    own = ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    assert post({"samplers": own, "temperature": 0}).status_code == 200
    assert post({"samplers": own}).status_code == 200
    engine = FakeEngine(default_sampling={"temperature": 0.6})
    assert post({"samplers": own}, engine).status_code == 400


def test_dry_may_look_back_over_everything_or_nothing() -> None:
    engine = FakeEngine()
    post({"dry_multiplier": 1.0, "dry_penalty_last_n": -1}, engine)
    post({"dry_multiplier": 1.0, "dry_penalty_last_n": 0}, engine)
    complete, none = (item.sampling for item in engine.submitted)
    assert (complete.dry_multiplier, complete.dry_range) == (1.0, 0)
    assert none.dry_multiplier == 0.0
