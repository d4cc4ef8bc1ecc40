"""The engine's work on adapters: opens what requests name, loads what the scheduler orders.

Files are read in threads of their own, with a limit of time, so that a disk that does not answer
holds up the requests that need it and nothing else. An adapter whose load failed keeps its name:
the next request reads it again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from msgspec import structs

from quickstep.core.scheduler import Scheduler
from quickstep.engine.adapters import (
    Adapters,
    LoadedAdapter,
    OpenedAdapter,
    mix_name,
    mix_parts,
)
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.errors import ConfigError, EngineError, RequestError, text_for_clients
from quickstep.types import Request, SequenceOutput

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")
# How long a beam search may take between its requests before its adapter is freed, if that was
# unloaded or replaced.
_SEARCH_PAUSE_S = 5.0
_READ_LIMIT_S = 120.0
_MAX_READS = 4  # for requests that name an adapter; the scheduler limits loads itself


class AdapterLoader:
    """The adapters of one engine and scheduler; used in the engine's event loop.

    `deliver` takes the outputs of sequences that end because of their adapter, `wake` has the
    engine plan again.
    """

    def __init__(
        self,
        adapters: Adapters,
        scheduler: Scheduler,
        clock: Callable[[], float],
        deliver: Callable[[Iterable[SequenceOutput], float], None],
        wake: Callable[[], None],
        read_limit_s: float = _READ_LIMIT_S,
    ) -> None:
        self._adapters = adapters
        self._scheduler = scheduler
        self._clock = clock
        self._deliver = deliver
        self._wake = wake
        self._read_limit_s = read_limit_s
        self._tasks = OwnedTasks(_LOGGER)  # loads into compute memory
        self._searches_s: dict[str, float] = {}  # when a beam search last used an adapter
        self._reading: Counter[str] = Counter()  # how many reads of a name are under way
        self._was_read = asyncio.Event()
        self._reads = asyncio.Semaphore(_MAX_READS)

    @property
    def loaded(self) -> Sequence[LoadedAdapter]:
        """The adapters that requests may name and that were opened."""
        return self._adapters.loaded

    def load_at_start(self) -> None:
        """Put the adapters of the start into compute memory, as many as there is room for."""
        adapters, places = self._adapters, self._scheduler.held.adapters
        for loaded in sorted(adapters.loaded, key=lambda one: not adapters.is_pinned(one.name)):
            fits = places is not None and places.residency.has_place(loaded.num_bytes)
            if fits:
                adapters.put(loaded.adapter_id, adapters.pack(loaded.adapter_id))
            is_pinned = adapters.has_pinned_name(loaded.adapter_id)
            self._scheduler.register_adapter(
                loaded.adapter_id, loaded.num_bytes, is_pinned, is_resident=fits
            )

    def is_opened(self, name: str) -> bool:
        """Whether `open` has nothing to wait for."""
        return not self._reading[name] and self._adapters.is_opened(name)

    async def open(self, name: str) -> LoadedAdapter:
        """The adapter of this name; one in `lora_dir` and a mix are opened when first named.

        Raises:
            RequestError: There is none, or it cannot be used.
            EngineError: It cannot be read, or not in time.
        """
        adapters = self._adapters
        while self._reading[name]:
            await self._was_read.wait()
        if adapters.is_opened(name):
            return adapters.find(name)
        path = await self._in_thread(name, partial(adapters.path_of, name))
        if path is not None:
            return await self.load(name, str(path))
        parts = mix_parts(name)
        if not parts:
            return adapters.find(name)
        if (canonical := mix_name(dict(parts))) != name:
            raise RequestError(
                f"the adapter {name!r} is a mix, which is written {canonical!r}", param="model"
            )
        opened = [(await self.open(part), scale) for part, scale in parts]
        return await self._add(name, partial(adapters.open_mix, name, opened))

    async def load(self, name: str, path: str, *, is_from_client: bool = False) -> LoadedAdapter:
        """Read and check an adapter, while steps continue; it is in compute memory when a request
        has named it. The latest of a name serves new requests, those that run finish on theirs.

        Raises:
            RequestError: The adapter cannot be used.
            EngineError: It cannot be read, or not in time.
        """
        read = partial(self._adapters.open, name, path, is_from_client=is_from_client)
        return await self._add(name, read)

    async def _add(self, name: str, read: Callable[[], OpenedAdapter]) -> LoadedAdapter:
        self._reading[name] += 1
        try:
            opened = await self._in_thread(name, read)
        except ConfigError as error:
            raise RequestError(str(error), param="lora_path") from None
        finally:
            self._reading[name] -= 1
            if not self._reading[name]:
                del self._reading[name]
            self._was_read.set()
            self._was_read = asyncio.Event()
        before = self._adapters.named(name)
        loaded = self._adapters.add(opened)
        for version in (loaded, before):
            self._register(version)
        self._wake()
        return loaded

    def _register(self, adapter: LoadedAdapter | None) -> None:
        """Tell the scheduler of an adapter whose names have changed."""
        if adapter is not None:
            is_pinned = self._adapters.has_pinned_name(adapter.adapter_id)
            self._scheduler.register_adapter(adapter.adapter_id, adapter.num_bytes, is_pinned)

    async def _in_thread(self, name: str, work: Callable[[], _Result]) -> _Result:
        async with self._reads:
            return await _in_thread(work, self._read_limit_s, f"reading the adapter {name!r}")

    def unload(self, name: str) -> None:
        """Refuse new requests with an adapter; it is freed when the last one has ended.

        Raises:
            RequestError: There is no such adapter.
        """
        adapter = self._adapters.find(name)
        self._adapters.unload(name)
        self._register(adapter)
        self._wake()

    def has_content(self, adapter_id: str) -> bool:
        """Whether an adapter with this content is there."""
        return self._adapters.has_content(adapter_id)

    def with_id(self, request: Request) -> Request:
        """The request with its adapter's content id. Raises RequestError."""
        adapters, adapter_id = self._adapters, request.adapter_id
        if not adapter_id:
            adapter_id = adapters.find(request.adapter).adapter_id
        elif not adapters.has_content(adapter_id):
            raise RequestError(
                f"the adapter {request.adapter!r} was unloaded or replaced while the request ran",
                param="model",
                status=404,
                code="model_not_found",
            )
        if request.is_in_search:
            self._searches_s[adapter_id] = self._clock()
        return structs.replace(request, adapter_id=adapter_id)

    def follow_orders(self) -> None:
        """Free and load adapters as the scheduler wants."""
        orders = self._scheduler.take_adapter_orders()
        if orders is None:
            return
        self._adapters.evict(orders.evictions)
        for adapter_id in orders.loads:
            self._tasks.start(self._load_into_memory(adapter_id))

    async def _load_into_memory(self, adapter_id: str) -> None:
        """Load what the scheduler ordered; if that fails, the requests that wait for it fail."""
        pack = partial(self._adapters.pack, adapter_id)
        try:
            packed = await _in_thread(pack, self._read_limit_s, "loading an adapter")
        except (ConfigError, EngineError) as error:  # of these requests only
            now = self._clock()
            self._adapters.read_again(adapter_id)
            outputs = self._scheduler.adapter_failed(adapter_id, str(error), now)
            self._deliver(outputs, now)
        else:
            if self._scheduler.adapter_loaded(adapter_id, self._clock()):
                self._adapters.put(adapter_id, packed)
        self._wake()

    def free_retired(self, now: float) -> None:
        """Forget the adapters that no request can name and none uses."""
        for adapter_id in self._adapters.retired:
            search_s = self._searches_s.get(adapter_id)
            if search_s is not None:
                places = self._scheduler.held.adapters
                if places is not None and places.is_used(adapter_id):
                    self._searches_s[adapter_id] = search_s = now
                if now < search_s + _SEARCH_PAUSE_S:
                    continue
                del self._searches_s[adapter_id]
            if self._scheduler.retire_adapter(adapter_id):
                self._adapters.forget(adapter_id)

    @property
    def wakeup_s(self) -> float | None:
        """When `free_retired` has something to do without a change of a request; None for never."""
        ends = [self._searches_s.get(adapter_id) for adapter_id in self._adapters.retired]
        return min([end + _SEARCH_PAUSE_S for end in ends if end is not None], default=None)

    def close(self) -> None:
        """Wait for no load any more."""
        self._tasks.cancel()


async def _in_thread(work: Callable[[], _Result], limit_s: float, what: str) -> _Result:
    """The result of `work`, from a daemon thread of its own: one that never ends keeps no thread
    of a pool and no process from ending.

    Raises:
        ConfigError: `work` raised it.
        EngineError: It raised anything else, a panic in native code included, or took too long.
    """
    outcome: Future[_Result] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except ConfigError as error:
            outcome.set_exception(error)
        except BaseException as error:  # a panic in Rust is no Exception
            _LOGGER.exception("%s failed", what)
            outcome.set_exception(EngineError(f"{what} failed: {text_for_clients(error)}"))

    try:
        threading.Thread(target=run, name="adapter", daemon=True).start()
    except RuntimeError as error:  # the system has no memory or no process left
        raise EngineError(f"{what} failed: {error}; send the request again later") from error
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(outcome)
    except TimeoutError:
        reason = f"{what} took longer than {limit_s:g} s; is its disk there?"
        _LOGGER.error(reason)
        raise EngineError(reason) from None
