"""Tokens that a grammar forces are drafts."""

import json

import pytest

from quickstep import LLM, Grammar, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "temperature_in_celsius": {"type": "integer", "minimum": 0, "maximum": 99},
        "location_of_the_station": {"enum": ["north", "south"]},
    },
    "required": ["temperature_in_celsius", "location_of_the_station"],
    "additionalProperties": False,
}
KEYS = Grammar.of_json_schema(SCHEMA)


def generated(method, **sampling):
    params = SamplingParams(max_tokens=80, seed=4, logprobs=1, **sampling)
    options = {"num_threads": 1, "max_model_len": 256, "num_blocks": 64}
    with LLM("demo", speculative_config={"method": method}, **options) as llm:
        [output] = llm.generate(["The weather is"], params, use_tqdm=False)
        [timings] = output.metrics.sequences
        return output.outputs[0], timings


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_keys_of_an_object_are_drafted_and_accepted(temperature):
    expected, without = generated("off", temperature=temperature, grammar=KEYS)
    found, timings = generated("suffix", temperature=temperature, grammar=KEYS)
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert json.loads(found.text)
    assert without.num_drafts == 0
    assert timings.num_accepted > len(found.token_ids) // 2
