"""Flags of what is predicted: a model, hardware, and the sizes of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import add_kv_cache_dtype
from quickstep.cli.flags.parsing import (
    fraction,
    non_negative_int,
    positive_int,
    positive_number,
    token_count,
)
from quickstep.config import QUANTIZATIONS
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.core.cost_model import CostModel
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.sizing import ElementBytes
    from quickstep.plan.candidates import DraftModel, LoRASizes
    from quickstep.plan.hardware import Hardware

__all__ = [
    "adapters_of",
    "add_adapters_and_drafts",
    "add_engine_sizes",
    "add_hardware",
    "draft_of",
    "element_bytes",
    "hardware_of",
    "measured_steps",
]

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


def add_adapters_and_drafts(group: argparse._ArgumentGroup) -> None:
    """Add the flags of LoRA adapters and of a draft model, whose memory and time are planned."""
    group.add_argument(
        "--max-loras",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="LoRA adapters in memory; each request has one (default: %(default)s)",
    )
    group.add_argument(
        "--lora-rank",
        type=positive_int,
        default=16,
        metavar="RANK",
        help="their rank (default: %(default)s)",
    )
    group.add_argument(
        "--lora-targets",
        metavar="NAMES",
        help="the linear layers that they change, such as q_proj,v_proj (default: those of "
        "attention and MLP)",
    )
    group.add_argument(
        "--speculative-model",
        metavar="MODEL",
        help="a draft model on the same devices: a config.json, a checkpoint, or a known name",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=positive_int,
        default=4,
        metavar="N",
        help="the most tokens that it proposes at a time (default: %(default)s)",
    )
    group.add_argument(
        "--acceptance",
        type=fraction,
        default=0.7,
        metavar="PART",
        help="probability that a proposed token is accepted, after those before it were "
        "(default: %(default)s)",
    )


def adapters_of(args: argparse.Namespace, spec: ModelSpec) -> LoRASizes | None:
    """The adapters of the flags; None without. Raises ConfigError."""
    from quickstep.plan.candidates import LoRASizes

    if not args.max_loras:
        return None
    targets = tuple(args.lora_targets.split(",")) if args.lora_targets else ()
    loras = LoRASizes(args.max_loras, args.lora_rank, targets)
    loras.bytes_each(spec, 1)  # checks the names
    return loras


def draft_of(args: argparse.Namespace) -> DraftModel | None:
    """The draft model of the flags; None without. Raises ConfigError."""
    from quickstep.plan.candidates import DraftModel
    from quickstep.plan.models import find_model

    if args.speculative_model is None:
        return None
    spec = find_model(args.speculative_model)
    elements = element_bytes(spec, None, args.kv_cache_dtype)
    return DraftModel(spec, elements, args.num_speculative_tokens, args.acceptance)


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


def measured_steps(args: argparse.Namespace) -> CostModel | None:
    """The step times of the model that `quickstep calibrate` has stored, with the engine's own time
    between steps; None for other hardware than `this`, or without a calibration.
    """
    from quickstep.core.cost_model import LinearCostModel
    from quickstep.core.overhead import EngineOverhead, WithOverhead
    from quickstep.engine.step_times.cost_fits import FitSource, cache_dir, find_calibration
    from quickstep.model.checkpoint.source import local_checkpoint
    from quickstep.plan.hardware import THIS, parse_hardware

    checkpoint, folder = local_checkpoint(args.model), cache_dir()
    if parse_hardware(args.hardware)[0] != THIS or checkpoint is None or folder is None:
        return None
    path = str(checkpoint.path.resolve())
    stored = find_calibration(folder, FitSource(path, args.quantization, args.kv_cache_dtype))
    if stored is None:
        return None
    overhead = stored.overhead or EngineOverhead(0.0, 0.0)
    return WithOverhead(LinearCostModel.of_fit(stored.fit), overhead)


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
