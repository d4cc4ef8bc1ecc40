"""The options of `LLM`: each reaches its place, unknown ones are refused by name."""

from __future__ import annotations

import pytest

from quickstep.config import ContentFormat, EngineConfig, InputConfig, LoadConfig, PolicyName
from quickstep.engine.llm import LLMOptions, engine_config, option_places
from quickstep.errors import ConfigError


def test_without_options_everything_is_the_default():
    assert engine_config("demo", {}) == EngineConfig()
    assert engine_config("demo", dict.fromkeys(option_places())) == EngineConfig()


def test_the_signature_has_the_declared_options():
    assert set(LLMOptions.__annotations__) == set(option_places())


def test_options_reach_their_sections():
    config = engine_config(
        "some/model",
        {
            "dtype": "float32",
            "max_model_len": 128,
            "num_gpu_blocks_override": 9,
            "enable_prefix_caching": False,
            "policy": "prefill-first",
            "seed": 5,
            "inter_token_target_s": 1,
            "chat_template": "{{ messages }}",
            "chat_template_content_format": "string",
        },
    )
    assert config.inputs == InputConfig(
        chat_template="{{ messages }}", content_format=ContentFormat.STRING
    )
    assert config.scheduler.inter_token_target_s == 1
    assert config.load == LoadConfig(model="some/model", dtype="float32")
    assert config.cache.num_blocks == 9
    assert not config.cache.prefix_caching
    assert config.max_model_len == 128
    assert config.scheduler.policy is PolicyName.PREFILL_FIRST
    assert config.seed == 5


def test_the_adapters_in_memory_limit_those_in_compute_memory():
    lora = engine_config("demo", {"enable_lora": True, "max_cpu_loras": 2}).lora
    assert (lora.max_loras, lora.max_cpu_loras) == (2, 2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_model_length": 5}, "max_model_len"),
        ({"zzz": 1}, "nearest"),
        ({"trust_remote_code": True}, "never run"),
        ({"num_blocks": 5, "num_gpu_blocks_override": 6}, "both"),
        ({"policy": "fastest"}, "mixed"),
        ({"chat_template": "/nowhere"}, "/nowhere cannot be read"),
        ({"chat_template": "{% end %}"}, "at line 1"),
        ({"chat_template_content_format": "list"}, "auto, string, openai"),
        ({"block_size": 12}, "power of two"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_num_seqs": "8"}, "type int"),
        ({"max_num_seqs": True}, "type int"),
        ({"offline": 1}, "type bool"),
        ({"seed": 1.5}, "int"),
        ({"inter_token_target_s": "fast"}, "float"),
    ],
)
def test_bad_options_say_what_to_do(options, says):
    with pytest.raises(ConfigError, match=says):
        engine_config("demo", options)
