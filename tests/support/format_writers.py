"""Matrices written in the formats of quantized checkpoints: literal loops after their documents.

Each writer draws quantized values, scales and zero points, packs them word by word, and gives the
tensors to store (by what follows the module's name) and the weights that they mean, from the
format's own formula.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = (
    *(0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25),
    *(0.0, -0.0052083333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25),
)


@dataclass
class Written:
    """Tensors by suffix (`.qweight`), and the matrix [N, C] of their values, in float32."""

    tensors: dict[str, Tensor]
    weight: Tensor


Writer = Callable[[int, int, torch.Generator], Written]


def integers(generator: torch.Generator, stop: int, *shape: int) -> Tensor:
    return torch.randint(0, stop, shape, generator=generator)


def scales_of(generator: torch.Generator, *shape: int, bits: int = 4) -> Tensor:
    """Half of them about as large as random weights of 1/8 need, rounded to float16."""
    drawn = torch.rand(shape, generator=generator) + 0.5
    return (drawn * 0.6 / 2**bits).half()


def as_int32(words: Sequence[Sequence[int]]) -> Tensor:
    signed = [[w - 2**32 if w >= 2**31 else w for w in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32)


def pack_along_columns(quants: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """quantized values [R, K] -> words [R, ceil(K * bits / 32)], place i of a word holds quantized
    value order[i].
    """
    per_word = 32 // bits
    places = list(order or range(per_word))
    words = []
    for row in quants.tolist():
        row = row + [0] * (-len(row) % per_word)
        packed = []
        for start in range(0, len(row), per_word):
            word = 0
            for place, index in enumerate(places):
                word |= row[start + index] << (place * bits)
            packed.append(word)
        words.append(packed)
    return as_int32(words)


def pack_along_rows(quants: Tensor, bits: int) -> Tensor:
    return pack_along_columns(quants.t(), bits).t().contiguous()


def groups_of(inputs: int, group: int) -> Tensor:
    return torch.arange(inputs) // group


def meaning(quants: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """quantized values [N, C], zeros and scales [N, G]: element by element."""
    weight = torch.empty(quants.shape)
    for c in range(quants.shape[1]):
        g = int(group_of[c])
        weight[:, c] = (quants[:, c].float() - zeros[:, g].float()) * scales[:, g].float()
    return weight


def awq(group: int) -> Writer:
    def write(outputs: int, inputs: int, generator: torch.Generator) -> Written:
        size = inputs if group == -1 else group
        quants = integers(generator, 16, inputs, outputs)
        zeros = integers(generator, 16, inputs // size, outputs)
        scales = scales_of(generator, inputs // size, outputs)
        tensors = {
            ".qweight": pack_along_columns(quants, 4, AWQ_ORDER),
            ".qzeros": pack_along_columns(zeros, 4, AWQ_ORDER),
            ".scales": scales,
        }
        return Written(tensors, meaning(quants.t(), zeros.t(), scales.t(), groups_of(inputs, size)))

    return write


def gptq(
    bits: int,
    group: int,
    *,
    version: int = 1,
    act_order: bool = False,
    with_bias: bool = False,
    symmetric: bool = False,
) -> Writer:
    def write(outputs: int, inputs: int, generator: torch.Generator) -> Written:
        size = inputs if group == -1 else group
        quants = integers(generator, 2**bits, inputs, outputs)
        zeros = integers(generator, 2**bits, inputs // size, outputs)
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        scales = scales_of(generator, inputs // size, outputs, bits=bits)
        group_of = groups_of(inputs, size)
        if act_order:
            group_of = group_of[torch.randperm(inputs, generator=generator)]
        stored = (zeros - 1) % 2**bits if version == 1 else zeros
        tensors = {
            ".qweight": pack_along_rows(quants, bits),
            ".qzeros": pack_along_columns(stored, bits),
            ".scales": scales,
            ".g_idx": group_of.int(),
        }
        if with_bias:
            tensors[".bias"] = torch.zeros(outputs, dtype=torch.float16)
        return Written(tensors, meaning(quants.t(), zeros.t(), scales.t(), group_of))

    return write


def packed_integers(
    bits: int,
    group: int | None,
    *,
    symmetric: bool = True,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Writer:
    """compressed-tensors' pack-quantized."""

    def write(outputs: int, inputs: int, generator: torch.Generator) -> Written:
        size, middle = group or inputs, 2 ** (bits - 1)
        quants = integers(generator, 2**bits, outputs, inputs)
        zeros = torch.full((outputs, inputs // size), middle)
        scales = scales_of(generator, *zeros.shape, bits=bits).to(scale_dtype)
        tensors = {
            ".weight_packed": pack_along_columns(quants, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            zeros = integers(generator, 2**bits, *zeros.shape)
            tensors[".weight_zero_point"] = pack_along_rows(zeros, bits)
        group_of = groups_of(inputs, size)
        if act_order:
            group_of = group_of[torch.randperm(inputs, generator=generator)]
            tensors[".weight_g_idx"] = group_of.int()
        return Written(tensors, meaning(quants, zeros, scales, group_of))

    return write


def plain_integers(group: int | None, *, symmetric: bool = True, bits: int = 8) -> Writer:
    """compressed-tensors' int-quantized and naive-quantized."""

    def write(outputs: int, inputs: int, generator: torch.Generator) -> Written:
        size, middle = group or inputs, 2 ** (bits - 1)
        quants = integers(generator, 2**bits, outputs, inputs) - middle
        zeros = torch.zeros(outputs, inputs // size, dtype=torch.int64)
        scales = scales_of(generator, *zeros.shape, bits=bits).bfloat16()
        tensors = {".weight": quants.to(torch.int8), ".weight_scale": scales}
        if not symmetric:
            zeros = integers(generator, 2**bits, *zeros.shape) - middle
            tensors[".weight_zero_point"] = zeros.to(torch.int8)
        return Written(tensors, meaning(quants, zeros, scales, groups_of(inputs, size)))

    return write


def float8(kind: str, scale_name: str = ".weight_scale") -> Writer:
    """E4m3 with scales per `tensor`, `channel`, or `block` of 64 x 32."""

    def write(outputs: int, inputs: int, generator: torch.Generator) -> Written:
        quants = (torch.randn(outputs, inputs, generator=generator) * 100).clamp(-448, 448)
        quants = quants.to(torch.float8_e4m3fn)
        if kind == "block":
            scales = torch.rand(-(-outputs // 64), inputs // 32, generator=generator) / 900
            spread = scales[torch.arange(outputs) // 64][:, torch.arange(inputs) // 32]
        else:
            shape = (1,) if kind == "tensor" else (outputs, 1)
            scales = spread = torch.rand(shape, generator=generator) / 900
        return Written({".weight": quants, scale_name: scales}, quants.float() * spread)

    return write


def nvfp4(outputs: int, inputs: int, generator: torch.Generator) -> Written:
    """ModelOpt's layout; `weight` by the definition of e2m1."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    quants = torch.randint(0, 16, (outputs, inputs), generator=generator)
    scales = (torch.rand(outputs, inputs // 16, generator=generator) * 400 + 1).to(
        torch.float8_e4m3fn
    )
    total = torch.tensor(1.37e-4)
    values = torch.where(quants < 8, 1.0, -1.0) * magnitudes[quants % 8]
    weight = values * (scales.float() * total).repeat_interleave(16, 1)
    tensors = {
        ".weight": (quants[:, 0::2] | quants[:, 1::2] << 4).to(torch.uint8),
        ".weight_scale": scales,
        ".weight_scale_2": total,
        ".input_scale": torch.tensor(0.01),
    }
    return Written(tensors, weight)


def packed_nvfp4(outputs: int, inputs: int, generator: torch.Generator) -> Written:
    """The same, as compressed-tensors has it."""
    written = nvfp4(outputs, inputs, generator)
    total = 1 / written.tensors[".weight_scale_2"]
    scales = written.tensors[".weight_scale"]
    exact = written.weight / (
        scales.float() * written.tensors[".weight_scale_2"]
    ).repeat_interleave(16, 1)
    tensors = {
        ".weight_packed": written.tensors[".weight"],
        ".weight_scale": scales,
        ".weight_global_scale": total.reshape(1),
        ".input_global_scale": torch.tensor([3.0]),
    }
    return Written(
        tensors, exact.mul(2).round().div(2) * (scales.float() / total).repeat_interleave(16, 1)
    )


def with_fixed_scales(writer: Writer, *names: str) -> Writer:
    """The same, with scales of activations, or of the KV cache, that the files fix."""

    def write(outputs: int, inputs: int, generator: torch.Generator) -> Written:
        written = writer(outputs, inputs, generator)
        scales = {f".{name}": torch.tensor(0.01) for name in names}
        return Written(written.tensors | scales, written.weight)

    return write


def bnb_int8(outputs: int, inputs: int, generator: torch.Generator) -> Written:
    quants = integers(generator, 255, outputs, inputs) - 127
    scales = (torch.rand(outputs, generator=generator) + 0.5) * 0.3
    tensors = {
        ".weight": quants.to(torch.int8),
        ".SCB": scales,
        ".weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return Written(tensors, quants.float() * scales[:, None] / 127)


def bnb_4bit(kind: str, *, nested: bool, block: int = 64, nested_block: int = 256) -> Writer:
    levels = NF4 if kind == "nf4" else FP4

    def write(outputs: int, inputs: int, generator: torch.Generator) -> Written:
        count = outputs * inputs
        quants = integers(generator, 16, count).tolist()
        halves = [quants[i] << 4 | quants[i + 1] for i in range(0, count, 2)]
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
        state["shape"] = [outputs, inputs]
        tensors = {
            ".weight": torch.tensor(halves, dtype=torch.uint8)[:, None],
            ".weight.quant_map": torch.tensor(levels),
        }
        num_blocks = -(-count // block)
        if nested:
            table = torch.linspace(-1, 1, 256)
            stored = integers(generator, 256, num_blocks)
            outer = torch.rand(-(-num_blocks // nested_block), generator=generator) * 0.1
            state |= {"nested_blocksize": nested_block, "nested_offset": 0.3}
            state["nested_dtype"] = "float32"
            absmax = [
                float(table[stored[i]] * outer[i // nested_block]) + 0.3 for i in range(num_blocks)
            ]
            tensors |= {
                ".weight.absmax": stored.to(torch.uint8),
                ".weight.nested_absmax": outer,
                ".weight.nested_quant_map": table,
            }
        else:
            absmax = (torch.rand(num_blocks, generator=generator) + 0.1).tolist()
            tensors[".weight.absmax"] = torch.tensor(absmax)
        blob = json.dumps(state).encode()
        name = f".weight.quant_state.bitsandbytes__{kind}"
        tensors[name] = torch.tensor(list(blob), dtype=torch.uint8)
        weight = torch.tensor(
            [levels[quant] * absmax[i // block] for i, quant in enumerate(quants)]
        )
        return Written(tensors, weight.view(outputs, inputs))

    return write


def compressed_config(
    form: str, bits: int, strategy: str, group: int | None = None, **more: object
) -> dict[str, object]:
    """A `quantization_config` with one group, of all linear modules but the output projection."""
    symmetric = more.pop("symmetric", True)
    weights = {
        "num_bits": bits,
        "type": more.pop("type", "int"),
        "block_structure": more.pop("block_structure", None),
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
        "actorder": more.pop("actorder", None),
        "observer": "minmax",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights} | more},
        "kv_cache_scheme": None,
        "sparsity_config": {},
    }
