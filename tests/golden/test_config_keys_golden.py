"""Keys that the models of transformers read are never taken for another program's."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields

# decoders, native or not
FAMILIES = """
    llama mistral qwen2 qwen3 gemma2 gemma3 phi3 smollm3 olmo2 granite mixtral qwen3_moe gpt_oss
    gemma4 cohere2 glm4 deepseek_v3 llama4 nemotron falcon_h1 qwen3_next minimax exaone4 bamba
    granitemoehybrid olmoe phimoe starcoder2 stablelm persimmon jamba dbrx gpt_neox bloom falcon
"""
# Of other parts than the text decoder's forward pass, or what a pass does not depend on.
ELSEWHERE = re.compile(
    r"vision|audio|image|video|text_config|num_labels|loss|dropout|_token_id$|_drop$|^dtype$"
    r"|^standardize$|num_channels|pixel_shuffle|slow_but_exact"
    r"|initializer|keys_to_ignore|output_|return_dict|use_cache|num_return|problem_type"
    r"|^max_(length|seq_len|model_len)$|^architectures$|transformers_version|gradient"
)


@pytest.mark.parametrize("family", FAMILIES.split())
def test_a_key_that_a_decoder_reads_is_honoured_or_refused(family: str) -> None:
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    source = inspect.getsource(module)
    names = set(re.findall(r"\bconfig\.([a-z_0-9]+)\b(?!\()", source))
    names |= set(re.findall(r'getattr\((?:self\.)?config, "([a-z_0-9]+)"', source))
    assert names
    accepted = []
    for name in names:
        fields = ConfigFields({name: 3}, {}, "config.json")
        try:
            if fields.foreign({}):
                accepted.append(name)
        except ConfigError:
            pass
    assert [name for name in accepted if not ELSEWHERE.search(name)] == []
