"""Rotary position embeddings as data: which frequencies, read from either form of a config.

The older form is `rope_theta` + `rope_scaling`, the newer one `rope_parameters` (transformers 5).
No torch here; `rope.py` turns a `RopeSpec` into tables.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields


class RopeKind(enum.Enum):
    """How frequencies are stretched beyond the trained length."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"


class RopeSpec(msgspec.Struct, frozen=True):
    """One set of rotary frequencies.

    Attributes:
        dim: Rotated dimensions of a head (D_rot), the first ones.
        theta: Base of the wavelengths.
        factor: How much the length is stretched.
        trained_len: Positions the frequencies were trained for, before any stretching.
        attention_factor: Multiplies cos and sin; None derives it (yarn, longrope).
        attn_factor: Multiplies the derived one (yarn; llama.cpp's and vLLM's name).
        low_freq_factor, high_freq_factor: llama3's borders, in wavelengths per `trained_len`.
        beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn's ramp and scale.
        short_factor, long_factor: longrope's divisors per dimension, within and beyond
            `trained_len`.
        interleaved: Neighbours are turned, dimensions 2 i and 2 i + 1, not i and i + dim / 2.
        growth, growth_len, growth_first: cos and sin are multiplied by 1 + growth ln(1 + (p +
            growth_first) // growth_len) at position p: what is turned so grows with the distance
            from the start (Llama 4).
        num_turned: Only so many of the first pairs are turned, as if all were (proportional).
    """

    kind: RopeKind
    dim: int
    theta: float
    trained_len: int
    factor: float = 1.0
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attn_factor: float = 1.0
    interleaved: bool = False
    growth: float = 0.0
    growth_len: int = 1
    growth_first: int = 0
    num_turned: int = 0

    def needs_long_factors(self, max_model_len: int) -> bool:
        """Whether every position has longrope's long factors, because sequences may be longer than
        the trained length.
        """
        return self.kind is RopeKind.LONGROPE and max_model_len > self.trained_len


_KINDS: Mapping[str, RopeKind] = MappingProxyType(
    {kind.value: kind for kind in RopeKind} | {"su": RopeKind.LONGROPE, "mrope": RopeKind.DEFAULT}
)
_NEUTRAL: Mapping[str, object] = MappingProxyType({"extrapolation_factor": 1})
# Of training; and how a position of an image is split over the dimensions: text has the same
# position in all parts.
_NOT_OF_TEXT = ("finetuned", "mrope_section", "mrope_interleaved")


def rope_parameters(fields: ConfigFields) -> dict[str, object]:
    """The flat form, from whichever keys the config uses: `rope_scaling` has priority."""
    merged: dict[str, object] = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        value = fields.optional_number(name)
        if value is not None:
            merged[name] = value
    newer, older = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    return merged | dict(older or newer or {})


def read_rope(
    parameters: Mapping[str, object], head_size: int, max_positions: int, trained_len: int | None
) -> RopeSpec:
    """Read one set of frequencies.

    `max_positions` is the config's `max_position_embeddings`; `trained_len` its
    `original_max_position_embeddings` where that is outside of the parameters (Phi-3).
    """
    fields = ConfigFields(parameters, {"partial_rotary_factor": 1.0}, "config.json's rope scaling")
    name = fields.text("rope_type") or fields.text("type") or "default"
    fields.text("type")
    kind = _KINDS.get(name)
    if kind is None:
        known = ", ".join(sorted(_KINDS))
        raise ConfigError(f"config.json asks for rope type {name!r}; supported are {known}")
    part = fields.number("partial_rotary_factor")
    dim = head_size if kind is RopeKind.PROPORTIONAL else int(head_size * part)
    if dim < 2 or dim % 2:
        raise ConfigError(f"config.json rotates {dim} dimensions of a head, it must be even")
    theta = fields.number("rope_theta")
    if not 0 < theta < math.inf:
        raise ConfigError(f"config.json sets 'rope_theta' to {theta}, it must be above 0")
    original = trained_len or fields.optional_integer("original_max_position_embeddings")
    fields.optional_integer("original_max_position_embeddings")
    if kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        original = max_positions
    rope = RopeSpec(kind, dim, theta, original or max_positions)
    for key in _NOT_OF_TEXT:
        fields.value(key)
    if kind is RopeKind.PROPORTIONAL:
        factor = fields.optional_number("factor") or 1.0
        turned = int(part * head_size // 2)
        rope = RopeSpec(kind, dim, theta, rope.trained_len, factor, num_turned=turned)
        fields.refuse_unread(_NEUTRAL)
    elif kind is not RopeKind.DEFAULT:
        rope = _read_scaling(fields, rope, max_positions)
        fields.refuse_unread(_NEUTRAL)
    elif not (parameters.get("rope_type") or parameters.get("type")):
        # a named default switches scaling off, whatever else there is; this may lack its name
        fields.refuse_unread(_NEUTRAL)
    return rope


def _read_scaling(fields: ConfigFields, rope: RopeSpec, max_positions: int) -> RopeSpec:
    kind = rope.kind
    if kind in (RopeKind.YARN, RopeKind.LONGROPE):
        factor = fields.optional_number("factor") or max_positions / rope.trained_len
    else:
        factor = fields.number("factor")
    attention_factor = None
    if kind in (RopeKind.YARN, RopeKind.LONGROPE):
        attention_factor = fields.optional_number("attention_factor")
    common = (kind, rope.dim, rope.theta, rope.trained_len, factor, attention_factor)
    if kind is RopeKind.LLAMA3:
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        return RopeSpec(*common, low_freq_factor=low, high_freq_factor=high)
    if kind is RopeKind.YARN:
        return RopeSpec(
            *common,
            beta_fast=fields.optional_number("beta_fast") or 32.0,
            beta_slow=fields.optional_number("beta_slow") or 1.0,
            mscale=fields.optional_number("mscale"),
            mscale_all_dim=fields.optional_number("mscale_all_dim"),
            truncate=fields.value("truncate") is not False,
            attn_factor=_attn_factor(fields, attention_factor),
        )
    if kind is RopeKind.LONGROPE:
        short, long = (_factors(fields, f"{name}_factor", rope.dim) for name in ("short", "long"))
        return RopeSpec(*common, short_factor=short, long_factor=long)
    return RopeSpec(*common)


def _attn_factor(fields: ConfigFields, attention_factor: float | None) -> float:
    """YaRN's `attn_factor`: transformers ignores it, vLLM and llama.cpp multiply by it, and the
    models that have it are meant so (DeepSeek-R1-0528-Qwen3-8B cancels YaRN's scale with it).
    """
    value = fields.optional_number("attn_factor")
    if value is None or value == 1.0:
        return 1.0
    if attention_factor is not None and value != attention_factor:
        raise ConfigError(
            f"{fields.source} sets both attention_factor ({attention_factor}) and attn_factor "
            f"({value}), of which one replaces YaRN's scale and the other multiplies it; keep one"
        )
    return 1.0 if attention_factor is not None else value


def _factors(fields: ConfigFields, name: str, dim: int) -> tuple[float, ...]:
    values = fields.sequence(name) or ()
    numbers = tuple(float(value) for value in values if isinstance(value, (int, float)))
    if len(numbers) != dim // 2 or len(numbers) != len(values):
        raise ConfigError(
            f"config.json's {name} has {len(numbers)} numbers, {dim // 2} are needed (one for "
            "each pair of rotated dimensions)"
        )
    return numbers


def extended_len(rope: RopeSpec, max_positions: int) -> int:
    """Longest sequence the positions allow: configs state the trained length for some kinds."""
    if rope.kind in (RopeKind.LINEAR, RopeKind.DYNAMIC):
        return int(max_positions * rope.factor)
    if rope.kind is RopeKind.YARN:
        return max(max_positions, int(rope.trained_len * rope.factor))
    return max_positions


def yarn_scale(factor: float, multiplier: float) -> float:
    """YaRN's scale of the logits of attention, or of what makes them."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0
