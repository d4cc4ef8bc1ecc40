"""A mixture of experts as it is loaded, on the grouped kernels, interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import MoEWeights
from quickstep.model.experts import mixture_of_experts
from quickstep.model.spec import parse_spec
from quickstep.ops.reference import reference_ops
from quickstep.ops.triton.backend import load_triton

CPU = torch.device("cpu")
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_loaded_mixture_of_experts_is_grouped_and_near_the_reference(
    quantization: str | None,
) -> None:
    spec = parse_spec(MIXTRAL)
    values = RandomValues(torch.float32, CPU, 0, quantization)
    triton = load_triton(CPU)
    assert triton is not None
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(4))
    outputs = []
    for table in (triton, reference_ops()):
        [layer] = random_model(spec, table, values, 64).weights.layers
        assert isinstance(layer.mlp, MoEWeights)
        assert (layer.mlp.experts.data is not None) == (table is triton)
        outputs.append(mixture_of_experts(table, layer.mlp, x, spec, 0, None))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)
