"""`SlotFiles`: KV of a conversation in a file that a client names, and back (`--slot-save-path`).

    bytes of a block in all layers | uint32 crc32 of them, for each block, after the header

A `HeadedFormat` with a `SlotHeader`. What comes back is a cached prefix, as in `tier`: the next
request with the same tokens hits it, and computes what a changed file has lost. Unlike the tier's,
these files are written and read when a client says so, are never removed here, and have the tokens,
by which the prefix is found again. So they are for their owner only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from quickstep.config import CacheConfig
from quickstep.core.resources.block_pool import ChainRoot
from quickstep.core.resources.kv_tiers import identities
from quickstep.core.resources.kv_transfers import CachedPrefix, KVTransfers, ReceiveOrder
from quickstep.core.scheduler import Scheduler
from quickstep.engine.headed_file import HeadedFormat
from quickstep.engine.kv_files.directory import identity_of
from quickstep.engine.kv_files.span_file import checksum_of
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.private_directory import private_directory
from quickstep.errors import ConfigError, EngineError, RequestError
from quickstep.runtime.cache.block_bytes import BlockBytes, in_groups
from quickstep.types import SlotPrefix

_LOGGER = logging.getLogger(__name__)
_CHECKSUM = struct.Struct("!I")
_MAX_NAME_BYTES = 200  # of a file's name; the name while it is written is a little longer


class SlotHeader(msgspec.Struct, frozen=True, array_like=True):
    """What a file says of itself.

    Attributes:
        identity: Of the weights, the kernels and the form of the KV cache.
        block_bytes: Of a block in all layers.
        adapter: The name of the adapter; "" for none.
        content: Of adapter, salt and all tokens (`kv_tiers.identities`): the salt is not in it.
    """

    identity: str
    block_bytes: int
    adapter: str
    token_ids: tuple[int, ...]
    content: bytes


_FORMAT = HeadedFormat(b"QSSLOT01", "a slot", SlotHeader)


def check_filename(name: str) -> None:
    """Raise RequestError unless it names a file in the directory itself."""
    is_plain = name.isprintable() and not name.startswith(".") and not set(name) & set('/\\:*?"<>|')
    if not name or not is_plain or len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        raise RequestError(
            f"filename is {name[:64]!r}, it must be the name of a file in --slot-save-path, "
            f"without a directory and of at most {_MAX_NAME_BYTES} bytes",
            param="filename",
        )


class SlotFiles:
    """The files of one engine. Its methods run in the engine's event loop; bytes are moved in
    threads, while steps continue.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        scheduler: Scheduler,
        blocks: BlockBytes,
        clock: Callable[[], float],
    ) -> None:
        assert scheduler.held.transfers is not None, "`SchedulerConfig.transfers_kv` is set"
        self._directory = directory
        self._identity = identity
        self._scheduler = scheduler
        self._transfers: KVTransfers = scheduler.held.transfers
        self._block_size = scheduler.block_size
        self._blocks = blocks
        self._clock = clock
        self._num_restores = 0
        self._arriving = OwnedTasks(_LOGGER)
        self._saving = asyncio.Lock()
        self._changed: Callable[[], None] = lambda: None
        self._unbegun: list[tuple[int, asyncio.Future[None]]] = []

    @staticmethod
    def open(
        cache: CacheConfig,
        scheduler: Scheduler,
        blocks: BlockBytes,
        fingerprint: str,
        clock: Callable[[], float],
    ) -> SlotFiles:
        """Make the directory if it is not there. Raises ConfigError if it cannot be used."""
        assert cache.slot_save_path is not None, "there is a directory"
        directory = Path(cache.slot_save_path).expanduser()
        source = f"--slot-save-path is {directory}"
        try:
            private_directory(directory, source, "tokens of conversations and their KV")
        except OSError as error:
            raise ConfigError(f"{source}, which cannot be used: {error}") from None
        identity = identity_of(blocks.fingerprint(fingerprint), cache.block_size, blocks.num_bytes)
        return SlotFiles(directory, identity, scheduler, blocks, clock)

    def start(self, changed: Callable[[], None]) -> None:
        """`changed` is called when blocks are free again."""
        self._changed = changed

    def follow_steps(self) -> None:
        """Let copies begin to whose blocks no step in flight writes any more."""
        for step_id, may_begin in self._unbegun:
            if self._transfers.are_over(step_id) and not may_begin.done():
                may_begin.set_result(None)
        self._unbegun = [entry for entry in self._unbegun if not entry[1].done()]

    def close(self) -> None:
        """No step follows: copies that have not begun end."""
        for _, may_begin in self._unbegun:
            if not may_begin.done():
                may_begin.set_exception(EngineError("the engine was stopped"))
        self._unbegun.clear()

    async def save(
        self, filename: str, adapter: str, root: ChainRoot, token_ids: Sequence[int]
    ) -> SlotPrefix:
        """Write what is cached of a prefix, in full blocks.

        Raises:
            RequestError: For the name.
            EngineError: Nothing of it is cached any more, or it cannot be written.
        """
        check_filename(filename)
        async with self._saving:
            return await self._save(filename, adapter, root, token_ids)

    async def _save(
        self, filename: str, adapter: str, root: ChainRoot, token_ids: Sequence[int]
    ) -> SlotPrefix:
        prefix = self._transfers.cached_prefix(root, token_ids)
        num_tokens = len(prefix.block_ids) * self._block_size
        if not num_tokens:
            raise EngineError(
                f"nothing of the slot's {len(token_ids)} tokens is cached in a full block of "
                f"{self._block_size} tokens; send its prompt again"
            )
        tokens = tuple(token_ids[:num_tokens])
        header = SlotHeader(
            self._identity, self._blocks.num_bytes, adapter, tokens, self._content(root, tokens)
        )
        await self._steps_are_over(prefix.step_id)  # blocks are found from their plan on
        path = self._directory / filename
        unchecked = path.with_name(f".{filename}.unchecked")
        try:
            await asyncio.to_thread(self._write, unchecked, header, prefix)
            if not self._transfers.has_content(prefix):
                raise EngineError("the slot's KV was evicted while it was saved; try again")
            num_bytes = unchecked.stat().st_size
            unchecked.replace(path)
        except OSError as error:
            raise EngineError(f"the slot is not saved: {error.strerror}") from None
        finally:
            unchecked.unlink(missing_ok=True)
        return SlotPrefix(adapter, tokens, num_bytes)

    def _write(self, path: Path, header: SlotHeader, prefix: CachedPrefix) -> None:
        _FORMAT.write(path, header, self._parts(prefix.block_ids))

    def _parts(self, block_ids: Sequence[int]) -> Iterator[bytes]:
        """A block's bytes are copied once, so that its checksum is of what is written."""
        for group in in_groups(self._blocks, block_ids):
            with self._blocks.reading(group) as blocks:
                for block in blocks:
                    parts = list(map(bytes, block))
                    yield from parts
                    yield _CHECKSUM.pack(checksum_of(parts))

    def cached(self, adapter: str, root: ChainRoot, token_ids: Sequence[int]) -> SlotPrefix:
        """What a save would write of a prefix now."""
        num_blocks = len(self._transfers.cached_prefix(root, token_ids).block_ids)
        tokens = tuple(token_ids[: num_blocks * self._block_size])
        return SlotPrefix(adapter, tokens, num_blocks * self._blocks.num_bytes)

    async def adapter_of(self, filename: str) -> str:
        """The name of the adapter of a file. Raises RequestError, EngineError."""
        return (await asyncio.to_thread(self._read_header, filename))[0].adapter

    async def stored(self, filename: str, root: ChainRoot) -> SlotPrefix:
        """What a file has. Raises as `restore`, but for what is in its blocks."""
        header, _ = await self._header_of(filename, root)
        return self._prefix_of(filename, header)

    async def restore(self, filename: str, root: ChainRoot) -> SlotPrefix:
        """Read a file into the prefix cache.

        Raises:
            RequestError: There is no such file, or it is of another model, adapter, key or salt.
            EngineError: It cannot be read, or there is no room.
        """
        header, start = await self._header_of(filename, root)
        tokens = header.token_ids
        self._num_restores += 1
        name = f"slot file {self._num_restores}"
        order = self._transfers.begin_receiving(name, root, tokens, leaves_longest=False)
        if order is None:
            raise EngineError(
                f"there are too few free KV blocks for the {len(tokens)} tokens of the slot; try "
                "again later"
            )
        # of its own: the blocks are held until its thread has ended, if the caller leaves
        num_filled = await self._arriving.finish(self._arrive(name, order, filename, start))
        if num_filled < len(order.block_ids):
            raise EngineError(f"the slot in {filename!r} has changed; a part of it is restored")
        return self._prefix_of(filename, header)

    async def _header_of(self, filename: str, root: ChainRoot) -> tuple[SlotHeader, int]:
        """`_read_header` of a file whose prefix begins with `root`."""
        header, start = await asyncio.to_thread(self._read_header, filename)
        if self._content(root, header.token_ids) != header.content:
            raise RequestError(
                f"the slot in {filename!r} is of another API key, or its adapter has changed",
                param="filename",
            )
        return header, start

    def _prefix_of(self, filename: str, header: SlotHeader) -> SlotPrefix:
        try:
            num_bytes = (self._directory / filename).stat().st_size
        except OSError as error:
            raise EngineError(f"the slot is not restored: {error.strerror}") from None
        return SlotPrefix(header.adapter, header.token_ids, num_bytes)

    async def _arrive(self, name: str, order: ReceiveOrder, filename: str, start: int) -> int:
        """Fill the blocks of an order, and let them be found; how many of them."""
        num_filled = 0
        try:
            await self._steps_are_over(order.step_id)
            first_byte = start + order.first * (self._blocks.num_bytes + _CHECKSUM.size)
            num_filled = await asyncio.to_thread(self._fill, filename, first_byte, order.block_ids)
            self._transfers.received(name, num_filled)
        finally:
            self._scheduler.arrived(self._transfers.end_receiving(name), self._clock())
            self._changed()
        return num_filled

    async def _steps_are_over(self, step_id: int) -> None:
        """Wait until no step before this one may write to blocks."""
        if not self._transfers.are_over(step_id):
            may_begin: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._unbegun.append((step_id, may_begin))
            await may_begin

    def _read_header(self, filename: str) -> tuple[SlotHeader, int]:
        """The header of a file, and where its blocks begin. Raises RequestError, EngineError."""
        check_filename(filename)
        try:
            with (self._directory / filename).open("rb", buffering=0) as file:
                header, start = _FORMAT.read_header(file.fileno())
        except FileNotFoundError:
            raise RequestError(
                f"there is no slot {filename!r} in --slot-save-path", param="filename", status=404
            ) from None
        except OSError as error:
            raise EngineError(f"the slot is not restored: {error.strerror}") from None
        except EngineError as error:
            raise RequestError(
                f"the slot {filename!r} is not used: {error}", param="filename"
            ) from (None)
        if not header.token_ids or len(header.token_ids) % self._block_size:
            raise RequestError(f"the slot {filename!r} has no full blocks", param="filename")
        if (header.identity, header.block_bytes) != (self._identity, self._blocks.num_bytes):
            raise RequestError(
                f"the slot in {filename!r} is of another model, KV dtype or version",
                param="filename",
            )
        return header, start

    def _fill(self, filename: str, first_byte: int, block_ids: Sequence[int]) -> int:
        """Read blocks into their places; how many have their content then."""
        checksum = bytearray(_CHECKSUM.size)
        num_bytes = self._blocks.num_bytes + _CHECKSUM.size
        try:
            file = (self._directory / filename).open("rb", buffering=0)
        except OSError as error:
            raise EngineError(f"the slot is not restored: {error.strerror}") from None
        with file:
            num_filled = 0
            for group in in_groups(self._blocks, block_ids):
                with self._blocks.writing(group) as blocks:
                    for places in blocks:
                        offset = first_byte + num_filled * num_bytes
                        if os.preadv(file.fileno(), [*places, checksum], offset) != num_bytes:
                            return num_filled
                        if _CHECKSUM.unpack(checksum)[0] != checksum_of(places):
                            return num_filled
                        num_filled += 1
        return num_filled

    def _content(self, root: ChainRoot, token_ids: Sequence[int]) -> bytes:
        size = self._block_size
        blocks = (token_ids[start : start + size] for start in range(0, len(token_ids), size))
        *_, content = identities(root, blocks)
        return content
