"""The processes of a model that is divided: tensor-parallel ranks, and stages of a pipeline.

    engine's process: the last stage, rank 0 ── ranks 1, 2, ... of it
            └── stages before it, rank 0 of each ── ranks 1, 2, ... of it

Scheduler, slots and sampler are in the engine's process, as without others. The others are its
children, which load their parts at the same time and then follow it: ranks through shared memory
(`ops.native.ranks`), stages through sockets from one to the next (`runtime.steps.pipeline`).
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from quickstep.config import EngineConfig, LoadConfig
from quickstep.engine.logs import LogSetup
from quickstep.engine.ranks.followers import DividedAdapter, DividedAdapters, Followers
from quickstep.engine.ranks.messages import OpenRank, OpenStage
from quickstep.engine.speculation import aux_layers
from quickstep.errors import ConfigError, EngineError
from quickstep.model.checkpoint.placement import rank_device
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.sharding import Shard, shard_adapter
from quickstep.model.sizing import MemoryPlan
from quickstep.model.stages import NUM_CARRIED, Stage, stage_adapter
from quickstep.ops.collective import CollectiveRanks, open_ranks
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.native.ranks import NativeRanks, RankMemory
from quickstep.ops.native.steps import NativeSteps
from quickstep.ops.table import LoRAPart, OpTable, Ranks
from quickstep.ops.tensors import Array, Device
from quickstep.runtime.steps.pipeline import StageLinks
from quickstep.runtime.steps.ranked import RankWork

_LEAST_STAGE_BYTES = 2 << 20  # as much of a gather is put together at once
_SCORED_POSITIONS = 64  # whose hidden states are posted at once (`runtime.sampling.prompt_scores`)
_LINK_BYTES = 4 << 20  # of a socket between stages, as far as the system allows

OnLost = Callable[[str], None]


class ModelProcesses:
    """The processes that hold the other parts of a model than this one's. `close` them in any case.

    `stage` is this process's own; None for the last one, which has those before it as children.
    `on_lost` is called with a sentence when one ends by itself, in a thread that watches them.
    """

    def __init__(
        self, load: LoadConfig, on_lost: OnLost | None = None, stage: Stage | None = None
    ) -> None:
        size, num_stages = load.tensor_parallel_size, load.pipeline_parallel_size
        self.shard = Shard(0, size)
        self.stage = Stage(num_stages - 1, num_stages) if stage is None else stage
        self._ranks = _Ranks(self.shard.size, self.stage, on_lost) if size > 1 else None
        has_stages = num_stages > 1 and stage is None
        self._stages = _Stages(num_stages, on_lost) if has_stages else None

    @property
    def links(self) -> StageLinks | None:
        """To the stages; None without any."""
        return None if self._stages is None else self._stages.links

    def start(
        self, config: EngineConfig, plan: MemoryPlan, spec: ModelSpec, ops: OpTable, device: Device
    ) -> OpTable:
        """Start the processes, which load their parts; returns the ops of this process, which has
        `device`.
        """
        if self._ranks is not None:
            ops = self._ranks.start(config, plan, spec, ops, device)
        return ops if self._stages is None else self._stages.start(config, plan, spec, ops)

    def wait_opened(self, fingerprint: str) -> None:
        """Wait until all have their parts of the model with this fingerprint. Raises ConfigError if
        one cannot load it, or has another model.
        """
        for part in self._parts():
            part.followers.wait_opened(fingerprint)

    def failure_within(self, timeout_s: float) -> str:
        """Why one of them has ended or cannot load its part; "" if none has after this time."""
        reasons = (part.followers.failure_within(timeout_s) for part in self._parts())
        return next(filter(None, reasons), "")

    def stage_biases(self) -> Mapping[int, Array]:
        """The biases [N] of the matrices of the other stages, by number. Raises ConfigError if one
        cannot load its part.
        """
        if self._stages is None:
            return {}
        parts = self._stages.followers.parts().values()
        return {number: bias for part in parts for number, bias in part.numbered_biases()}

    def close(self) -> None:
        """End the processes; no step may run. Idempotent."""
        for part in reversed(self._parts()):
            part.close()

    def _parts(self) -> list[_Ranks | _Stages]:
        return [part for part in (self._ranks, self._stages) if part is not None]


class _Ranks:
    """The ranks 1 to `size` - 1 of a stage."""

    def __init__(self, size: int, stage: Stage, on_lost: OnLost | None) -> None:
        self._size = size
        self._stage = stage
        self._ranks: NativeRanks | None = None
        self._exchange: CollectiveRanks | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # where torch's ranks meet
        self.followers = Followers(self._label, self._break, on_lost)

    def _label(self, rank: int) -> str:
        of_stage = "" if self._stage.size == 1 else f" of stage {self._stage.number}"
        return f"rank {rank} of {self._size}{of_stage}"

    def start(
        self, config: EngineConfig, plan: MemoryPlan, spec: ModelSpec, ops: OpTable, device: Device
    ) -> OpTable:
        """Start them; returns rank 0's ops with its end of the group."""
        steps = steps_of_messages(ops)
        num_aux = len(aux_layers(config, spec))
        sizes = _sizes(spec, plan, config.cache.block_size, self._stage, num_aux)
        memory = RankMemory.create(*sizes, self._size)
        self._ranks = steps.ranks(memory, 0)
        if ops.steps is None:
            self._folder = tempfile.TemporaryDirectory(prefix="quickstep-ranks-")
        store_path = "" if self._folder is None else f"{self._folder.name}/store"
        ranks, log = range(1, self._size), _log()
        openings = {
            rank: OpenRank(theirs, plan, memory, rank, self._stage.number, log, store_path)
            for rank in ranks
            for theirs in (opening_config(config, ops, device, rank),)
        }
        shared = dict.fromkeys(ranks, (memory.descriptor,))
        self.followers.start(openings, shared, lambda: os.close(memory.descriptor))

        def divide(modules: Sequence[Sequence[LoRAPart]]) -> DividedAdapter:
            parts = [
                shard_adapter(modules, spec, Shard(rank, self._size)) for rank in range(self._size)
            ]
            return parts[0], dict(enumerate(parts[1:], 1))

        packs = DividedAdapters(self.followers, ops, divide).pack
        exchange = exchange_of(self._ranks, store_path, device, self.followers.check)
        if isinstance(exchange, CollectiveRanks):
            self._exchange = exchange
        return replace(ops, ranks=exchange, pack_lora=packs)

    def close(self) -> None:
        """End them."""
        self.followers.close(self._finish)
        if self._folder is not None:
            self._folder.cleanup()

    def _finish(self) -> None:
        assert self._ranks is not None
        with suppress(EngineError):  # one is lost, which breaks the others' waiting
            self._ranks.post(RankWork.CLOSE)

    def _break(self) -> None:
        for end in (self._exchange, self._ranks):
            if end is not None:
                end.break_()


class _Stages:
    """The stages before the last one, by number."""

    def __init__(self, num_stages: int, on_lost: OnLost | None) -> None:
        self._size = num_stages
        self.followers = Followers(self._label, self._break, on_lost)
        # the link at a place leads to the stage with this number
        pairs = [socket.socketpair() for _ in range(num_stages)]
        for _, target in pairs:
            target.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LINK_BYTES)
        for source, _ in pairs:
            source.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LINK_BYTES)
        self._pairs = pairs
        self.links = StageLinks(before=pairs[-1][1], after=pairs[0][0])

    def _label(self, number: int) -> str:
        return f"stage {number} of {self._size}"

    def start(
        self, config: EngineConfig, plan: MemoryPlan, spec: ModelSpec, ops: OpTable
    ) -> OpTable:
        """Start them; returns the last stage's ops."""
        openings, shared = {}, {}
        for number in range(self._size - 1):
            before, after = self._pairs[number][1], self._pairs[number + 1][0]
            shared[number] = before.fileno(), after.fileno()
            openings[number] = OpenStage(config, plan, number, *shared[number], _log())

        def divide(modules: Sequence[Sequence[LoRAPart]]) -> DividedAdapter:
            parts = [
                stage_adapter(modules, spec, Stage(number, self._size))
                for number in range(self._size)
            ]
            return parts[-1], dict(enumerate(parts[:-1]))

        self.followers.start(openings, shared, self._close_theirs)
        return replace(ops, pack_lora=DividedAdapters(self.followers, ops, divide).pack)

    def _close_theirs(self) -> None:
        """The stages have their ends, so that a stage which ends closes them."""
        for _, target in self._pairs[:-1]:
            target.close()
        for source, _ in self._pairs[1:]:
            source.close()

    def close(self) -> None:
        """End them."""
        self.followers.close(lambda: None)
        self._close_theirs()
        for end in (self.links.before, self.links.after):
            end.close()

    def _break(self) -> None:
        """No step continues: the first stage ends, then those after it."""
        for end in (self.links.after, self.links.before):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def steps_of_messages(ops: OpTable) -> NativeSteps:
    """What rank 0's messages go through, also where other ops compute. Raises ConfigError."""
    if ops.steps is not None:
        return ops.steps
    native = load_native(1)
    if native is None or native.steps is None:
        raise ConfigError(f"--tensor-parallel-size needs the library: {native_status().reason}")
    return native.steps


def exchange_of(
    messages: NativeRanks,
    store_path: str,
    device: Device,
    check_others: Callable[[], None] = lambda: None,
) -> Ranks:
    """By what a rank on this device exchanges parts: in shared memory, or by `ops.collective`,
    whose ranks meet in a file. Returns once all have come; raises EngineError if one does not, and
    what `check_others` raises meanwhile.
    """
    return open_ranks(store_path, messages, device, check_others) if store_path else messages


def opening_config(config: EngineConfig, ops: OpTable, device: Device, rank: int) -> EngineConfig:
    """What another rank opens, where rank 0 has `device` and these ops: on GPUs the next devices,
    one each, with the same kernels.
    """
    if device.type == "cpu":
        return config
    own = rank_device(device, rank)
    load = replace(config.load, device=f"{own.type}:{own.index}", kernels=ops.name)
    return replace(config, load=load)


def _log() -> LogSetup:
    return LogSetup(level=logging.getLogger().getEffectiveLevel())


def _sizes(
    spec: ModelSpec, plan: MemoryPlan, block_size: int, stage: Stage, num_aux: int
) -> tuple[int, int]:
    """Bytes of a gather and of the largest message, in which the stage before passes on the inputs
    of `num_aux` layers. Pages that are not written take no memory.
    """
    widest = max(
        spec.vocab_size,
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_heads * spec.value_size,
    )
    tokens = max(plan.max_num_batched_tokens, plan.max_num_seqs)
    words = 16 * tokens  # rows, token ids, emitting tokens, parents, adapters, pairs of moves
    blocks = plan.max_num_seqs * (plan.max_model_len // block_size + 2)
    # of prompts that are scored, or what the stage before has left
    num_hidden = _SCORED_POSITIONS
    if not stage.is_first:
        num_hidden += (NUM_CARRIED + num_aux) * tokens
    hidden_bytes = 4 * num_hidden * spec.hidden_size
    return max(_LEAST_STAGE_BYTES, 16 * widest), 8 * words + 4 * blocks + hidden_bytes + 4096
