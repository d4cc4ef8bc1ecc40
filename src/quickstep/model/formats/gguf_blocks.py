"""ggml's blocks as tensors of torch, for GPUs and for steps op by op.

`csrc/stored_rows.cpp` decodes the same types straight into packed memory, and to the same bits.
Each decoding function takes blocks [B, bytes] uint8 and returns quantized values [B, elements]
uint8, scales and zeros [B, groups] float32 (zeros None: 2**(bits - 1)); of kinds with minimums
those in place of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from quickstep.model.checkpoint.tensor_schema import Shape
from quickstep.model.formats.gguf_kinds import BLOCK_KINDS
from quickstep.ops.block_grids import block_grid
from quickstep.ops.tensors import to_torch
from quickstep.ops.weights import QuantizedWeight

Decoded = tuple[Tensor, Tensor, Tensor | None]


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at`: [B, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(octets: Tensor) -> Tensor:
    """[B, n] -> [B, 2 n]: all low halves, then all high ones."""
    return torch.cat((octets & 15, octets >> 4), 1)


def _q4_0(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Decoded:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _fifth_bits(octets: Tensor) -> Tensor:
    """4 bytes [B, 4] -> [B, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=octets.device)
    return ((octets.unsqueeze(2) >> shifts) & 1).flatten(1) << 4


def _q5_0(blocks: Tensor) -> Decoded:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return quants + (32 - 16), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Decoded:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return quants, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Decoded:
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _six_bit_pairs(octets: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes [B, 12] -> scales and minima [B, 8], 6 bits each."""
    first, second, third = octets[:, :4], octets[:, 4:8], octets[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales.float(), minima.float()


def _k_groups(blocks: Tensor, quants: Tensor) -> Decoded:
    """Q4_K's and Q5_K's common head: d, dmin, 8 scales and 8 minima."""
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    return quants, _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _paired_nibbles(octets: Tensor) -> Tensor:
    """[B, 128] -> [B, 256]: of each 32 bytes the low halves, then the high ones."""
    runs = octets.view(-1, 4, 1, 32)
    return torch.cat((runs & 15, runs >> 4), 2).flatten(1)


def _q4_k(blocks: Tensor) -> Decoded:
    return _k_groups(blocks, _paired_nibbles(blocks[:, 16:].contiguous()))


def _q5_k(blocks: Tensor) -> Decoded:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4  # [B, 8, 32]
    return _k_groups(blocks, _paired_nibbles(blocks[:, 48:].contiguous()) | high.flatten(1))


def _q6_k(blocks: Tensor) -> Decoded:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), 2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    quants = (low | (high << 4)).flatten(1)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return quants, _half(blocks, 208) * scales, None


def _two_bits(octets: Tensor) -> Tensor:
    """[B, 64] -> [B, 256]: of each 32 bytes the lowest bits, then the next ones."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=octets.device).view(1, 1, 4, 1)
    return ((octets.reshape(-1, 2, 1, 32) >> shifts) & 3).flatten(1)


def _q2_k(blocks: Tensor) -> Decoded:
    scales, minima = (blocks[:, :16] & 15).float(), (blocks[:, :16] >> 4).float()
    quants = _two_bits(blocks[:, 16:80])
    return quants, _half(blocks, 80) * scales, -_half(blocks, 82) * minima


def _q3_k(blocks: Tensor) -> Decoded:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    high = ((blocks[:, :32].unsqueeze(1) >> shifts) & 1) << 2
    quants = (_two_bits(blocks[:, 32:96]) | high.flatten(1)) + (8 - 4)
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 4, 1)
    top = ((blocks[:, 104:108].unsqueeze(1) >> pairs) & 3).flatten(1) << 4
    scales = (_nibbles(blocks[:, 96:104]) | top).float() - 32
    return quants, _half(blocks, 108) * scales, None


_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled


def _looked_up(nibbles: Tensor, values: tuple[int, ...], bits: int) -> Tensor:
    """Values that are not in equal steps, as quantized values of more bits."""
    table = torch.tensor(
        [v + 2 ** (bits - 1) for v in values], dtype=torch.uint8, device=nibbles.device
    )
    return table[nibbles.long()]


def _iq4_nl(blocks: Tensor) -> Decoded:
    return _looked_up(_nibbles(blocks[:, 2:]), _IQ4_VALUES, 8), _half(blocks, 0), None


def _iq4_xs(blocks: Tensor) -> Decoded:
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = ((blocks[:, 2:4].unsqueeze(2) >> pairs) & 3).flatten(1) << 4
    halves = torch.tensor([0, 4], dtype=torch.uint8, device=blocks.device)
    low = ((blocks[:, 4:8].unsqueeze(2) >> halves) & 15).flatten(1)
    octets = blocks[:, 8:].reshape(-1, 8, 16)
    quants = torch.cat((octets & 15, octets >> 4), 2).flatten(1)
    scales = (low | high).float() - 32
    return _looked_up(quants, _IQ4_VALUES, 8), _half(blocks, 0) * scales, None


def _mxfp4(blocks: Tensor) -> Decoded:
    exponents = blocks[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    quants = _looked_up(_nibbles(blocks[:, 1:]), _MXFP4_VALUES, 6)
    return quants, bits.view(torch.float32), None


def _digits(octets: Tensor, count: int) -> Tensor:
    """[B, n] -> [B, count n]: digits of base 3, the first ones of all octets first."""
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8, device=octets.device)
    shifted = (octets.unsqueeze(1) * powers.view(1, count, 1)).int()  # modulo 256
    return ((shifted * 3) >> 8).to(torch.uint8).flatten(1)


def _tq1_0(blocks: Tensor) -> Decoded:
    parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    quants = torch.cat([_digits(octets, count) for octets, count in parts], 1)
    return quants + (8 - 1), _half(blocks, 52), None


def _tq2_0(blocks: Tensor) -> Decoded:
    return _two_bits(blocks[:, :64]) + (8 - 1), _half(blocks, 64), None


def _nvfp4(blocks: Tensor) -> Decoded:
    octets = blocks[:, 4:].reshape(-1, 4, 8)
    quants = torch.cat((octets & 15, octets >> 4), 2).flatten(1)
    scales = blocks[:, :4]
    exponents, mantissas = (scales >> 3 & 15).int(), (scales & 7).float()
    normal = torch.ldexp(mantissas + 8, exponents - 11)  # halved, since the values are doubled
    halved = torch.where(exponents == 0, mantissas * 2**-10, normal)
    halved = torch.where((scales == 0) | (scales == 127), 0.0, halved)
    return _looked_up(quants, _MXFP4_VALUES, 6), halved, None


def _words(octets: Tensor, dtype: torch.dtype = torch.int16) -> Tensor:
    """[B, bytes] as words without sign, in int64."""
    bits = dtype.itemsize * 8
    # a copy also of one block, whose bytes need not begin where words may
    words = octets.clone(memory_format=torch.contiguous_format).view(dtype)
    return words.long() & ((1 << bits) - 1)


def _bits_at(words: Tensor, shifts: range, mask: int) -> Tensor:
    """[B, n] -> [B, n len(shifts)]: of each word some bits, at each of the shifts."""
    places = torch.tensor(list(shifts), device=words.device)
    return ((words.unsqueeze(2) >> places) & mask).flatten(1)


def _half_bytes(octets: Tensor) -> Tensor:
    """[B, n] -> [B, 2 n]: of each byte the low half, then the high one."""
    return _bits_at(octets.long(), range(0, 8, 4), 15)


def _vectors(kind: str, numbers: Tensor) -> Tensor:
    """[B, n] numbers -> the vectors of the type's grid, one after another: [B, elements]."""
    grid = block_grid(kind)
    assert grid is not None
    return to_torch(grid).to(numbers.device)[numbers].flatten(1).short()


def _with_signs(values: Tensor, signs: Tensor) -> Tensor:
    """[B, elements], of which those are negated whose bit is set in signs [B, elements / 8]."""
    return torch.where(_bits_at(signs, range(8), 1) == 1, -values, values)


def _even_signs(words: Tensor) -> Tensor:
    """7 bits, and an eighth that makes the number of negative values even."""
    seven = words & 127
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    return seven | (parity ^ parity >> 1) % 2 << 7


def _about_middle(values: Tensor, scales: Tensor) -> Decoded:
    return (values + 128).to(torch.uint8), scales, None


def _half_steps(blocks: Tensor, scales: Tensor, unit: float) -> Tensor:
    """Scales of 4 bits, counted from a half."""
    return _half(blocks, 0) * (scales + 0.5) * unit


def _iq2_xxs(blocks: Tensor) -> Decoded:
    words = _words(blocks[:, 2:], torch.int32).view(-1, 8, 2)
    numbers = _bits_at(words[:, :, 0], range(0, 32, 8), 255)
    signs = _even_signs(_bits_at(words[:, :, 1], range(0, 28, 7), 127))
    scales = _half_steps(blocks, words[:, :, 1] >> 28, 0.25)
    return _about_middle(_with_signs(_vectors("IQ2_XXS", numbers), signs), scales)


def _iq2_xs(blocks: Tensor) -> Decoded:
    words = _words(blocks[:, 2:66])
    values = _with_signs(_vectors("IQ2_XS", words & 511), _even_signs(words >> 9))
    return _about_middle(values, _half_steps(blocks, _half_bytes(blocks[:, 66:]), 0.25))


def _iq2_s(blocks: Tensor) -> Decoded:
    numbers = blocks[:, 2:34].long() | _bits_at(blocks[:, 66:74].long(), range(0, 8, 2), 3) << 8
    values = _with_signs(_vectors("IQ2_S", numbers), blocks[:, 34:66].long())
    return _about_middle(values, _half_steps(blocks, _half_bytes(blocks[:, 74:]), 0.25))


def _iq3_xxs(blocks: Tensor) -> Decoded:
    words = _words(blocks[:, 66:], torch.int32)
    signs = _even_signs(_bits_at(words, range(0, 28, 7), 127))
    values = _with_signs(_vectors("IQ3_XXS", blocks[:, 2:66].long()), signs)
    return _about_middle(values, _half_steps(blocks, words >> 28, 0.5))


def _iq3_s(blocks: Tensor) -> Decoded:
    """Odd numbers from -15 to 15, which are even steps about 7.5."""
    numbers = blocks[:, 2:66].long() | _bits_at(blocks[:, 66:74].long(), range(8), 1) << 8
    values = _with_signs(_vectors("IQ3_S", numbers), blocks[:, 74:106].long())
    scales = _half(blocks, 0) * (2 * _half_bytes(blocks[:, 106:]) + 1) * 2
    quants = torch.div(values + 15, 2, rounding_mode="floor").to(torch.uint8)
    return quants, scales, torch.full_like(scales, 7.5)


def _ternary(numbers: Tensor, is_less: Tensor, scales: Tensor) -> Decoded:
    """-1, 0 or 1, and an eighth more or less: an eighth of 8 * ternary +- 1, which is
    2 * quant - 9. `is_less` [B, vectors].
    """
    more = (1 - is_less).repeat_interleave(8, 1)
    quants = (4 * _vectors("IQ1_S", numbers) + more).to(torch.uint8)
    return quants, scales * 0.25, torch.full_like(scales, 4.5)


def _iq1_s(blocks: Tensor) -> Decoded:
    words = _words(blocks[:, 34:])
    numbers = blocks[:, 2:34].long() | _bits_at(words, range(0, 12, 3), 7) << 8
    scales = _half(blocks, 0) * (2 * (words >> 12 & 7) + 1)
    return _ternary(numbers, (words >> 15).repeat_interleave(4, 1), scales)


def _iq1_m(blocks: Tensor) -> Decoded:
    words = _words(blocks[:, 48:])
    places = torch.arange(0, 16, 4, device=blocks.device)
    half = (words >> 12 << places).sum(1, keepdim=True).to(torch.int16).view(torch.float16)
    rest = _half_bytes(blocks[:, 32:48])
    numbers = blocks[:, :32].long() | (rest & 7) << 8
    scales = half.float() * (2 * _bits_at(words, range(0, 12, 3), 7) + 1)
    return _ternary(numbers, rest >> 3, scales)


DECODERS: Mapping[str, Callable[[Tensor], Decoded]] = MappingProxyType(
    {
        **{"Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0},
        **{"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q2_K": _q2_k, "Q3_K": _q3_k},
        **{"IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4},
        **{"TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "NVFP4": _nvfp4, "IQ1_S": _iq1_s, "IQ1_M": _iq1_m},
        **{"IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s},
        **{"IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s},
    }
)
_ELEMENTS_AT_ONCE = 1 << 21  # bounds the scratch of decoding, near the caches' size


def decode_blocks(kind: str, raw: Tensor, shape: Shape) -> QuantizedWeight:
    """Blocks [B, bytes] of a kind as the quantized values [N, C], decoded some at a time."""
    form, decode = BLOCK_KINDS[kind], DECODERS[kind]
    elements = shape[0] * shape[1] // raw.shape[0]
    groups = (raw.shape[0], elements // form.group_size)
    quants = torch.empty((raw.shape[0], elements), dtype=torch.uint8, device=raw.device)
    scales = torch.empty(groups, device=raw.device)
    zeros = torch.empty(groups, device=raw.device) if form.has_zeros else None
    step = max(1, _ELEMENTS_AT_ONCE // elements)
    for start in range(0, raw.shape[0], step):
        part = slice(start, start + step)
        quants[part], scales[part], lows = decode(raw[part])
        if zeros is not None and lows is not None:
            zeros[part] = lows
    by_row = (shape[0], shape[1] // form.group_size)
    return QuantizedWeight(
        quants.view(shape),
        scales.view(by_row),
        None if zeros is None else zeros.view(by_row),
        form.bits,
        form.group_size,
        has_minimums=form.has_minimums,
    )
