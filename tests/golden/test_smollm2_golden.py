"""A real public model answers, where it is installed as by `make demo`; more in `make real`."""

from __future__ import annotations

import pytest

from quickstep import LLM, SamplingParams
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import SMOLLM2, local_checkpoint


def test_smollm2_knows_the_capital_of_france_and_ends_its_answer() -> None:
    try:
        local_checkpoint(SMOLLM2)
    except ConfigError as error:
        pytest.skip(str(error))
    chat = [[{"role": "user", "content": "What is the capital of France?"}]]
    with LLM(SMOLLM2, max_model_len=512) as llm:
        (answer,) = llm.chat(chat, SamplingParams(temperature=0.0, max_tokens=16))
    assert answer.outputs[0].text == "The capital of France is Paris."
    assert answer.outputs[0].finish_reason == "stop"
