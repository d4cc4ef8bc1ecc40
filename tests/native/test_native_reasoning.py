"""A grammar after the reasoning, sampled by native kernels in the bundled model."""

from __future__ import annotations

import json

from quickstep import LLM, SamplingParams
from quickstep.types import Grammar

GRAMMAR = Grammar.of_json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "s": {"type": "string", "maxLength": 8}},
        "required": ["a", "s"],
        "additionalProperties": False,
    }
)


def test_a_grammar_follows_the_reasoning_and_a_batch_changes_nothing():
    samplings = [
        SamplingParams(
            grammar=GRAMMAR,
            reasoning_tags=("<think>", "</think>"),
            inside_reasoning=is_open,
            thinking_budget=budget,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=5,
        )
        for is_open in (True, False)
        for budget, max_tokens in ((6, 80), (None, 50))
        for temperature in (0.0, 1.0)
    ]
    prompt = "def f("
    llm = LLM("demo", device="cpu", num_blocks=64)
    try:
        together = llm.generate([prompt] * len(samplings), samplings, use_tqdm=False)
        alone = [llm.generate([prompt], [one], use_tqdm=False)[0] for one in samplings]
    finally:
        llm.close()
    for output, single, sampling in zip(together, alone, samplings, strict=True):
        (answer,) = output.outputs
        assert answer.token_ids == single.outputs[0].token_ids
        assert answer.finish_reason == "stop"
        thoughts, tag, rest = answer.text.rpartition("</think>")
        assert set(json.loads(rest)) == {"a", "s"}
        assert bool(tag) or not sampling.inside_reasoning
        assert thoughts or not sampling.inside_reasoning
