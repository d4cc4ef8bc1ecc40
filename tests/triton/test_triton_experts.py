"""A mixture of experts as it is loaded, on the grouped kernels, interpreted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from op_checks.invariance import same_bits
from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder_weights import MoEWeights
from quickstep.model.layers.feed_forward import MixtureOfExperts
from quickstep.model.layers.layer_ops import LayerOps
from quickstep.model.sharding import Shard
from quickstep.model.spec import parse_spec
from quickstep.ops.reference import reference_ops
from quickstep.ops.reference.experts import route as reference_route
from quickstep.ops.table import ExpertWeights, Routing, RoutingRule
from quickstep.ops.triton import experts
from quickstep.ops.triton.backend import load_triton
from quickstep.ops.triton.experts import TritonExperts, pack_experts
from quickstep.ops.triton.linear import pack_linear
from quickstep.ops.triton.lora import TritonLoRA
from quickstep.ops.triton.routing import RoutingPlan, plan_of, route

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
        ops = LayerOps(table, spec, spec, Shard(), 0)
        outputs.append(MixtureOfExperts(ops, layer.mlp).forward(x, None, x))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)


def check_routing(scores: torch.Tensor, per_token: int, normalise: bool) -> None:
    """The bits of the reference; its plan, and the one made afterwards, sort the rows."""
    num_experts = scores.shape[1]
    expected, found = (
        one(scores, RoutingRule(per_token, normalise)) for one in (reference_route, route)
    )
    assert same_bits(found.chosen, expected.chosen)
    assert same_bits(found.weights, expected.weights)
    experts = expected.chosen.flatten()
    rows = torch.argsort(experts, stable=True)
    starts = torch.searchsorted(experts[rows], torch.arange(num_experts + 1))
    plans = [plan_of(expected.chosen, num_experts)]
    if found.plan is not None:
        assert isinstance(found.plan, RoutingPlan)
        plans.append(found.plan)
    for plan in plans:
        assert torch.equal(plan.rows.long(), rows)
        assert torch.equal(plan.starts.long(), starts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_routing_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    for num_tokens, num_experts, per_token in ((3, 8, 2), (9, 128, 8), (17, 128, 8), (40, 60, 4)):
        scores = torch.randn(num_tokens, num_experts, generator=generator) * 5
        check_routing(scores.to(dtype), per_token, normalise=True)
        check_routing(scores.round().to(dtype), per_token, normalise=False)  # many ties


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_a_token_whose_routing_is_not_finite_has_weights_of_nan_and_its_first_experts() -> None:
    scores = torch.randn(6, 16, generator=torch.Generator().manual_seed(8)) * 400
    scores[0, 3], scores[1, 4], scores[2], scores[3] = torch.inf, torch.nan, -torch.inf, torch.nan
    scores[4, 3:] = -torch.inf
    check_routing(scores, 6, normalise=True)
    routing = route(scores, RoutingRule(6, True))
    assert routing.weights[:4].isnan().all() and routing.weights[4:].isfinite().all()
    assert torch.equal(routing.chosen[:4], torch.arange(6).expand(4, 6))


@pytest.mark.usefixtures("products_in_order")
def test_the_tile_of_a_product_of_experts_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(9)
    matrices = [
        tuple(pack_linear(torch.randn(*shape, generator=generator), None) for _ in range(2))
        for shape in ((48, 80), (80, 24))
    ]
    weights = ExpertWeights(*matrices, pack_experts(*matrices))
    x = torch.randn(9, 80, generator=generator)
    routing = Routing(torch.arange(9)[:, None] % 2, torch.rand(9, 1, generator=generator))
    compute = TritonExperts(TritonLoRA())
    expected = compute(x, routing, weights, "silu", None)
    form = experts._float_form(x, x, 1)
    for block_t, block_n in ((64, 64), (128, 128)):
        other = {**form, "BLOCK_T": block_t, "BLOCK_N": block_n}
        monkeypatch.setattr(experts, "_float_form", lambda *_, other=other: other)
        assert same_bits(compute(x, routing, weights, "silu", None), expected)
