"""The other ranks of a model, as rank 0 sees them: start, open, watch, end.

Rank 0 is the engine's process: scheduler, slots and sampler are there, as without ranks. The others
are children of it, which load their parts at the same time and then follow it. A thread starts them
and watches their connections, because Linux ends a child with the thread that made it. When one
ends, the group is broken: the step that runs fails, and so does every later one.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from quickstep.config import EngineConfig
from quickstep.engine.logs import LogSetup
from quickstep.engine.ranks.messages import (
    FROM_RANK,
    AdapterHeld,
    DropAdapter,
    HoldAdapter,
    OpenRank,
    RankRefused,
    WirePart,
    receive,
    send,
)
from quickstep.engine.remote.launch import Launched, launch
from quickstep.engine.remote.opening import WireMessage
from quickstep.errors import ConfigError, EngineError
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.sharding import Shard, shard_adapter
from quickstep.model.sizing import MemoryPlan
from quickstep.ops.native.lora import PackedLoRA
from quickstep.ops.native.ranks import NativeRanks, RankMemory
from quickstep.ops.table import LoRAAdapter, LoRAPart, OpTable
from quickstep.runtime.steps.ranked import RankWork

_LOGGER = logging.getLogger(__name__)

# -P: do not import modules from the working directory
_COMMAND = (sys.executable, "-P", "-m", "quickstep.engine.ranks.worker")
_LEAST_STAGE_BYTES = 2 << 20  # as much of a gather is put together at once
_SCORED_POSITIONS = 64  # whose hidden states are posted at once (`runtime.sampling.prompt_scores`)


class RankProcesses:
    """The ranks 1 to `size` - 1. `close` them in any case.

    `on_lost` is called with a sentence when one ends by itself, in the thread that watches them.
    """

    def __init__(self, size: int, on_lost: Callable[[str], None] | None = None) -> None:
        self.size = size
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._opened: dict[int, str] = {}  # the ranks that have their part, and its fingerprint
        self._failure = ""
        self._is_closing = False
        self._ranks: NativeRanks | None = None
        self._watching: threading.Thread | None = None
        self._launched: dict[int, Launched] = {}
        self._sending = threading.Lock()
        self._holding: dict[int, int] = {}  # ranks that have not yet packed an adapter, by number
        self._dropped: deque[int] = deque()  # adapters that the ranks may free

    def start(
        self, config: EngineConfig, plan: MemoryPlan, spec: ModelSpec, ops: OpTable
    ) -> OpTable:
        """Start the processes, which load their parts; returns rank 0's ops, native ones, with its
        end of the group.
        """
        assert ops.steps is not None, "they are native"
        memory = RankMemory.create(*_sizes(spec, plan, config.cache.block_size), self.size)
        self._ranks = ops.steps.ranks(memory, 0)
        log = LogSetup(level=logging.getLogger().getEffectiveLevel())
        openings = [OpenRank(config, plan, memory, rank, log) for rank in range(1, self.size)]
        self._watching = threading.Thread(
            target=self._watch, args=(openings,), name="ranks", daemon=True
        )
        self._watching.start()
        return replace(ops, ranks=self._ranks, pack_lora=_RankAdapters(self, ops, spec).pack)

    def wait_opened(self, fingerprint: str) -> None:
        """Wait until every rank has its part of the model with this fingerprint. Raises ConfigError
        if one cannot load it, or has another model.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._has_opened())
            if self._failure:
                raise ConfigError(self._failure)
        for rank, found in self._opened.items():
            if found != fingerprint:
                raise ConfigError(
                    f"rank {rank} of {self.size} has loaded the weights {found}, and rank 0 "
                    f"{fingerprint}: the checkpoint was changed meanwhile; start again"
                )

    def _has_opened(self) -> bool:
        return len(self._opened) == self.size - 1

    def hold_adapter(self, number: int, parts: Mapping[int, list[list[LoRAPart]]]) -> None:
        """Let each rank pack its parts of an adapter, and wait until all have. Any thread may call
        it. Raises EngineError when a rank is lost.
        """
        with self._changed:
            self._holding[number] = len(parts)
        while self._dropped:
            dropped = DropAdapter(self._dropped.popleft())
            for rank in parts:
                self._send(rank, dropped)
        for rank, modules in parts.items():
            wire = [WirePart.of(module, part) for module, own in enumerate(modules) for part in own]
            self._send(rank, HoldAdapter(number, len(modules), tuple(wire)))
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._holding[number])
            del self._holding[number]
            if self._failure:
                raise EngineError(self._failure)

    def drop_adapter(self, number: int) -> None:
        """Let the ranks free an adapter, before they get the next one. Any thread may call it, also
        as a finalizer, which may interrupt a send.
        """
        self._dropped.append(number)

    def _send(self, rank: int, message: WireMessage) -> None:
        with suppress(OSError), self._sending:  # the thread that watches reports a lost rank
            send(self._launched[rank].connection, message)

    def close(self) -> None:
        """End the processes; no step may run. Idempotent."""
        with self._changed:
            if self._is_closing or self._ranks is None:
                return
            self._is_closing = True
            if not self._has_opened():  # they still load
                for process in self._launched.values():
                    process.process.kill()
        try:
            if not self._failure:
                self._ranks.post(RankWork.CLOSE)
        except EngineError:
            pass  # one is lost, which breaks the others' waiting
        self._ranks.break_()
        if self._watching is not None:
            self._watching.join()

    # -- the thread that watches -------------------------------------------------------------------

    def _watch(self, openings: list[OpenRank]) -> None:
        launched = self._launched
        try:
            for opening in openings:
                launched[opening.rank] = launch(_COMMAND, shared=(opening.memory.descriptor,))
                send(launched[opening.rank].connection, opening)
            self._follow(launched)
        except (EngineError, OSError) as error:
            self._fail(f"a rank of the model cannot be started: {error}")
        finally:
            os.close(openings[0].memory.descriptor)
            with self._sending:
                for process in launched.values():
                    process.end()

    def _follow(self, launched: dict[int, Launched]) -> None:
        """Read what the ranks say, until all have ended or one is lost."""
        with selectors.DefaultSelector() as selector:
            for rank, process in launched.items():
                selector.register(process.connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    try:
                        message = receive(launched[rank].connection, FROM_RANK)
                    except (OSError, msgspec.DecodeError):
                        message = None
                    if message is None:
                        selector.unregister(key.fileobj)
                        if self._has_lost(rank, launched[rank]):
                            return
                    elif isinstance(message, RankRefused):
                        self._fail(f"rank {rank} of {self.size}: {message.reason}")
                        return
                    else:
                        with self._changed:
                            if isinstance(message, AdapterHeld):
                                self._holding[message.number] -= 1
                            else:
                                self._opened[rank] = message.fingerprint
                            self._changed.notify_all()

    def _has_lost(self, rank: int, process: Launched) -> bool:
        """A rank has closed its connection: True unless the group is closing."""
        with self._changed:
            if self._is_closing:
                return False
        status = process.wait()
        self._fail(f"rank {rank} of {self.size} has ended by itself (exit status {status})")
        return True

    def _fail(self, sentence: str) -> None:
        assert self._ranks is not None
        self._ranks.break_()
        with self._changed:
            was_open = self._has_opened()
            self._failure = sentence
            self._changed.notify_all()
        if was_open:
            _LOGGER.error("%s", sentence)
            if self._on_lost is not None:
                self._on_lost(sentence)


class _RankAdapters:
    """`OpTable.pack_lora` of rank 0: every rank packs its part of an adapter.

    An adapter has a number, by which steps name it, and stays on all ranks while rank 0's part of
    it does.
    """

    def __init__(self, processes: RankProcesses, ops: OpTable, spec: ModelSpec) -> None:
        self._processes = processes
        self._pack = ops.pack_lora
        self._spec = spec
        self._numbers = itertools.count(1)

    def pack(self, modules: Sequence[Sequence[LoRAPart]]) -> LoRAAdapter:
        """Rank 0's part, once the others have theirs. Raises EngineError when a rank is lost."""
        size, number = self._processes.size, next(self._numbers)
        own = self._pack(shard_adapter(modules, self._spec, Shard(0, size)))
        assert isinstance(own.data, PackedLoRA), "adapters are in dtypes of the kernels"
        parts = {
            rank: shard_adapter(modules, self._spec, Shard(rank, size)) for rank in range(1, size)
        }
        self._processes.hold_adapter(number, parts)
        own.data.number = number
        finalizer = weakref.finalize(own.data, self._processes.drop_adapter, number)
        finalizer.atexit = False
        return own


def _sizes(spec: ModelSpec, plan: MemoryPlan, block_size: int) -> tuple[int, int]:
    """Bytes of a stage and of the largest message. Pages that are not written take no memory."""
    widest = max(
        spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_size
    )
    tokens = max(plan.max_num_batched_tokens, plan.max_num_seqs)
    words = 16 * tokens  # rows, token ids, emitting tokens, parents, adapters, pairs of moves
    blocks = plan.max_num_seqs * (plan.max_model_len // block_size + 2)
    hidden_bytes = 4 * _SCORED_POSITIONS * spec.hidden_size
    return max(_LEAST_STAGE_BYTES, 16 * widest), 8 * words + 4 * blocks + hidden_bytes + 4096
