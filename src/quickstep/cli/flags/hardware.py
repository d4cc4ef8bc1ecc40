"""Flags of what is predicted: a model, hardware, and the sizes of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import add_kv_cache_dtype
from quickstep.cli.flags.parsing import positive_int, positive_number, token_count
from quickstep.config import QUANTIZATIONS
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.sizing import ElementBytes
    from quickstep.plan.hardware import Hardware

__all__ = ["add_engine_sizes", "add_hardware", "element_bytes", "hardware_of"]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SCRATCH_BYTES = 8  # of the native kernels' op table


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add `MODEL`, `--hardware`, `--hardware-file`, `--link` and `--price`."""
    parser.add_argument(
        "model", metavar="MODEL", help="a config.json, a checkpoint, or a name such as llama-3-70b"
    )
    parser.add_argument(
        "--hardware",
        default="this",
        metavar="NAMExN",
        help="devices, such as h100x8; this measures this machine (default: %(default)s)",
    )
    parser.add_argument(
        "--hardware-file", type=Path, metavar="FILE", help="YAML file that adds devices"
    )
    parser.add_argument(
        "--link", metavar="NAME", help="link between the devices (default: the device's own)"
    )
    parser.add_argument(
        "--price", type=positive_number, metavar="USD", help="dollars per hour of a device"
    )


def add_engine_sizes(group: argparse._ArgumentGroup) -> None:
    """Add the formats of weights and KV, `--max-num-seqs` and `--max-num-batched-tokens`."""
    group.add_argument("--quantization", "-q", choices=QUANTIZATIONS, help="format of the weights")
    add_kv_cache_dtype(group)
    group.add_argument(
        "--max-num-seqs",
        type=positive_int,
        default=256,
        metavar="N",
        help="most sequences of an engine that run at once (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=token_count,
        default=2048,
        metavar="N",
        help="most tokens of a step (default: %(default)s)",
    )


def hardware_of(args: argparse.Namespace) -> Hardware:
    """The hardware of `--hardware`; `this` is measured. Raises ConfigError."""
    from msgspec.structs import replace

    from quickstep.plan.hardware import (
        THIS,
        find_hardware,
        measured_device,
        parse_hardware,
        read_hardware,
    )

    table = read_hardware(args.hardware_file)
    if parse_hardware(args.hardware)[0] == THIS:
        device = measured_device(*_measured())
        table = replace(table, devices=table.devices | {THIS: device})
    return find_hardware(args.hardware, table, args.link, args.price)


def _measured() -> tuple[int, float, float]:
    """Free bytes, bytes per second and operations per second of this machine's CPU."""
    import time

    from quickstep.bench.limits import DEFAULT_PROBE_BYTES, open_limits
    from quickstep.engine.machine import free_memory_bytes, usable_cores
    from quickstep.ops.tensors import BFLOAT16, CPU

    free = free_memory_bytes()
    if free < 4 * DEFAULT_PROBE_BYTES:
        raise ConfigError(
            f"--hardware this needs {4 * DEFAULT_PROBE_BYTES} bytes of free memory to measure, "
            f"{free} are free; name a device instead"
        )
    limits = open_limits(
        CPU, BFLOAT16, usable_cores(), None, DEFAULT_PROBE_BYTES, time.perf_counter
    )
    return free, limits.read_bytes_per_s(), limits.flops_per_s()


def element_bytes(spec: ModelSpec, quantization: str | None, kv_dtype: str) -> ElementBytes:
    """Bytes per element in the checkpoint's dtype, 16 bits if it names none."""
    from quickstep.model.sizing import ElementBytes

    return ElementBytes(_DTYPE_BYTES.get(spec.dtype, 2), _SCRATCH_BYTES, quantization, kv_dtype)
