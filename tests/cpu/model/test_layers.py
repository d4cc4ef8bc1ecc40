"""Layers are objects: a mixer of another kind needs no change of the decoder or the cache."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from msgspec.structs import replace
from paged_driver import PagedDriver
from torch import Tensor

from adapter_files import SMALL_LLAMA
from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_spec import KVGroup, KVSize, ModelSpec, kv_groups
from quickstep.model.decoder_weights import LayerWeights
from quickstep.model.interface import KVLayout
from quickstep.model.layers.interface import LayerStep, Mixer
from quickstep.model.layers.layer_ops import LayerOps
from quickstep.model.layers.stack import CachePlaces, build_layers, mixer_of
from quickstep.model.sharding import Shard, shard_spec
from quickstep.model.sizing import kv_bytes_per_token
from quickstep.ops.reference import reference_ops

CPU = torch.device("cpu")
STATE = 12
DECAY = 0.75
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [8, 2, 8, 1, 8, 2]]


class DecayingSum:
    """A linear state space: the state after a token is that before it times `DECAY`, plus the
    token's own. The cache keeps the state after each token.
    """

    kv_size = KVSize(1, STATE)

    def __init__(self, ops: LayerOps, place: int) -> None:
        generator = torch.Generator().manual_seed(ops.index)
        size = ops.spec.hidden_size
        self._ops = ops.table
        self._into = self._ops.pack_linear(torch.randn(STATE, size, generator=generator), None)
        self._out_of = self._ops.pack_linear(torch.randn(size, STATE, generator=generator), None)
        self._place = place

    def write(self, x: Tensor, step: LayerStep) -> tuple[Tensor, ...]:
        layout, states = step.layout, self._ops.linear(x, self._into)
        kept = torch.as_tensor(step.kv.keys[self._place]).view(-1, STATE)
        for token, (position, slot) in enumerate(
            zip(layout.positions.tolist(), layout.slot_mapping.tolist(), strict=True)
        ):
            if position:
                row = sum(token >= offset for offset in layout.row_offsets) - 1
                block, place = divmod(position - 1, layout.block_size)
                before = kept[int(layout.block_tables[row, block]) * layout.block_size + place]
                states[token] += DECAY * before
            kept[slot] = states[token]
        return (states,)

    def read(self, rows: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        return self._ops.linear(rows[0], self._out_of)


def mixed(ops: LayerOps, weights: LayerWeights, places: CachePlaces) -> Mixer | None:
    """Attention in the first layer, a state in the others."""
    return DecayingSum(ops, places.kv) if ops.index else mixer_of(ops, weights, places)


def small_model() -> Decoder:
    spec = replace(SMALL_LLAMA, num_layers=3, layers=SMALL_LLAMA.layers[:1] * 3)
    values = RandomValues(torch.float32, CPU, 1, None)
    model = random_model(spec, reference_ops(), values, 64, None)
    assert isinstance(model, Decoder)
    return model


def hybrid_model() -> Decoder:
    model, shard = small_model(), Shard()
    return Decoder(
        model.spec,
        model.weights,
        model.ropes,
        model.ops,
        64,
        "hybrid",
        shard,
        partial(build_layers, mixer_of=mixed),
    )


def test_a_mixer_with_a_state_runs_in_the_decoder() -> None:
    model, attention_only = hybrid_model(), small_model()
    texts, others = (
        [row.token_ids for row in PagedDriver(made).generate(PROMPTS, 6, 64)]
        for made in (model, attention_only)
    )
    assert texts != others
    assert all(text[: len(prompt)] == prompt for text, prompt in zip(texts, PROMPTS, strict=True))


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_a_state_has_the_same_bits_in_chunks_and_alone(chunk: int) -> None:
    model = hybrid_model()
    together = PagedDriver(model.with_ops(reference_ops())).generate(PROMPTS, 6, chunk)
    for prompt, row in zip(PROMPTS, together, strict=True):
        [alone] = PagedDriver(model).generate([prompt], 6, 64)
        assert alone.token_ids == row.token_ids
        assert torch.equal(torch.cat(alone.logits), torch.cat(row.logits))


def test_the_cache_keeps_what_the_mixers_declare() -> None:
    model = hybrid_model()
    attention = model.spec.kv_size
    layout = model.kv_layout
    assert layout.groups == (KVGroup((0,), attention), KVGroup((1, 2), KVSize(1, STATE)))
    kv = PagedDriver(model, num_blocks=5, block_size=4).kv
    assert [tuple(keys.shape) for keys in kv.keys] == [
        (5, 4, attention.num_kv_heads, attention.head_size),
        (5, 4, 1, STATE),
        (5, 4, 1, STATE),
    ]
    assert sum(tensor.nbytes for tensor in kv.tensors) == 20 * layout.bytes_per_token


def test_tree_moves_reach_layers_of_all_sizes() -> None:
    kv = PagedDriver(hybrid_model(), num_blocks=5, block_size=4).kv
    tensors = [torch.as_tensor(tensor) for tensor in kv.tensors]
    for tensor in tensors:
        tensor.view(20, -1)[7] = 1.0
    reference_ops().move_kv(kv, [(7, 3)])
    assert all(bool((tensor.view(20, -1)[3] == 1.0).all()) for tensor in tensors)


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)])
def test_a_plan_counts_what_the_mixers_declare(shard: Shard) -> None:
    spec: ModelSpec = shard_spec(small_model().spec, shard)
    declared = build_layers(small_model().spec, small_model().weights, reference_ops(), shard)
    groups = kv_groups([layer.kv_size for layer in declared.layers])
    assert groups == spec.kv_groups
    assert KVLayout(groups, torch.float32).bytes_per_token == kv_bytes_per_token(spec, 4)


def test_a_layer_that_keeps_nothing_is_in_no_group() -> None:
    size = KVSize(2, 8)
    assert kv_groups([size, None, size]) == (KVGroup((0, 2), size),)
    assert KVLayout(kv_groups([None, size]), torch.float32).head_shapes == ((2, 8),)
