"""Short names of weight and KV formats, such as `int8-g32`, for `bench` and `verify`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from quickstep.config import QUANTIZATIONS


class WeightFormat(NamedTuple):
    """The values of `--dtype` and `--quantization` that a name means."""

    dtype: str
    quantization: str | None


class FormatPair(NamedTuple):
    """Keys of WEIGHT_FORMATS and KV_FORMATS."""

    weights: str
    kv: str


WEIGHT_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "fp32": WeightFormat("float32", None),
        "bf16": WeightFormat("bfloat16", None),
        "fp16": WeightFormat("float16", None),
        **{name: WeightFormat("auto", name) for name in QUANTIZATIONS},
    }
)

# -> --kv-cache-dtype
KV_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "auto",
        "fp32": "float32",
        "bf16": "bfloat16",
        "fp16": "float16",
        "int8": "int8",
        "int4": "int4",
        "fp8": "fp8",
    }
)


def format_pairs(text: str) -> tuple[FormatPair, ...]:
    """Parse `all`, or a list of `WEIGHTS` (with every KV format) and `WEIGHTS/KV`.

    Raises:
        argparse.ArgumentTypeError: A name is unknown.
    """
    if text == "all":
        text = ",".join(WEIGHT_FORMATS)
    pairs: dict[FormatPair, None] = {}
    for part in text.split(","):
        weights, slash, kv = part.partition("/")
        _check(weights, WEIGHT_FORMATS, "weights")
        if slash:
            _check(kv, KV_FORMATS, "KV")
        for name in (kv,) if slash else KV_FORMATS:
            pairs[FormatPair(weights, name)] = None
    return tuple(pairs)


def _check(name: str, known: Mapping[str, object], what: str) -> None:
    if name not in known:
        raise argparse.ArgumentTypeError(
            f"{name!r} is not a format of {what}; known are {', '.join(known)}"
        )
