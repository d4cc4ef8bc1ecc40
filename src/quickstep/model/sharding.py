"""Which part of a model each rank of a tensor-parallel group holds, and reading only that part.

Every matrix is divided by its outputs: queries, keys and values by heads, gates and ups by columns,
the output and down projections by the hidden size, embedding and output projection by the
vocabulary. A rank then computes some outputs of every product exactly as one process computes all
of them, from inputs that all ranks have, and gathers copy the parts together: no sum is divided, so
no bit depends on the number of ranks (docs/design/0057). Norms are on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.adapters.lora_modules import (
    Projection,
    embedding_number,
    is_shared,
    lm_head_number,
)
from quickstep.model.checkpoint.tensor_schema import LATENT_HEADS, bias_of
from quickstep.model.chosen_rows import ChosenRows, NumberedRows, module_of, taken_rows
from quickstep.model.decoder_spec import LatentSpec, ModelSpec, QKNorm
from quickstep.model.sizing import ElementBytes, elements_of_part, weights_of
from quickstep.ops.table import LoRAPart, Ranks
from quickstep.ops.tensors import FLOAT32, Array, HostTensor

if TYPE_CHECKING:
    from quickstep.model.checkpoint.tensor_reader import TensorSource
    from quickstep.model.checkpoint.weights import DecoderNames

# of the matrices of a layer, as a checkpoint names the complete one
_MODULES = {
    Projection.QKV: "qkv_proj",
    Projection.O_PROJ: "o_proj",
    Projection.GATE_UP: "gate_up_proj",
    Projection.DOWN_PROJ: "down_proj",
    Projection.Q_B: "q_b_proj",
}
_TILE = 32  # outputs; products compute so many at a time, and those that are left more slowly


class Shard(msgspec.Struct, frozen=True):
    """One rank's part of a model: `rank` of `size`. The default is the complete model."""

    rank: int = 0
    size: int = 1

    def outputs(self, size: int) -> range:
        """Which of so many outputs are the rank's: complete tiles where every rank gets some."""
        tiles = -(-size // (self.size * _TILE)) * _TILE
        if tiles * (self.size - 1) < size:
            return range(min(self.rank * tiles, size), min((self.rank + 1) * tiles, size))
        return range(size * self.rank // self.size, size * (self.rank + 1) // self.size)

    def heads(self, num_heads: int) -> range:
        """Which of so many heads are the rank's: with more ranks than KV heads, ranks share one."""
        first = self.rank * num_heads // self.size
        return range(first, max(first + 1, (self.rank + 1) * num_heads // self.size))


def check_ranks(spec: ModelSpec, size: int) -> None:
    """Refuse a number of ranks that the model's heads do not allow. Raises ConfigError."""
    if spec.state_sizes or spec.attention_gate:
        raise ConfigError(
            f"--tensor-parallel-size is {size}, but {spec.architecture} has layers with states, "
            "which one process computes; leave the option out"
        )
    if not spec.native:
        raise ConfigError(
            f"--tensor-parallel-size is {size}, but {spec.architecture} runs through transformers, "
            "in one process; leave the option out"
        )
    if not spec.is_uniform and size > 1:
        raise ConfigError(
            f"--tensor-parallel-size is {size}, but layers of {spec.architecture} differ in their "
            "sizes, or share keys, which ranks do not divide; leave the option out"
        )
    possible = [count for count in range(1, spec.num_heads + 1) if _divides(spec, count)]
    if size not in possible:
        raise ConfigError(
            f"--tensor-parallel-size is {size}, which does not divide the model's "
            f"{spec.num_heads} query heads and {spec.num_kv_heads} KV heads; possible are "
            f"{', '.join(map(str, possible))}"
        )


def _divides(spec: ModelSpec, size: int) -> bool:
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def shard_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The rank's part as a model: its heads, columns and vocabulary."""
    return replace(
        spec,
        num_heads=len(shard.heads(spec.num_heads)),
        num_kv_heads=len(shard.heads(spec.num_kv_heads)),
        intermediate_size=len(shard.outputs(spec.intermediate_size)),
        vocab_size=len(shard.outputs(spec.vocab_size)),
    )


def planned_part(
    spec: ModelSpec, elements: ElementBytes, size: int
) -> tuple[ModelSpec, ElementBytes]:
    """What `plan_memory` gets of a model whose `size` ranks have a device each: the weights and KV
    heads of the largest part. Activations are gathered, and as large as those of one process.
    """
    shard = Shard(0, size)
    part = shard_spec(spec, shard)
    if spec.moe is not None:
        width = len(shard.outputs(spec.moe.intermediate_size))
        part = replace(part, moe=replace(spec.moe, intermediate_size=width))
    weights = weights_of(part, elements_of_part(elements, spec, part))
    num_kv_heads = spec.num_kv_heads if spec.latent is not None else part.num_kv_heads
    return replace(spec, num_kv_heads=num_kv_heads), replace(elements, weights=weights)


class ShardedSource(ChosenRows):
    """A `TensorSource` of the rank's rows of every tensor that ranks divide."""

    def __init__(
        self, source: TensorSource, spec: ModelSpec, names: DecoderNames, shard: Shard
    ) -> None:
        super().__init__(source)
        self._outer = (names.embed_tokens, names.lm_head, bias_of(names.lm_head))
        self._vocab = shard.outputs(spec.vocab_size), spec.vocab_size
        self._modules = _module_rows(spec, shard)
        self._experts, self._of_experts = f".{spec.naming.experts}.", _expert_rows(spec, shard)
        self._shared = f".{spec.naming.shared_expert}."
        width = 0 if spec.moe is None else spec.moe.shared_width
        self._of_shared = _mlp_rows(width, spec.hidden_size, shard)

    def rows_of(self, name: str) -> NumberedRows | None:
        """The rank's rows of one tensor, and how many there are; None where all ranks have all."""
        if name in self._outer:
            return (self._vocab[0],), self._vocab[1]
        module = module_of(name)
        if self._experts in name:  # first: an expert of all tokens may be the MLP they are in
            return self._of_experts.get(module)
        return (self._of_shared if self._shared in name else self._modules).get(module)


def shard_adapter(
    modules: Sequence[Sequence[LoRAPart]], spec: ModelSpec, shard: Shard
) -> list[list[LoRAPart]]:
    """The parts of each of a model's matrices (`adapters.lora_modules`) that change the rank's
    outputs. A is complete on every rank, B has the rank's outputs; an embedding is changed after
    its rows are gathered, and is complete.
    """
    found = []
    for number, parts in enumerate(modules):
        if number == embedding_number(spec):
            found.append(list(parts))
        else:
            own = _outputs(number, spec, shard) if parts else ()
            found.append([piece for part in parts for piece in _own_parts(part, own)])
    return found


def _own_parts(part: LoRAPart, own: Sequence[range]) -> Iterator[LoRAPart]:
    """What a part changes of a matrix of these outputs, one range after another."""
    first = 0
    last_output = part.first_output + part.num_outputs
    for outputs in own:
        start, stop = max(outputs.start, part.first_output), min(outputs.stop, last_output)
        if start < stop:
            rows = [range(start - part.first_output, stop - part.first_output)]
            place = first + start - outputs.start
            bias = None if part.bias is None else taken_rows(part.bias, rows)
            if part.b is not None:
                yield replace(part, b=taken_rows(part.b, rows), bias=bias, first_output=place)
            else:
                scales = None if part.rank_scales is None else taken_rows(part.rank_scales, rows)
                a = taken_rows(part.a, rows)
                yield replace(part, a=a, rank_scales=scales, bias=bias, first_output=place)
        first += len(outputs)


def complete_biases(
    own: Mapping[int, Array], spec: ModelSpec, shard: Shard, ranks: Ranks | None
) -> Mapping[int, Array]:
    """The biases [N] of matrices by number, from the rank's part of each; all ranks call it."""
    if ranks is None:
        return own
    found = {}
    for number, bias in own.items():
        parts = [_outputs(number, spec, Shard(rank, shard.size)) for rank in range(shard.size)]
        widths = [sum(map(len, rows)) for rows in parts]
        first = sum(widths[: shard.rank])
        row = HostTensor(np.ascontiguousarray(bias[None]), FLOAT32)
        gathered = ranks.gather(row, range(first, first + widths[shard.rank]), sum(widths))
        outputs = np.concatenate(
            [np.arange(span.start, span.stop) for rows in parts for span in rows]
        )
        complete = np.empty(outputs.max() + 1, np.float32)
        complete[outputs] = gathered.numpy()[0]
        found[number] = complete
    return found


def _outputs(number: int, spec: ModelSpec, shard: Shard) -> tuple[range, ...]:
    """The rank's outputs of a matrix of a layer, or of the output projection, by its number."""
    if number == lm_head_number(spec):
        return (shard.outputs(spec.vocab_size),)
    if number > lm_head_number(spec):  # of an expert
        assert spec.moe is not None
        if (number - lm_head_number(spec)) % 2 == 0:
            return (shard.outputs(spec.hidden_size),)
        return _gate_up_rows(shard.outputs(spec.moe.intermediate_size), spec.moe.intermediate_size)
    projection = Projection(number % len(Projection))
    if projection is Projection.ROUTER:
        assert spec.moe is not None
        return (range(spec.moe.num_experts),)
    if projection is Projection.SHARED_GATE:
        return (range(1),)
    if spec.moe is not None and is_shared(spec, number):
        spec = replace(spec, intermediate_size=spec.moe.shared_width)
    is_up = projection is Projection.GATE_UP and not spec.gated
    return _module_rows(spec, shard)["up_proj" if is_up else _MODULES[projection]][0]


def _module_rows(spec: ModelSpec, shard: Shard) -> dict[str, tuple[tuple[range, ...], int]]:
    """Of the tensors of a layer that ranks divide, the rank's rows, and the number of all rows."""
    size = spec.head_size
    heads, kv_heads = shard.heads(spec.num_heads), shard.heads(spec.num_kv_heads)
    if spec.latent is not None:
        return _latent_rows(spec, spec.latent, shard)
    queries = range(heads.start * size, heads.stop * size)
    keys = range(kv_heads.start * size, kv_heads.stop * size)
    num_queries, num_keys = spec.num_heads * size, spec.num_kv_heads * size
    hidden = shard.outputs(spec.hidden_size)
    fused_keys = _moved(keys, num_queries)
    of_each_head = {
        "q_norm": ((heads,), spec.num_heads),
        "k_norm": ((kv_heads,), spec.num_kv_heads),
    }
    return {
        "q_proj": ((queries,), num_queries),
        "k_proj": ((keys,), num_keys),
        "v_proj": ((keys,), num_keys),
        "qkv_proj": (
            (queries, fused_keys, _moved(fused_keys, num_keys)),
            num_queries + 2 * num_keys,
        ),
        "o_proj": ((hidden,), spec.hidden_size),
        **_mlp_rows(spec.intermediate_size, spec.hidden_size, shard),
        "sinks": ((heads,), spec.num_heads),
        **(of_each_head if spec.qk_norm is QKNorm.EACH_HEAD else {}),
    }


def _latent_rows(
    spec: ModelSpec, latent: LatentSpec, shard: Shard
) -> dict[str, tuple[tuple[range, ...], int]]:
    """`_module_rows` of attention over latents: heads are divided, and what all of them read is on
    every rank.
    """
    heads = shard.heads(spec.num_heads)

    def of_heads(size: int) -> tuple[tuple[range, ...], int]:
        return (range(heads.start * size, heads.stop * size),), spec.num_heads * size

    def complete(size: int) -> tuple[tuple[range, ...], int]:
        return (range(size),), size

    queries, kept = of_heads(spec.head_size), complete(latent.kept_size)
    first = queries if latent.query_rank is None else complete(latent.query_rank)
    return {
        "q_proj": queries,
        "q_a_proj": complete(latent.query_rank or 0),
        "q_b_proj": queries,
        "kv_a_proj_with_mqa": kept,
        LATENT_HEADS: of_heads(latent.nope_size + latent.value_size),
        "qkv_proj": ((*first[0], _moved(kept[0][0], first[1])), first[1] + kept[1]),
        "o_proj": ((shard.outputs(spec.hidden_size),), spec.hidden_size),
        **_mlp_rows(spec.intermediate_size, spec.hidden_size, shard),
    }


def _mlp_rows(width: int, hidden: int, shard: Shard) -> dict[str, tuple[tuple[range, ...], int]]:
    """`_module_rows` of an MLP of this width."""
    columns = shard.outputs(width)
    return {
        "gate_proj": ((columns,), width),
        "up_proj": ((columns,), width),
        "gate_up_proj": (_gate_up_rows(columns, width), 2 * width),
        "down_proj": ((shard.outputs(hidden),), hidden),
    }


def _expert_rows(spec: ModelSpec, shard: Shard) -> dict[str, tuple[tuple[range, ...], int]]:
    """`_module_rows` of an expert's tensors. Routers are on every rank."""
    if spec.moe is None:
        return {}
    width, hidden = spec.moe.intermediate_size, spec.hidden_size
    columns = shard.outputs(width)
    gate, up, down = spec.naming.expert_parts
    found: dict[str, tuple[tuple[range, ...], int]] = {down: ((shard.outputs(hidden),), hidden)}
    if spec.naming.fused_experts:
        return {**found, gate: (_gate_up_rows(columns, width), 2 * width)}
    return {**found, gate: ((columns,), width), up: ((columns,), width)}


def _gate_up_rows(columns: range, width: int) -> tuple[range, ...]:
    """Of gate and up in one matrix, gate first."""
    return columns, _moved(columns, width)


def _moved(rows: range, distance: int) -> range:
    return range(rows.start + distance, rows.stop + distance)
