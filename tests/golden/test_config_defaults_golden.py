"""A key that a config leaves out, or sets to null, means what transformers' config class says."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import pytest
import transformers

from quickstep.errors import ConfigError
from quickstep.model.architectures import ARCHITECTURES, WRAPPERS
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.spec import parse_spec

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
# without which a family cannot run, whatever its class says
NEEDED: dict[str, dict[str, object]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 3},
    "Gemma3nForConditionalGeneration": {"num_kv_shared_layers": 3},
}
# Quickstep refuses to guess these where a family has no default of its own in the table.
SIZE_KEYS = SIZES.keys() - {"num_key_value_heads", "pad_token_id"}
OLDER_KEYS = (
    {"rope_theta": 5000.0, "rope_scaling": None},
    {"rope_theta": 5000.0, "rope_parameters": None},
    {"rope_scaling": None},
    {"partial_rotary_factor": None},
    {"layer_types": None},
    {"sliding_window_pattern": None},
    {"no_rope_layers": None},
    {"original_max_position_embeddings": None},
)


def config_class(architecture: str) -> type[transformers.PreTrainedConfig]:
    if architecture == "KimiK25ForConditionalGeneration":
        return transformers.DeepseekV3Config  # of its text part
    if architecture == "MiMoForCausalLM":
        return transformers.Qwen2Config  # the same keys
    text_alone = {
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Gemma3nForCausalLM",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
    family = architecture.partition("For")[0] + ("Text" if architecture in text_alone else "")
    found: type[transformers.PreTrainedConfig] = getattr(transformers, f"{family}Config")
    return found


def complete(architecture: str, values: Mapping[str, object]) -> dict[str, object]:
    """`values` with everything else that transformers would run them with, spelled out.

    Raises what transformers raises for values that it refuses.
    """
    given = {key: value for key, value in values.items() if key != "model_type"}
    return config_class(architecture)(**given).to_dict() | {"architectures": [architecture]}


def sizes_of(architecture: str) -> dict[str, object]:
    return SIZES | NEEDED.get(architecture, {})


def parse(architecture: str, values: Mapping[str, object]) -> ModelSpec:
    return parse_spec(dict(values) | {"architectures": [architecture]})


def changed_configs(architecture: str) -> list[tuple[str, dict[str, object]]]:
    """A complete config of the family with each key left out in turn, then with each one null."""
    # `layer_types` and the parts of rope follow from other keys where they are not spelled out
    full = complete(architecture, sizes_of(architecture))
    derived = {"layer_types", "transformers_version", "architectures"}
    base = {key: value for key, value in full.items() if key not in derived}
    changed = [
        (f"without {key}", {k: v for k, v in base.items() if k != key})
        for key in base
        if key not in SIZE_KEYS
    ]
    changed += [(f"with null {key}", base | {key: None}) for key in base]
    older = {key: value for key, value in base.items() if key != "rope_parameters"}
    return [*changed, *((f"with {extra}", older | extra) for extra in OLDER_KEYS)]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_keys_that_a_config_leaves_out_or_sets_to_null_mean_what_transformers_means(
    architecture: str,
) -> None:
    differing = []
    num_compared = 0
    for name, values in changed_configs(architecture):
        try:
            spelled_out = complete(architecture, values)
            if complete(architecture, deepcopy(spelled_out)) != spelled_out:
                continue  # what transformers writes of it is another config to itself
            expected = parse(architecture, spelled_out)
        except (ConfigError, ValueError, TypeError, AttributeError, ZeroDivisionError):
            continue  # refused by transformers, or by us in its complete form
        except Exception as error:
            assert "Validation" in type(error).__name__, name
            continue
        num_compared += 1
        if parse(architecture, values) != expected:
            differing.append(name)
    assert not differing
    assert num_compared > len(SIZES)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_config_that_leaves_out_all_defaults_reads_as_the_complete_one(architecture: str) -> None:
    sizes = sizes_of(architecture)
    config = config_class(architecture)(**sizes)
    assert parse(architecture, sizes) == parse(architecture, config.to_dict())
    written = config.to_diff_dict()  # as `save_pretrained` writes it
    assert parse(architecture, sizes | written) == parse(architecture, config.to_dict())


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_a_text_part_that_leaves_out_its_sizes_has_those_of_its_class(wrapper: str) -> None:
    text = config_class(WRAPPERS[wrapper])(pad_token_id=0)
    outer = {"architectures": [wrapper]}
    expected = parse_spec(outer | {"text_config": text.to_dict()})
    assert parse_spec(outer | {"text_config": {"model_type": text.model_type}}) == expected
