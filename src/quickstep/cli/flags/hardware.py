"""Flags of what is predicted: a model, hardware, and the sizes of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quickstep.cli.flags.engine import add_model, model_of
from quickstep.cli.flags.options import add_options
from quickstep.cli.flags.parsing import (
    fraction,
    non_negative_int,
    positive_int,
    positive_number,
    token_count,
)
from quickstep.config import (
    QUANTIZATIONS,
    CacheConfig,
    EngineConfig,
    LoadConfig,
    ProposerConfig,
    SchedulerConfig,
    SpeculationConfig,
    SpeculationMethod,
)
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.core.cost_model import CostModel
    from quickstep.core.overhead import StageTimes
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.sizing import DraftSizes, ElementBytes
    from quickstep.plan.candidates import DraftModel, LoRASizes
    from quickstep.plan.engines import Evidence
    from quickstep.plan.hardware import Hardware

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ACCEPTANCE = 0.7


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add `MODEL`, `--hardware`, `--hardware-file`, `--link` and `--price`."""
    add_model(parser, "a config.json, a checkpoint, or a name such as llama-3-70b", default=None)
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


def add_predicted_engine(parser: argparse.ArgumentParser) -> None:
    """Add `--engine` and `--offline`: whose published figures a prediction follows."""
    parser.add_argument(
        "--engine",
        choices=("quickstep", "vllm", "sglang", "tensorrt-llm"),
        default="quickstep",
        help="engine that runs on a GPU of --hardware: its steps are as fast as was published of "
        "it (default: %(default)s)",
    )
    parser.add_argument(
        "--offline",
        action="store_true",
        help="that engine is called by a program, without HTTP",
    )


def predicted_on(args: argparse.Namespace, hardware: Hardware) -> tuple[Hardware, Evidence | None]:
    """The hardware of `--hardware` with what `--engine` reaches on it, and what that rests on.
    Hardware that is measured, and that a file gives its own parts, keeps them: None.
    """
    from quickstep.plan.engines import with_engine
    from quickstep.plan.hardware import ESTIMATED, read_hardware

    estimated = read_hardware().achieved[ESTIMATED]
    if hardware.device.achieved != ESTIMATED or hardware.achieved != estimated:
        if args.engine != "quickstep" or args.offline:
            raise ConfigError(
                f"--engine and --offline are of GPUs that were not measured; --hardware "
                f"{args.hardware} has step times of its own, leave them out"
            )
        return hardware, None
    return with_engine(hardware, args.engine, args.offline)


def add_engine_sizes(group: argparse._ArgumentGroup) -> None:
    """Add the formats of weights and KV, `--max-num-seqs` and `--max-num-batched-tokens`."""
    group.add_argument("--quantization", "-q", choices=QUANTIZATIONS, help="format of the weights")
    add_options(group, CacheConfig, "kv_dtype")
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
        default=SchedulerConfig().max_num_batched_tokens,
        metavar="N",
        help="most tokens of a step (default: %(default)s)",
    )


def add_adapters(group: argparse._ArgumentGroup) -> None:
    """Add the flags of LoRA adapters, whose memory and time are planned."""
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


def add_drafts(group: argparse._ArgumentGroup) -> None:
    """Add the flags of what drafts on the same devices, whose memory and time are planned."""
    group.add_argument(
        "--speculative-model",
        action="append",
        metavar="MODEL",
        help="a draft model on the same devices: a config.json, a checkpoint, or a known name; or "
        "a checkpoint of Medusa heads or an EAGLE layer; repeat it for several of different "
        "methods, of which each sequence has the drafts that are predicted to gain most",
    )
    group.add_argument(
        "--speculative-method",
        choices=[SpeculationMethod.MTP.value],
        help="also draft with the prediction layer of the model's own checkpoint (mtp)",
    )
    group.add_argument(
        "--num-speculative-tokens",
        type=positive_int,
        default=4,
        metavar="N",
        help="most draft tokens of a sequence in a step (default: %(default)s)",
    )
    group.add_argument(
        "--acceptance",
        type=fraction,
        action="append",
        metavar="PART",
        help="probability that a proposed token is accepted, after those before it were; repeat it "
        "for each model, in their order, that of a prediction layer first "
        f"(default: {_ACCEPTANCE})",
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


def drafts_of(args: argparse.Namespace, target: ModelSpec) -> tuple[DraftModel, ...]:
    """What drafts for the target by the flags. Raises ConfigError."""
    from quickstep.engine.speculation import check_methods, planned_mtp
    from quickstep.plan.candidates import DraftModel

    names: list[str] = args.speculative_model or []
    given: list[float] = args.acceptance or [_ACCEPTANCE]
    own = [] if args.speculative_method is None else [SpeculationMethod(args.speculative_method)]
    if len(given) not in (1, len(own) + len(names)):
        also = " and --speculative-method once" if own else ""
        raise ConfigError(
            f"--acceptance is given {len(given)} times and --speculative-model {len(names)} times"
            f"{also}; give one for all models, or one for each"
        )
    elements = _plain_elements(target, args.quantization, "auto")
    found = [(method, planned_mtp(target, elements, CacheConfig().block_size)) for method in own]
    found += [_found_draft(name, target) for name in names]
    names = [*(method.value for method in own), *names]
    check_methods([(method, name) for (method, _), name in zip(found, names, strict=True)])
    acceptances = given if len(given) == len(names) else given * len(names)
    return tuple(
        [
            DraftModel(method, sizes, acceptance)
            for (method, sizes), acceptance in zip(found, acceptances, strict=True)
        ]
    )


def _found_draft(name: str, target: ModelSpec) -> tuple[SpeculationMethod, DraftSizes]:
    """What a model drafts by, and what it needs of the memory; of a checkpoint, by the engine's own
    reading of it.
    """
    from quickstep.engine.speculation import draft_checkpoints, sizes_of
    from quickstep.model.checkpoint.gguf_names import is_gguf
    from quickstep.model.checkpoint.source import local_checkpoint
    from quickstep.model.sizing import DraftSizes
    from quickstep.plan.models import find_model

    path = Path(name)
    checkpoint = None if path.name == "config.json" else local_checkpoint(name)
    if checkpoint is not None and (is_gguf(path) or any(checkpoint.path.glob("*.safetensors"))):
        speculation = SpeculationConfig((ProposerConfig(model=name),))
        (one,) = draft_checkpoints(EngineConfig(LoadConfig(), speculation=speculation), None)
        elements = _plain_elements(target, None, "auto")
        block_size = CacheConfig().block_size
        return one.method, sizes_of(one, target, elements.dtype, elements.scratch, block_size)
    spec = find_model(name)
    return SpeculationMethod.DRAFT, DraftSizes(spec, _plain_elements(spec, None, "auto"))


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
    hardware = find_hardware(args.hardware, table, args.link, args.price)
    device = table.devices[parse_hardware(args.hardware)[0]]
    if args.kv_cache_dtype == "int4" and device.is_gpu:
        raise ConfigError(
            f"--kv-cache-dtype int4 has kernels for CPUs only, {device.label} is a GPU; use int8 "
            "or fp8"
        )
    return hardware


class MeasuredSteps(msgspec.Struct, frozen=True):
    """Step times of this machine: of all stages of a pipeline together, with what the engine itself
    takes; of a pipeline, that is in `stages`.
    """

    costs: CostModel
    stages: StageTimes | None = None


def measured_steps(
    args: argparse.Namespace, split: tuple[int, int] = (1, 1), num_engines: int = 1
) -> MeasuredSteps | None:
    """What `quickstep calibrate` has stored of the model with so many ranks and stages, with the
    threads that each of several engines has; None for other hardware than `this`, or without a
    calibration. Raises ConfigError without one of a divided model.
    """
    from quickstep.cache_dir import cache_dir
    from quickstep.core.cost_model import LinearCostModel
    from quickstep.core.overhead import EngineOverhead, ScaledCosts, WithOverhead
    from quickstep.engine.machine import usable_cores
    from quickstep.engine.step_times.cost_fits import FitSource, find_calibration
    from quickstep.model.checkpoint.source import local_checkpoint
    from quickstep.plan.hardware import THIS, parse_hardware

    name, folder = model_of(args), cache_dir()
    if parse_hardware(args.hardware)[0] != THIS or Path(name).name == "config.json":
        return None
    checkpoint = local_checkpoint(name)
    if checkpoint is None or folder is None:
        return None
    path = str(checkpoint.path.resolve())
    source = FitSource(path, args.quantization, args.kv_cache_dtype)
    stored = find_calibration(folder, source, split=split, num_engines=num_engines)
    is_known = find_calibration(folder, source) is not None
    if stored is None and (split != (1, 1) or (num_engines > 1 and is_known)):
        threads = max(1, usable_cores() // num_engines)
        raise ConfigError(
            f"no step times of engines with {split[0]} ranks, {split[1]} stages and {threads} "
            "threads are stored for this machine; measure them with `quickstep calibrate "
            f"{model_of(args)} --tensor-parallel-size {split[0]} --pipeline-parallel-size "
            f"{split[1]} --threads {threads}`"
        )
    if stored is None:
        return None
    model = LinearCostModel.of_fit(stored.fit)
    if split[1] > 1:
        return MeasuredSteps(ScaledCosts(model, split[1]), stored.stages)
    return MeasuredSteps(WithOverhead(model, stored.overhead or EngineOverhead(0.0, 0.0)))


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


def element_bytes(args: argparse.Namespace, spec: ModelSpec, hardware: Hardware) -> ElementBytes:
    """Bytes per element of the model of the flags on a device, and of the weights of a checkpoint
    that is quantized already. Raises ConfigError.
    """
    from msgspec.structs import replace

    from quickstep.plan.models import planned_weight_bytes

    elements = _plain_elements(spec, args.quantization, args.kv_cache_dtype)
    weights = planned_weight_bytes(
        model_of(args), spec, elements, natively=not hardware.device.is_gpu
    )
    return replace(elements, weights=weights)


def _plain_elements(spec: ModelSpec, quantization: str | None, kv_dtype: str) -> ElementBytes:
    """Bytes per element in the checkpoint's dtype, 16 bits if it names none."""
    from quickstep.engine.memory_plan import SCRATCH_BYTES
    from quickstep.model.sizing import ElementBytes

    return ElementBytes(_DTYPE_BYTES.get(spec.dtype, 2), SCRATCH_BYTES, quantization, kv_dtype)
