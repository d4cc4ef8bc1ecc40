"""`EngineTier`: carries out what `core.resources.kv_tiers` orders, in a thread of its own.

Steps continue meanwhile. A save copies blocks that nothing holds, and asks the event loop whether
they had their content all the time, before anything is written; so no block is kept from sequences
while a disk writes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from quickstep.config import CacheConfig, KVTierConfig
from quickstep.core.resources.kv_tiers import KVTiers, RestoreOrder, SaveOrder
from quickstep.core.scheduler import Scheduler
from quickstep.engine.kv_files.directory import KVDirectory, identity_of
from quickstep.runtime.cache.block_bytes import BlockBytes, num_at_once

_LOGGER = logging.getLogger(__name__)
_CLOSE_S = 10.0  # how long the end of an engine waits for its blocks to be written
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_MAX_WARNINGS = 3
_DEFAULT_BYTES = 10_000_000_000  # of `--kv-cache-disk-bytes`
_SPAN_BLOCKS = 64


def open_directory(
    cache: CacheConfig, blocks: BlockBytes, fingerprint: str
) -> tuple[KVDirectory, KVTierConfig]:
    """The directory of a model with these blocks, and what the scheduler has to know of it. Raises
    ConfigError if it cannot be used.
    """
    assert cache.kv_cache_dir is not None, "there is a directory"
    block_bytes = blocks.num_bytes
    identity = identity_of(blocks.fingerprint(fingerprint), cache.block_size, block_bytes)
    directory = KVDirectory.open(Path(cache.kv_cache_dir).expanduser(), identity, block_bytes)
    config = KVTierConfig(
        block_bytes,
        cache.kv_cache_disk_bytes or _DEFAULT_BYTES,
        min(_SPAN_BLOCKS, num_at_once(block_bytes)),
        directory.may_write,
    )
    return directory, config


class EngineTier:
    """Owns the thread and the directory of one engine. `changed` is called in the event loop when a
    restore has ended, so that its request may continue.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockBytes,
        directory: KVDirectory,
        clock: Callable[[], float],
    ) -> None:
        assert scheduler.held.tiers is not None, "`SchedulerConfig.kv_tier` is set"
        self._scheduler = scheduler
        self._tiers: KVTiers = scheduler.held.tiers
        self._blocks = blocks
        self._directory = directory
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: Callable[[], None] = lambda: None
        self._orders: queue.SimpleQueue[SaveOrder | RestoreOrder | None] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._all_saved = asyncio.Event()
        self._num_warnings = 0
        self._thread = threading.Thread(target=self._run, name="kv-files", daemon=True)

    def start(self, changed: Callable[[], None]) -> None:
        """Serve in the running event loop, with what earlier processes have left."""
        self._loop = asyncio.get_running_loop()
        self._changed = changed
        self._directory.remove(self._tiers.add_spans(self._directory.spans()))
        found = self._tiers.stats()
        _LOGGER.info(
            "%d KV blocks (%.1f MB) are stored in %s",
            found.num_blocks,
            found.num_bytes / 1e6,
            self._directory.path,
        )
        self._thread.start()

    async def close(self) -> None:
        """Save what is to be saved, unless that takes too long, and end the thread."""
        if self._loop is not None:
            self._all_saved.clear()
            self.follow_orders()
            try:
                async with asyncio.timeout(_CLOSE_S):
                    while self._tiers.is_saving:
                        await self._all_saved.wait()
                        self._all_saved.clear()
            except TimeoutError:
                _LOGGER.warning("not all KV blocks are stored")
            self._is_closing.set()
            self._orders.put(None)
            await asyncio.to_thread(self._thread.join, _CLOSE_S)
        self._directory.close()

    def follow_orders(self) -> None:
        """Carry out what was ordered, and can begin."""
        for restore in self._tiers.take_restores():
            self._orders.put(restore)
        if (save := self._tiers.take_save()) is not None:
            self._orders.put(save)

    # -- in the event loop, for the thread ---------------------------------------------------------

    def _saved(self, order: SaveOrder, is_saved: bool) -> None:
        self._tiers.saved(order, is_saved)
        self.follow_orders()
        self._all_saved.set()

    def _end_restoring(self, order: RestoreOrder, num_blocks: int, seconds: float) -> None:
        if num_blocks:
            self._tiers.measured(num_blocks, seconds)
        key = self._tiers.end_restoring(order.request_id)
        self._scheduler.arrived(key, self._clock())
        self._changed()

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            if isinstance(order, SaveOrder):
                self._save(order)
            else:
                self._restore(order)

    def _save(self, order: SaveOrder) -> None:
        is_saved = False
        try:
            self._directory.remove(order.removed)
            with self._blocks.reading(order.block_ids) as blocks:
                content = [list(map(bytes, parts)) for parts in blocks]
            if self._confirm(order):
                self._directory.write(order, content)
                is_saved = True
        except OSError as error:
            if error.errno in _FULL:
                _LOGGER.warning("KV blocks are not stored any more: %s", error)
                self._soon(self._tiers.stop_saving)
            else:
                self._warn("KV blocks are not stored: %s", error)
        except Exception as error:  # the thread is needed for restores
            self._warn("KV blocks are not stored: %r", error)
        self._soon(lambda: self._saved(order, is_saved))

    def _restore(self, order: RestoreOrder) -> None:
        started_s, num_blocks, name = self._clock(), 0, order.request_id
        for piece in order.pieces:
            try:
                with self._blocks.writing(piece.block_ids) as places:
                    self._directory.read(piece, places)
            except Exception as error:  # whatever it is, the request computes the blocks
                self._warn(f"stored KV blocks are not used ({piece.name}): %s", error)
                self._directory.remove((piece.name,))
                self._soon(partial(self._tiers.forget_span, piece.name))
                break
            num_piece = len(piece.block_ids)
            num_blocks += num_piece
            self._soon(partial(self._tiers.restored, name, num_piece))
        seconds = self._clock() - started_s
        self._soon(lambda: self._end_restoring(order, num_blocks, seconds))

    def _warn(self, text: str, error: Exception) -> None:
        """Once for each of a few; a broken disk would fill the log."""
        self._num_warnings += 1
        log = _LOGGER.warning if self._num_warnings <= _MAX_WARNINGS else _LOGGER.debug
        log(text, error)

    def _confirm(self, order: SaveOrder) -> bool:
        """Whether the copied blocks had their content; False if the engine ends."""
        answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._soon(lambda: answers.put(self._tiers.confirm(order)))
        while not self._is_closing.is_set():
            try:
                return answers.get(timeout=0.2)
            except queue.Empty:
                continue
        return False

    def _soon(self, call: Callable[[], object]) -> None:
        """Let the event loop make a call, after those before it."""
        assert self._loop is not None, "the thread runs"
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: the engine has ended
            self._is_closing.set()
