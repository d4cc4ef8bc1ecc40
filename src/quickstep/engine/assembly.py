"""`open_engine`: from a configuration to an engine, not yet started.

    find checkpoint -> read spec -> plan memory -> load weights -> allocate KV -> wire

The only module that knows every layer. Memory is planned before anything large is read, so a model
that does not fit is refused at once. Large modules are imported in functions, when an engine is
opened: torch only for a model that needs it (docs/design/0010).
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.config import (
    EngineConfig,
    InputConfig,
    LoadConfig,
    SchedulerConfig,
    SpeculativeSampling,
)
from quickstep.engine.loaded_model import LoadedModel
from quickstep.engine.machine import places_for, usable_cores
from quickstep.engine.memory_plan import adapter_bytes_of, max_drafts, measured_plan, plan_for
from quickstep.engine.retrieval.card import Retrieval, Scoring, read_retrieval
from quickstep.errors import ConfigError, EngineError
from quickstep.model.checkpoint.config_fields import ConfigFields, read_json
from quickstep.model.checkpoint.gguf_names import is_gguf
from quickstep.model.checkpoint.gguf_spec import gguf_pooling
from quickstep.types import Pooling

if TYPE_CHECKING:
    from quickstep.engine.adapters import Adapters
    from quickstep.engine.engine import Engine
    from quickstep.engine.packed_weights.loading import PackedLoading
    from quickstep.engine.ranks.processes import ModelProcesses
    from quickstep.engine.step_times.cost_fits import FitFile
    from quickstep.model.checkpoint.source import Checkpoint
    from quickstep.model.checkpoint.weights import CheckpointWeights
    from quickstep.model.decoder import Decoder
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.interface import KVLayout, Model
    from quickstep.model.sharding import Shard
    from quickstep.model.sizing import MemoryPlan
    from quickstep.model.stages import Stage
    from quickstep.ops.native.ranks import RankMemory
    from quickstep.ops.table import KVCache, LoRAAdapter, OpTable
    from quickstep.ops.tensors import Array, Device, DType
    from quickstep.runtime.executors.device import DeviceExecutor
    from quickstep.runtime.executors.local import LocalExecutor
    from quickstep.runtime.steps.divided import DividedSteps
    from quickstep.runtime.steps.pipeline import StageFollower, StageLinks
    from quickstep.runtime.steps.ranked import RankFollower
    from quickstep.runtime.steps.step_model import GraphOptions
    from quickstep.text.chat_template import ChatTemplate
    from quickstep.text.tokenizer import Tokenizer

_LOGGER = logging.getLogger(__name__)

# (bytes read, bytes in all)
LoadProgress = Callable[[int, int], None]

# generation_config.json's name -> SamplingParams' name
_SAMPLING_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "temperature": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "repetition_penalty": "repetition_penalty",
        "max_new_tokens": "max_tokens",
    }
)


_ONLY_EMBEDS = "it embeds texts and generates none; use /v1/embeddings"
# A start waits so long for CUDA graphs, of which the first ones compile the kernels.
_MOST_CAPTURE_S = 60.0
# OpenBLAS reads it when NumPy is imported: 2 to the power of it are the cycles until an idle thread
# sleeps.
_SPINNING, _SHORTEST = "OPENBLAS_THREAD_TIMEOUT", "4"
# Until a lost process has been noticed, whose parts were missing before.
_FAILURE_S = 5.0
_caller_freezes = False  # found once: to count frozen objects takes 10 ms for a million

_LOADING = (
    "quickstep.model.checkpoint.weights",
    "quickstep.model.loader",
    "quickstep.model.checkpoint.placement",
    "quickstep.model.sizing",
    "quickstep.model.checkpoint.source",
    "quickstep.model.spec",
    "quickstep.ops.native.backend",
    "quickstep.ops.resolve",
    "quickstep.runtime.cache.kv_cache",
)


# What is imported after the weights.
_IMPORTED_LATER = (
    "quickstep.text.tokenizer",
    "quickstep.engine.engine",
    "quickstep.text.grammar.grammars",
    "quickstep.runtime.executors.local",
    "quickstep.runtime.runner",
)


class LoadedWeights(msgspec.Struct, frozen=True):
    """The loaded model, and the decisions made while loading it."""

    checkpoint: Checkpoint
    spec: ModelSpec
    model: Model
    plan: MemoryPlan
    kv_layout: KVLayout
    adapters: Adapters | None = None


def import_loading() -> None:
    """Import what `load_weights` needs, before it is known which model to load."""
    _import_numpy()
    for name in _LOADING:
        import_module(name)


def _import_numpy() -> None:
    """Import NumPy, if it is not there, with threads of OpenBLAS that sleep while they have nothing
    to compute. By default they spin for 25 ms, from the import on, on cores that the start needs.
    """
    if "numpy" in sys.modules or _SPINNING in os.environ:
        return
    os.environ[_SPINNING] = _SHORTEST
    try:
        import_module("numpy")
    finally:
        del os.environ[_SPINNING]


def import_engine() -> None:
    """Import what is imported after the weights otherwise, for a process that waits for a model."""
    for name in _IMPORTED_LATER:
        import_module(name)


def open_engine(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    step_log_path: Path | None = None,
    with_template: bool = True,
    on_rank_lost: Callable[[str], None] | None = None,
) -> Engine:
    """Load the model that `config` names and build its engine; `await engine.start()` runs it.

    The step log is also written to `step_log_path`, as JSON lines. An engine that gets its prompts
    as tokens does not have the chat template. `on_rank_lost` is called when another process of the
    model ends by itself; no step can run then.

    Raises:
        ConfigError: The checkpoint is missing or broken, or does not fit.
    """
    processes = model_processes(config, on_rank_lost)
    collects = gc.isenabled()
    gc.disable()  # imported objects and weights stay: scanning them is a tenth of the time
    try:
        return _open_engine(config, progress, step_log_path, with_template, processes)
    except BaseException as error:
        reason = ""
        if processes is not None:
            if isinstance(error, EngineError):  # as what they exchange ends with one of them
                reason = processes.failure_within(_FAILURE_S)
            processes.close()
        if reason:
            raise ConfigError(reason) from error
        raise
    finally:
        if collects:
            _collect_later()
            gc.enable()


def _collect_later() -> None:
    """Make the objects that exist now the oldest ones, which the next complete collection scans:
    the one of young objects that is due would take longer than a step.
    """
    global _caller_freezes
    _caller_freezes = _caller_freezes or gc.get_freeze_count() > 0
    if not _caller_freezes:  # else the caller's objects would be unfrozen as well
        gc.freeze()
        gc.unfreeze()


def model_processes(
    config: EngineConfig, on_rank_lost: Callable[[str], None] | None = None
) -> ModelProcesses | None:
    """The other processes of a model that is divided; None if this one has all of it."""
    if config.load.num_ranks == 1:
        return None
    from quickstep.engine.ranks.processes import ModelProcesses

    return ModelProcesses(config.load, on_rank_lost)


def _open_engine(
    config: EngineConfig,
    progress: LoadProgress | None,
    step_log_path: Path | None,
    with_template: bool,
    processes: ModelProcesses | None,
) -> Engine:
    import_loading()
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.runtime.cache.kv_cache import allocate_kv

    started_s = time.monotonic()
    checkpoint = find_checkpoint(config.load)
    ahead = _ReadAhead(checkpoint.path)

    def report(num_bytes: int, total_bytes: int) -> None:
        ahead.begin()
        if progress is not None:
            progress(num_bytes, total_bytes)

    loaded = load_weights(config, report, checkpoint, processes)
    if processes is None:
        measured = measured_plan(config, loaded.model, loaded.kv_layout, loaded.plan)
        loaded = replace(loaded, plan=measured)
    model, plan = loaded.model, loaded.plan
    block_size = config.cache.block_size
    kv = allocate_kv(loaded.kv_layout, plan.num_blocks, block_size, model.device, plan.states)
    load_s = time.monotonic() - started_s
    description = describe(loaded, load_s, config.inputs, ahead.tokenizer(), with_template)
    if processes is not None:
        processes.wait_opened(model.fingerprint)
    adapters = loaded.adapters
    return wire_engine(config, model, kv, plan, description, step_log_path, adapters, processes)


def wire_engine(
    config: EngineConfig,
    model: Model,
    kv: KVCache,
    plan: MemoryPlan,
    description: LoadedModel,
    step_log_path: Path | None = None,
    adapters: Adapters | None = None,
    processes: ModelProcesses | None = None,
) -> Engine:
    """The engine around a model that is in memory; `kv` has the plan's blocks."""
    from quickstep.core.cost_model import Coefficients
    from quickstep.core.policies import make_policy
    from quickstep.core.resources.block_pool import KVBlockPool
    from quickstep.core.scheduler import Scheduler
    from quickstep.engine.engine import Engine
    from quickstep.engine.records.step_log import StepLog
    from quickstep.engine.requests import open_seeds
    from quickstep.engine.step_times.cost_fits import FitSaver
    from quickstep.runtime.cache.opening import open_block_bytes

    block_size = config.cache.block_size
    graphs = graph_options(config, model, kv, plan)
    is_encoder = description.retrieval.is_encoder
    settings = _fitted(config, plan, adapters, graphs is not None, is_encoder)
    kv_directory = None
    if config.cache.kv_cache_dir is not None:
        from quickstep.engine.kv_files.tier import EngineTier, open_directory

        kv_directory, tier = open_directory(
            config.cache, open_block_bytes(kv), description.fingerprint
        )
        settings = replace(settings, kv_tier=tier)
    if config.cache.slot_save_path is not None:
        settings = replace(settings, transfers_kv=True)
    caches_prefixes = config.cache.prefix_caching and not is_encoder
    pool = KVBlockPool(plan.num_blocks, block_size, caches_prefixes)
    fits = FitSaver.open(
        fit_file(config, model, description), Coefficients.of_vocabulary(model.vocab_size)
    )
    recording, policy = None, make_policy(settings)
    if config.recording is None:
        scheduler = Scheduler(settings, pool, policy, fits.model)
    else:
        from quickstep.engine.records.recording_file import RecordingFile

        recording = RecordingFile.open(config.recording, description.tokenizer)
        scheduler = recording.scheduler(
            settings, pool, policy, fits.model, config, description.fingerprint
        )
    kv_transfers = None
    if config.scheduler.transfers_kv:
        from quickstep.engine.handover.transfers import EngineTransfers

        kv_transfers = EngineTransfers(
            scheduler, open_block_bytes(kv), description.fingerprint, time.monotonic
        )
    kv_tier = None
    if kv_directory is not None:
        kv_tier = EngineTier(scheduler, open_block_bytes(kv), kv_directory, time.monotonic)
    slot_files = None
    if config.cache.slot_save_path is not None:
        from quickstep.engine.kv_files.slot_files import SlotFiles

        slot_files = SlotFiles.open(
            config.cache, scheduler, open_block_bytes(kv), description.fingerprint, time.monotonic
        )
    return Engine(
        description,
        scheduler,
        open_executor(config, model, kv, plan, description, adapters, graphs, processes),
        fits=fits,
        step_log=StepLog(path=step_log_path),
        streams=config.streams,
        seeds=open_seeds(config.seed),
        clock=time.monotonic,
        adapters=adapters,
        recording=recording,
        kv_transfers=kv_transfers,
        kv_tier=kv_tier,
        slot_files=slot_files,
    )


def open_executor(
    config: EngineConfig,
    model: Model,
    kv: KVCache,
    plan: MemoryPlan,
    description: LoadedModel,
    adapters: Adapters | None = None,
    graphs: GraphOptions | None = None,
    processes: ModelProcesses | None = None,
) -> LocalExecutor | DeviceExecutor:
    """The executor of an engine around a model that is in memory."""
    from quickstep.engine.speculation import open_proposer
    from quickstep.runtime.executors.local import LocalExecutor
    from quickstep.runtime.runner import ModelRunner

    grammars = description.grammars
    links = None if processes is None else processes.links
    runner = ModelRunner(
        model,
        kv,
        config.cache.block_size,
        plan.max_num_seqs,
        time.perf_counter,
        None if grammars is None else grammars.new_matcher,
        config.enforce_eager,
        open_proposer(config, model, plan, description.path),
        None if adapters is None else adapters.packed,
        config.speculation.sampling is SpeculativeSampling.REJECTION,
        graphs,
        links,
    )
    on_close = None if processes is None else processes.close
    if links is None and graphs is None:
        return LocalExecutor(runner, on_close=on_close)
    from quickstep.runtime.executors.device import DeviceExecutor

    if links is not None:
        return DeviceExecutor(runner, on_close).start()
    from quickstep.ops.triton.compile_log import warn_of_compiles

    started_s = time.monotonic()
    runner.compile_kernels()
    executor = DeviceExecutor(runner).start()
    has_all = executor.wait_until_captured(_MOST_CAPTURE_S)
    _LOGGER.info(
        "captured %d CUDA graphs in %.1f s%s",
        executor.num_captured,
        time.monotonic() - started_s,
        "" if has_all else "; others follow while the engine is idle",
    )
    if has_all:
        warn_of_compiles()
    return executor


def graph_options(
    config: EngineConfig, model: Model, kv: KVCache, plan: MemoryPlan
) -> GraphOptions | None:
    """How steps become CUDA graphs; None where they do not."""
    if config.enforce_eager or plan.states.num_slots:
        return None
    from quickstep.runtime.steps.opening import device_graphs

    sizes = plan.max_num_seqs, 1 + max_drafts(config), plan.max_num_batched_tokens
    return device_graphs(model, kv, *sizes)


def fit_file(config: EngineConfig, model: Model, description: LoadedModel) -> FitFile | None:
    """The stored step times of a loaded model on this machine; None where nothing is stored."""
    from quickstep.cache_dir import cache_dir
    from quickstep.engine.step_times.cost_fits import FitFile, fit_key

    folder = cache_dir()
    if folder is None:
        return None
    load, device = config.load, model.device.type
    threads = num_threads(load)
    split = load.tensor_parallel_size, load.pipeline_parallel_size
    key = fit_key(description.fingerprint, device, threads, config.enforce_eager, split)
    return FitFile(folder, key)


class _ReadAhead:
    """Reads the tokenizer and imports modules in a thread, while the weights of `path` are read.

    Reading weights is native work without the interpreter's lock, so a start takes the longer of
    the two. `begin` it when a tensor has been read: the imports that read the weights come first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading: Future[Tokenizer] | None = None

    def begin(self) -> None:
        """Start the thread. Idempotent."""
        if self._reading is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
            self._reading = thread.submit(_read_tokenizer, self._path)
            thread.shutdown(wait=False)

    def tokenizer(self) -> Tokenizer:
        """Wait for the tokenizer. Raises ConfigError."""
        return _read_tokenizer(self._path) if self._reading is None else self._reading.result()


def _read_tokenizer(path: Path) -> Tokenizer:
    import_engine()
    from quickstep.text.tokenizer import Tokenizer

    return Tokenizer.open(path)


class _Planned(msgspec.Struct, frozen=True):
    """What is decided before weights are read.

    Attributes:
        held_bytes: Of weights in quantized values; None of others.
        weights: What the checkpoint of a native decoder holds; None for others.
        why_torch: What torch is needed for; "" for nothing.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    device: Device
    dtype: DType
    ops: OpTable
    held_bytes: int | None
    weights: CheckpointWeights | None
    why_torch: str


def _planned(config: EngineConfig, checkpoint: Checkpoint | None, place: int = 0) -> _Planned:
    """Find what `config` names, and the kernels of a process, whose threads have their `place`
    among those of all. Raises ConfigError.
    """
    from quickstep.model.checkpoint.placement import choose_device, choose_dtype
    from quickstep.model.checkpoint.source import find_checkpoint
    from quickstep.model.checkpoint.weights import (
        open_checkpoint_files,
        open_weights,
        some_tensors,
    )
    from quickstep.model.loader import check_kv_dtype, check_requantization, reason_for_torch
    from quickstep.model.spec import read_spec, with_context
    from quickstep.ops.native.backend import native_status
    from quickstep.ops.resolve import resolve_ops
    from quickstep.ops.tensors import use_device
    from quickstep.ops.torch_import import require_torch

    checkpoint = checkpoint or find_checkpoint(config.load)
    spec = read_spec(checkpoint.path)
    spec = with_context(spec, config.max_model_len, config.allow_long_context)
    device = choose_device(config.load.device)
    check_kv_dtype(config.cache.kv_dtype, device)
    use_device(device)
    dtype = choose_dtype(config.load.dtype, spec, open_checkpoint_files(checkpoint.path))
    isa = os.environ.get("QUICKSTEP_CPU_ISA")
    places = places_for(config.load.pin_threads, place, config.load.num_ranks)
    ops = resolve_ops(device, config.load.kernels, num_threads(config.load), isa, places)
    if device.type == "cuda":
        _LOGGER.info("running on %s with the kernels %r", _gpu_text(device), ops.name)
    if ops.name == "triton":
        from quickstep.ops.triton.compile_log import expect_compiles

        expect_compiles()
    if device.type == "cpu" and ops.name == "reference":
        _LOGGER.warning("running on PyTorch's ops, exact and slow: %s", native_status().reason)
    if checkpoint.left_out:
        _LOGGER.info(
            "not used: %s, for images, drafts or quantizing", ", ".join(checkpoint.left_out)
        )
    held_bytes = weights = None
    why_torch = f"{spec.architecture}, which runs through transformers,"
    if spec.native or spec.encoder is not None:
        why_torch = "--enforce-eager"
        if not config.enforce_eager:
            why_torch = reason_for_torch(ops, config.load, config.cache.kv_dtype)
    if spec.native:
        weights = open_weights(checkpoint.path, spec)
        check_requantization(weights, config.load.quantization)
        _log_unused(config, weights)
        parts = weights.other_parts()
        if parts:
            _LOGGER.info("%s left out: only the text part is served", ", ".join(parts))
        rounded = weights.rounded_again()
        if rounded:
            _LOGGER.info(
                "%s rounded again, to 8 bits: the checkpoint's groups are scattered (act-order) or "
                "its values unevenly spaced (nf4, fp4), which no product here reads",
                some_tensors(rounded),
            )
        natively = ops.load_linear is not None
        sizes = dtype.itemsize, config.load.quantization
        held_bytes = weights.quantized_bytes(*sizes, natively=natively)
        if weights.has_float8() and natively:
            _LOGGER.info(
                "weights in e4m3 are held in %s, in %d bytes each: the native kernels multiply no "
                "e4m3",
                dtype,
                dtype.itemsize,
            )
    if why_torch:
        require_torch(why_torch)
        set_threads(num_threads(config.load))
    return _Planned(checkpoint, spec, device, dtype, ops, held_bytes, weights, why_torch)


def _log_unused(config: EngineConfig, weights: CheckpointWeights) -> None:
    """What of a checkpoint is not read, and which layers for drafts it lacks."""
    from quickstep.engine.speculation import uses_prediction_layer
    from quickstep.model.checkpoint.weights import some_tensors
    from quickstep.model.mtp import belongs_to_layer, lacks_counted_layer

    unused = weights.unused()
    if unused and uses_prediction_layer(config, weights.spec):
        unused = tuple([name for name in unused if not belongs_to_layer(name, weights)])
    if unused:
        _LOGGER.info("%s not used: no token depends on it", some_tensors(unused))
    if lacks_counted_layer(weights):
        _LOGGER.info(
            "the checkpoint lacks the prediction layer of its model, as quantizers often drop it: "
            "there is no --speculative-method mtp"
        )


def load_weights(
    config: EngineConfig,
    progress: LoadProgress | None,
    checkpoint: Checkpoint | None = None,
    processes: ModelProcesses | None = None,
) -> LoadedWeights:
    """Find, plan and load what `config` names; of several processes, this one's part, with a plan
    that fits all of them. The others are started as soon as it is known what fits. Raises
    ConfigError.
    """
    from quickstep.engine.adapters import Adapters, open_adapters
    from quickstep.engine.speculation import draft_sizes

    planned = _planned(config, checkpoint)
    checkpoint, spec, dtype, ops = planned.checkpoint, planned.spec, planned.dtype, planned.ops
    if spec.state_sizes:
        _check_states(config, spec)
    if spec.encoder is not None:
        _check_encoder(config, spec)
    if config.scheduler.transfers_kv:
        _check_moved_kv(
            config, planned, "prefill and decode on different engines", "--prefill and --decode"
        )
    if config.cache.kv_cache_dir is not None:
        _check_moved_kv(config, planned, "stored KV blocks", "--kv-cache-dir")
    if config.cache.slot_save_path is not None:
        _check_moved_kv(config, planned, "saved slots", "--slot-save-path")
    if processes is not None:
        _check_ranks(config, planned)
    elif config.load.num_ranks > 1:
        raise ConfigError(
            "this runs in one process: leave --tensor-parallel-size and --pipeline-parallel-size "
            "out"
        )
    at_start = open_adapters(config.lora, spec)
    adapter_bytes, host_bytes = adapter_bytes_of(config.lora, spec, dtype.itemsize, at_start)
    sizes = draft_sizes(config, spec, dtype.itemsize, ops.scratch_bytes)
    held = planned.held_bytes, adapter_bytes + host_bytes
    plan = plan_for(config, spec, dtype, planned.device, ops.scratch_bytes, *held, sizes)
    for note in plan.notes:
        _LOGGER.info("%s", note)
    model = _load_planned(config, planned, plan, processes, progress)
    kv_layout = model.kv_layout.stored_as(config.cache.kv_dtype)
    adapters = None
    if config.lora is not None:
        biases = _base_biases(model, processes)
        adapters = Adapters(model, spec, model.ops, config.lora, adapter_bytes, biases)
        # the pinned ones first, so that the others are checked against what these leave
        for name, one in sorted(at_start, key=lambda entry: not adapters.is_pinned(entry[0])):
            adapters.add(adapters.read(name, one))
    if processes is not None:
        plan = measured_plan(config, model, kv_layout, plan)  # which all ranks call
    return LoadedWeights(checkpoint, spec, model, plan, kv_layout, adapters)


def _check_states(config: EngineConfig, spec: ModelSpec) -> None:
    """Refuse what moves KV blocks without the states that belong to them. Raises ConfigError."""
    moved = [("--prefill and --decode", config.scheduler.transfers_kv)]
    moved.append(("--kv-cache-dir", config.cache.kv_cache_dir is not None))
    moved.append(("--slot-save-path", config.cache.slot_save_path is not None))
    for option, is_on in moved:
        if is_on:
            raise ConfigError(
                f"{option} is not supported for {spec.architecture}: KV blocks are of use only "
                "with the states of its other layers, which are not moved; leave the option out"
            )


def _check_encoder(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for what only decoders have."""
    options = {
        "--enable-lora": config.lora is not None,
        "--kv-cache-dir": config.cache.kv_cache_dir is not None,
        "--slot-save-path": config.cache.slot_save_path is not None,
        "--prefill and --decode": config.scheduler.transfers_kv,
        "--tensor-parallel-size and --pipeline-parallel-size": config.load.num_ranks > 1,
    }
    for option, is_set in options.items():
        if is_set:
            raise ConfigError(
                f"{spec.architecture} is an encoder, which has no KV cache and runs in one process "
                f"without adapters; leave {option} out"
            )


def load_with_processes(config: EngineConfig, plan: MemoryPlan, processes: ModelProcesses) -> Model:
    """This process's part of the model that `config` names, for a plan that was made elsewhere;
    returns once all have theirs. Raises ConfigError.
    """
    planned = _planned(config, None)
    _check_ranks(config, planned)
    model = _load_planned(config, planned, plan, processes, None)
    if config.lora is not None:
        _base_biases(model, processes)
    kv_layout = model.kv_layout.stored_as(config.cache.kv_dtype)
    measured = measured_plan(config, model, kv_layout, plan)
    if measured.num_blocks < plan.num_blocks:
        raise ConfigError(
            f"a device has memory for {measured.num_blocks} KV blocks, {plan.num_blocks} are needed"
        )
    processes.wait_opened(model.fingerprint)
    return model


def _own_part(processes: ModelProcesses | None) -> tuple[Shard, Stage]:
    """What this process has of a model."""
    from quickstep.model.sharding import Shard
    from quickstep.model.stages import Stage

    return (Shard(), Stage()) if processes is None else (processes.shard, processes.stage)


def _load_planned(
    config: EngineConfig,
    planned: _Planned,
    plan: MemoryPlan,
    processes: ModelProcesses | None,
    progress: LoadProgress | None,
) -> Model:
    """Read the weights, while the other processes read theirs. Raises ConfigError."""
    from quickstep.model.loader import load_model

    checkpoint, spec, ops = planned.checkpoint, planned.spec, planned.ops
    if processes is not None:
        ops = processes.start(config, plan, spec, ops, planned.device)
    part = _own_part(processes)
    packed = _packed_loading(config, planned, plan, ops, part)
    fingerprint = None
    if packed is not None:
        ops = replace(ops, load_linear=packed.load_linear)
        fingerprint = packed.fingerprint
    model = load_model(
        checkpoint,
        spec,
        ops,
        config.load,
        progress,
        plan.max_model_len,
        not planned.why_torch,
        *part,
        weights=planned.weights,
        fingerprint=fingerprint,
    )
    if packed is not None:
        packed.finish(model.fingerprint)
    if not model.exact:
        _LOGGER.warning(
            "%s runs through transformers and is not exact: its bits may depend on the batch",
            checkpoint.name,
        )
    kv_layout = model.kv_layout.stored_as(config.cache.kv_dtype)
    is_narrower = kv_layout.dtype.itemsize < model.kv_layout.dtype.itemsize
    if is_narrower and config.load.pipeline_parallel_size == 1:
        _warn_of_kv(model, config.cache.kv_dtype)
    return model


def _packed_loading(
    config: EngineConfig,
    planned: _Planned,
    plan: MemoryPlan,
    ops: OpTable,
    part: tuple[Shard, Stage],
) -> PackedLoading | None:
    """Matrices from the cache directory; None where they are not kept there."""
    if not planned.spec.native or planned.spec.encoder is not None:
        return None
    from quickstep.engine.packed_weights.loading import PackedLoading
    from quickstep.model.loader import fingerprint_settings

    checkpoint = planned.checkpoint
    settings = fingerprint_settings(checkpoint, planned.spec, ops, config.load, plan.max_model_len)
    shard, stage = part
    text = ""
    if config.load.num_ranks > 1:
        text = f"rank {shard.rank} of {shard.size}, stage {stage.number} of {stage.size}"
    return PackedLoading.open(config.load, checkpoint, planned.dtype, ops, text, settings)


def _base_biases(model: Model, processes: ModelProcesses | None) -> Mapping[int, Array]:
    """The biases of all matrices of a model, with those of other processes; all ranks and stages
    call it, or `_own_biases`.
    """
    shard, _ = _own_part(processes)
    own = _own_biases(model, shard)
    return own if processes is None else {**own, **processes.stage_biases()}


def _own_biases(model: Model, shard: Shard) -> Mapping[int, Array]:
    """The biases of the matrices of a stage, complete on every rank of it; all of them call it."""
    from quickstep.model.adapters.lora_modules import base_biases
    from quickstep.model.decoder import Decoder
    from quickstep.model.sharding import complete_biases

    if not isinstance(model, Decoder):
        return {}
    first_layer = model.stage.layers(model.spec).start
    own = base_biases(model.spec, model.weights, model.ops, first_layer)
    return complete_biases(own, model.spec, shard, model.ops.ranks)


def _check_ranks(config: EngineConfig, planned: _Planned) -> None:
    """Refuse what several processes cannot compute, warn of what they compute slowly. Raises
    ConfigError.
    """
    from quickstep.model.sharding import check_ranks
    from quickstep.model.stages import check_stages

    load = config.load
    check_stages(planned.spec, load.pipeline_parallel_size)
    check_ranks(planned.spec, load.tensor_parallel_size)
    option = f"--tensor-parallel-size {load.tensor_parallel_size}"
    if load.pipeline_parallel_size > 1:
        option = f"--pipeline-parallel-size {load.pipeline_parallel_size}"
        if not config.scheduler.use_kv_cache:
            raise ConfigError(f"{option} needs the KV cache: leave --no-kv-cache out")
    if planned.device.type != "cpu":
        if load.pipeline_parallel_size > 1:
            raise ConfigError(f"{option} runs on CPUs only: use --device cpu, or leave it out")
        _check_gpus(planned.device, load.tensor_parallel_size)
        return
    if planned.ops.steps is None and load.pipeline_parallel_size > 1:
        raise ConfigError(f"{option} needs the native kernels: leave --kernels out")
    cores = usable_cores()
    if load.num_ranks > (load.num_threads or cores):
        _LOGGER.warning(
            "the model is divided among %d processes and there are %d threads: they will wait for "
            "one another",
            load.num_ranks,
            load.num_threads or cores,
        )


def _check_gpus(first: Device, size: int) -> None:
    """Refuse ranks that have no GPU each, or cannot exchange. Raises ConfigError."""
    from quickstep.model.checkpoint.placement import check_num_devices
    from quickstep.ops.collective import has_nccl

    check_num_devices(first, size)
    if not has_nccl():
        raise ConfigError(
            f"--tensor-parallel-size {size} needs NCCL, which this build of torch lacks; use "
            "--device cpu"
        )
    _LOGGER.warning(
        "ranks on several GPUs have been tested on CPUs only: compare them with one GPU by "
        "`quickstep verify MODEL --tensor-parallel-size %d --against 1`",
        size,
    )


def _check_moved_kv(config: EngineConfig, planned: _Planned, what: str, options: str) -> None:
    """Refuse what cannot move KV blocks to or from other places. Raises ConfigError."""
    needs = f"{what} need"
    if planned.device.type != "cpu":
        _LOGGER.warning(
            "%s: KV blocks are copied between the GPU and host memory, which no GPU has run yet",
            options,
        )
    if config.load.num_ranks > 1:
        raise ConfigError(
            f"{needs} engines of one process: leave --tensor-parallel-size and "
            "--pipeline-parallel-size out"
        )
    if not (config.cache.prefix_caching and config.scheduler.use_kv_cache):
        raise ConfigError(
            f"{needs} the prefix cache: leave --no-enable-prefix-caching and --no-kv-cache out"
        )
    if config.recording is not None:
        raise ConfigError(f"{what} are not recorded: leave --record out")


def open_rank(
    config: EngineConfig,
    plan: MemoryPlan,
    memory: RankMemory,
    rank: int,
    stage: int,
    store_path: str,
) -> RankFollower:
    """Load another rank's part of a stage while rank 0 of it loads its own. Raises ConfigError."""
    from quickstep.engine.ranks.processes import exchange_of, steps_of_messages
    from quickstep.model.loader import load_model
    from quickstep.model.sharding import Shard
    from quickstep.model.stages import Stage
    from quickstep.runtime.executors.out_of_memory import is_out_of_memory
    from quickstep.runtime.steps.ranked import RankFollower

    planned = _planned(config, None, stage * memory.size + rank)
    spec, ops = planned.spec, planned.ops
    ranks = steps_of_messages(ops).ranks(memory, rank)
    exchange = exchange_of(ranks, store_path, planned.device)
    ops, on_host = replace(ops, ranks=exchange), not planned.why_torch
    part = Shard(rank, memory.size), Stage(stage, config.load.pipeline_parallel_size)
    sizes = plan.max_model_len, on_host, *part
    try:
        model = load_model(planned.checkpoint, spec, ops, config.load, None, *sizes)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{config.load.device} has too little free memory for its part of the model: {error}"
        ) from None
    kv_layout = model.kv_layout.stored_as(config.cache.kv_dtype)
    if kv_layout.dtype.itemsize < model.kv_layout.dtype.itemsize and part[1].size == 1:
        from quickstep.runtime.cache.kv_probe import probed_logits

        for kv_dtype in ("auto", config.cache.kv_dtype):
            probed_logits(model, kv_dtype)  # which rank 0 compares (`_warn_of_kv`)
    if config.lora is not None:
        _own_biases(model, part[0])
    plan = measured_plan(config, model, kv_layout, plan)
    decoder, steps = _open_part(config, spec, model, kv_layout, plan)
    return RankFollower(decoder, steps, ranks)


def open_stage(
    config: EngineConfig, plan: MemoryPlan, links: StageLinks, processes: ModelProcesses
) -> tuple[StageFollower, Mapping[int, Array]]:
    """Load a stage that is not the last, with its ranks; returns the biases of its matrices too, if
    adapters may change them. Raises ConfigError.
    """
    from quickstep.runtime.steps.divided import DividedSteps
    from quickstep.runtime.steps.pipeline import StageFollower
    from quickstep.runtime.steps.ranked import with_ranks

    planned = _planned(config, None, processes.stage.number * processes.shard.size)
    model = _load_planned(config, planned, plan, processes, None)
    kv_layout = model.kv_layout.stored_as(config.cache.kv_dtype)
    biases = {} if config.lora is None else _own_biases(model, processes.shard)
    decoder, steps = _open_part(config, planned.spec, model, kv_layout, plan)
    processes.wait_opened(model.fingerprint)
    own = with_ranks(steps, decoder)
    assert isinstance(own, DividedSteps)
    return StageFollower(decoder, own, links, time.perf_counter), biases


def _open_part(
    config: EngineConfig, spec: ModelSpec, model: Model, kv_layout: KVLayout, plan: MemoryPlan
) -> tuple[Decoder, DividedSteps]:
    """The steps of another process's part, with its KV cache."""
    from quickstep.engine.speculation import aux_layers
    from quickstep.model.decoder import Decoder
    from quickstep.runtime.cache.kv_cache import allocate_kv
    from quickstep.runtime.steps.divided import DividedSteps
    from quickstep.runtime.steps.opening import open_steps

    block_size = config.cache.block_size
    kv = allocate_kv(kv_layout, plan.num_blocks, block_size, model.device)
    adapters: dict[str, LoRAAdapter] | None = None if config.lora is None else {}
    assert isinstance(model, Decoder)
    # what the stages before the last one pass on to its EAGLE layer
    aux = aux_layers(config, spec) if model.stage.size > 1 else ()
    steps = open_steps(model, kv, block_size, config.enforce_eager, adapters, aux)
    assert isinstance(steps, DividedSteps)
    return model, steps


def _warn_of_kv(model: Model, kv_dtype: str) -> None:
    """Warn if the narrower KV changes the model's outputs much."""
    from quickstep.runtime.cache.kv_probe import KV_BOUND, kv_change

    change = kv_change(model, kv_dtype)
    if not change <= KV_BOUND:
        _LOGGER.warning(
            "--kv-cache-dtype %s changes the model's next tokens by %.2f nats (more than "
            "%.2f; the perplexity grows by about exp of that), answers may suffer: measure "
            "with `quickstep bench accuracy`, or use --kv-cache-dtype auto",
            kv_dtype,
            change,
            KV_BOUND,
        )


def set_threads(num_threads: int | None) -> None:
    """torch's threads, and so the kernels' default. None: the cores that the process may use."""
    import torch

    torch.set_num_threads(num_threads or usable_cores())


def num_threads(load: LoadConfig) -> int:
    """Threads to compute with, of each process of a model."""
    return max(1, (load.num_threads or usable_cores()) // load.num_ranks)


def _gpu_text(device: Device) -> str:
    import torch

    from quickstep.ops.tensors import torch_device

    place = torch_device(device)
    free_bytes = torch.cuda.mem_get_info(place)[0]
    name = torch.cuda.get_device_name(place)
    return f"{name} ({place}, {free_bytes / 2**30:.1f} GiB free)"


def _fitted(
    config: EngineConfig,
    plan: MemoryPlan,
    adapters: Adapters | None,
    has_graphs: bool,
    is_encoder: bool,
) -> SchedulerConfig:
    return replace(
        config.scheduler,
        num_stages=config.load.pipeline_parallel_size,
        num_speculative_tokens=max_drafts(config),
        num_state_slots=plan.states.num_slots,
        state_interval=config.cache.state_interval,
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        pipeline_depth=_pipeline_depth(config, has_graphs),
        max_loras=None if config.lora is None else config.lora.max_loras,
        lora_bytes=None if adapters is None else adapters.max_bytes,
        complete_prompts=is_encoder,
    )


def _pipeline_depth(config: EngineConfig, has_graphs: bool) -> int:
    """Steps in flight: with graphs, the device keeps the tokens that the next step needs; every
    stage of a pipeline computes one.
    """
    default = 2 if has_graphs and config.scheduler.use_kv_cache else 1
    return max(config.scheduler.pipeline_depth or default, config.load.pipeline_parallel_size)


def describe(
    loaded: LoadedWeights,
    load_s: float,
    inputs: InputConfig | None = None,
    tokenizer: Tokenizer | None = None,
    with_template: bool = True,
) -> LoadedModel:
    """Read the checkpoint's tokenizer, template and sampling values, for the engine to serve."""
    from quickstep.model.checkpoint.fingerprint import fingerprint_with_kv
    from quickstep.text.grammar.grammars import GrammarCompiler
    from quickstep.text.grammar.source import GrammarLimits
    from quickstep.text.grammar.trial import TrialLimits
    from quickstep.text.tokenizer import Tokenizer

    inputs = inputs or InputConfig()
    path = loaded.checkpoint.path
    tokenizer = tokenizer or Tokenizer.open(path)
    return LoadedModel(
        name=loaded.checkpoint.name,
        fingerprint=fingerprint_with_kv(loaded.model, loaded.kv_layout),
        max_model_len=loaded.plan.max_model_len,
        vocab_size=loaded.model.vocab_size,
        tokenizer=tokenizer,
        open_template=partial(_template, path, tokenizer, inputs) if with_template else None,
        default_sampling=_default_sampling(path),
        load_s=load_s,
        memory_plan=loaded.plan,
        path=path,
        grammars=GrammarCompiler(
            tokenizer,
            loaded.model.vocab_size,
            GrammarLimits.of(inputs),
            TrialLimits(cpu_s=inputs.grammar_s),
        ),
        retrieval=_retrieval(path, loaded.spec, tokenizer),
    )


def _template(path: Path, tokenizer: Tokenizer, inputs: InputConfig) -> ChatTemplate | None:
    from quickstep.text.chat_template import ChatTemplate

    return ChatTemplate.open(path, tokenizer.special_tokens, datetime.now, inputs)


def _default_sampling(path: Path) -> Mapping[str, float]:
    """The checkpoint's sampling values, for callers that use them; the engine applies none.

    Raises:
        ConfigError: One is no number.
    """
    file = path / "generation_config.json"
    values = read_json(file)
    fields = ConfigFields(values, {}, str(file))
    for theirs in _SAMPLING_FIELDS:
        fields.optional_number(theirs)
    named = {ours: values[theirs] for theirs, ours in _SAMPLING_FIELDS.items() if theirs in values}
    return MappingProxyType({name: value for name, value in named.items() if value is not None})


def _retrieval(path: Path, spec: ModelSpec, tokenizer: Tokenizer) -> Retrieval:
    """The card of a decoder, which may answer yes or no, or of a model that only embeds texts."""
    encoder = spec.encoder
    if not spec.has_head:
        why = f"the checkpoint has no output projection: {_ONLY_EMBEDS}"
        return replace(read_retrieval(path, None, None), text_refusal=why)
    if encoder is None:
        return read_retrieval(path, tokenizer.token_id("yes"), tokenizer.token_id("no"))
    why = f"the model is an encoder: {_ONLY_EMBEDS}"
    labels = () if encoder.head is None else encoder.head.labels
    named = gguf_pooling(path) if is_gguf(path) else None
    pooling = Pooling.CLS if named is None else Pooling(named)
    retrieval = read_retrieval(path, None, None, default_pooling=pooling)
    if not labels:
        return replace(retrieval, is_encoder=True, text_refusal=why)
    no_vectors = "the model has a classification head; it gives classes and scores, no embeddings"
    scoring, refusal = Scoring.CLASS, ""
    if len(labels) != 1:
        refusal = f"the model has {len(labels)} classes; only a head of one class scores pairs"
    return replace(
        retrieval,
        is_encoder=True,
        text_refusal=why,
        pooling=Pooling.CLASSES,
        labels=labels,
        refusal=no_vectors,
        scoring=scoring,
        scoring_refusal=refusal,
    )
