"""A context beyond the model's limit: an error with the way out, or scaled positions."""

from __future__ import annotations

from typing import Any

import pytest

from quickstep.errors import ConfigError
from quickstep.model.decoder_spec import LongContext
from quickstep.model.rope_spec import RopeKind
from quickstep.model.spec import parse_spec, with_context

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}
GEMMA: dict[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rms_norm_eps": 1e-6,
}


def llama(scaling: dict[str, Any]) -> dict[str, object]:
    return {**LLAMA, "rope_scaling": scaling}


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("max_model_len", [None, 1, 2048])
def test_a_context_within_the_limit_changes_nothing(
    max_model_len: int | None, allowed: bool
) -> None:
    spec = parse_spec(LLAMA)
    assert with_context(spec, max_model_len, allowed) is spec


def test_a_context_beyond_the_limit_is_an_error_that_says_the_limit_and_the_way_out() -> None:
    with pytest.raises(ConfigError) as refused:
        with_context(parse_spec(LLAMA), 2049, allow_longer=False)
    for part in ("2049", "2048", "--max-model-len", "--allow-long-context"):
        assert part in str(refused.value)


def test_plain_positions_are_scaled_as_a_yarn_checkpoint_of_that_factor_is() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    spec = with_context(parse_spec(LLAMA), 8192, allow_longer=True)
    assert spec.ropes == parse_spec(llama(yarn)).ropes
    assert spec.max_model_len == 8192
    assert spec.long_context == LongContext("yarn", 4.0, 2048)
    assert "8192" in spec.notes[-1] and "yarn, factor 4" in spec.notes[-1]


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}, 2048),
        ({"rope_type": "linear", "factor": 2.0}, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        (
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            2048,
        ),
    ],
)
def test_positions_that_are_scaled_already_keep_their_method(
    scaling: dict[str, Any], limit: int
) -> None:
    spec = with_context(parse_spec(llama(scaling)), 2 * limit, allow_longer=True)
    (rope,) = spec.ropes
    assert (rope.kind.value, rope.factor) == (scaling["rope_type"], 4.0)
    assert spec.long_context == LongContext(scaling["rope_type"], 2.0, limit)


def test_layers_with_a_window_keep_their_positions() -> None:
    plain = parse_spec(GEMMA)
    spec = with_context(plain, 4096, allow_longer=True)
    changed = {index for index, rope in enumerate(spec.ropes) if rope != plain.ropes[index]}
    assert changed == {layer.rope for layer in plain.layers if layer.window is None}
    assert {spec.ropes[index].kind for index in changed} == {RopeKind.YARN}
    assert len(changed) < len(spec.ropes)


def test_longrope_cannot_be_scaled_further() -> None:
    factors = [1.0] * 8
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    spec = parse_spec({**llama(scaling), "original_max_position_embeddings": 1024})
    with pytest.raises(ConfigError, match=r"longrope.*lower --max-model-len to 2048"):
        with_context(spec, 4096, allow_longer=True)
