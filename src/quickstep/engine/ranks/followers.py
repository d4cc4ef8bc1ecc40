"""The processes that hold other parts of a model, as the engine's process sees them.

A thread starts them and watches their connections, because Linux ends a child with the thread that
made it. When one ends by itself, all are broken: the step that runs fails, and so does every later
one.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from quickstep.engine.ranks.messages import (
    FROM_RANK,
    AdapterHeld,
    DropAdapter,
    HoldAdapter,
    PartOpened,
    PartRefused,
    WirePart,
    receive,
    send,
)
from quickstep.engine.remote.launch import Launched, launch
from quickstep.engine.remote.opening import WireMessage
from quickstep.errors import ConfigError, EngineError
from quickstep.ops.table import LoRAAdapter, LoRAPart, OpTable

_LOGGER = logging.getLogger(__name__)

# -P: do not import modules from the working directory
_COMMAND = (sys.executable, "-P", "-m", "quickstep.engine.ranks.worker")


class Followers:
    """The processes of some parts of a model, by number; `label` names one. `close` them in any
    case.

    `break_` ends every wait for them. `on_lost` is called with a sentence when one ends by itself.
    Both in the thread that watches them.
    """

    def __init__(
        self,
        label: Callable[[int], str],
        break_: Callable[[], None],
        on_lost: Callable[[str], None] | None,
    ) -> None:
        self._label = label
        self._break = break_
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._numbers: frozenset[int] = frozenset()
        self._opened: dict[int, PartOpened] = {}
        self._failure = ""
        self._is_closing = False
        self._watching: threading.Thread | None = None
        self._launched: dict[int, Launched] = {}
        self._sending = threading.Lock()
        self._holding: dict[int, int] = {}  # those that have not yet packed an adapter, by number
        self._dropped: deque[int] = deque()  # adapters that they may free

    def check(self) -> None:
        """Raise ConfigError once one has ended or cannot load its part."""
        if self._failure:
            raise ConfigError(self._failure)

    def failure_within(self, timeout_s: float) -> str:
        """Why no step can run any more; "" if one still can after this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure, timeout_s)
            return self._failure

    @property
    def numbers(self) -> Collection[int]:
        """Of all of them."""
        return self._numbers

    def start(
        self,
        openings: Mapping[int, WireMessage],
        shared: Mapping[int, Sequence[int]],
        on_started: Callable[[], None],
    ) -> None:
        """Start the processes, each with its first message and the descriptors that it inherits.
        `on_started` is called when all have them, or one could not be started.
        """
        self._numbers = frozenset(openings)
        self._watching = threading.Thread(
            target=self._watch, args=(openings, shared, on_started), name="ranks", daemon=True
        )
        self._watching.start()

    def wait_opened(self, fingerprint: str) -> None:
        """Wait until each has its part of the model with this fingerprint. Raises ConfigError if
        one cannot load it, or has another model.
        """
        for number, found in self.parts().items():
            if found.fingerprint != fingerprint:
                raise ConfigError(
                    f"{self._label(number)} has loaded the weights {found.fingerprint}, and the "
                    f"engine's process {fingerprint}: the checkpoint was changed meanwhile; start "
                    "again"
                )

    def parts(self) -> Mapping[int, PartOpened]:
        """What each says of its part, once all have theirs. Raises ConfigError if one has not."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._has_opened())
            self.check()
            return dict(self._opened)

    def _has_opened(self) -> bool:
        return len(self._opened) == len(self._numbers)

    def hold_adapter(self, number: int, parts: Mapping[int, list[list[LoRAPart]]]) -> None:
        """Let each pack its parts of an adapter, and wait until all have. Any thread may call it.
        Raises EngineError when a process is lost.
        """
        with self._changed:
            self._holding[number] = len(parts)
        while self._dropped:
            dropped = DropAdapter(self._dropped.popleft())
            for process in parts:
                self._send(process, dropped)
        for process, modules in parts.items():
            wire = [WirePart.of(module, part) for module, own in enumerate(modules) for part in own]
            self._send(process, HoldAdapter(number, len(modules), tuple(wire)))
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._holding[number])
            del self._holding[number]
            if self._failure:
                raise EngineError(self._failure)

    def drop_adapter(self, number: int) -> None:
        """Let all free an adapter, before they get the next one. Any thread may call it, also as a
        finalizer, which may interrupt a send.
        """
        self._dropped.append(number)

    def _send(self, number: int, message: WireMessage) -> None:
        with suppress(OSError), self._sending:  # the thread that watches reports a lost one
            send(self._launched[number].connection, message)

    def close(self, finish: Callable[[], None]) -> None:
        """End the processes; no step may run. `finish` lets those end that follow steps.
        Idempotent.
        """
        with self._changed:
            if self._is_closing or self._watching is None:
                return
            self._is_closing = True
            if not self._has_opened():  # they still load
                for launched in tuple(self._launched.values()):
                    launched.process.kill()
        if not self._failure:
            finish()
        self._break()
        self._watching.join()

    # -- the thread that watches -------------------------------------------------------------------

    def _watch(
        self,
        openings: Mapping[int, WireMessage],
        shared: Mapping[int, Sequence[int]],
        on_started: Callable[[], None],
    ) -> None:
        launched = self._launched
        try:
            try:
                for number, opening in openings.items():
                    launched[number] = launch(_COMMAND, shared=shared[number])
                    send(launched[number].connection, opening)
            finally:
                on_started()
            self._follow(launched)
        except (EngineError, OSError) as error:
            self._fail(f"a process of the model cannot be started: {error}")
        finally:
            with self._sending:
                for process in launched.values():
                    process.end()

    def _follow(self, launched: dict[int, Launched]) -> None:
        """Read what the processes say, until all have ended or one is lost."""
        with selectors.DefaultSelector() as selector:
            for number, process in launched.items():
                selector.register(process.connection, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    number = key.data
                    try:
                        message = receive(launched[number].connection, FROM_RANK)
                    except (OSError, msgspec.DecodeError):
                        message = None
                    if message is None:
                        selector.unregister(key.fileobj)
                        if self._has_lost(number, launched[number]):
                            return
                    elif isinstance(message, PartRefused):
                        self._fail(f"{self._label(number)}: {message.reason}")
                        return
                    else:
                        with self._changed:
                            if isinstance(message, AdapterHeld):
                                self._holding[message.number] -= 1
                            else:
                                self._opened[number] = message
                            self._changed.notify_all()

    def _has_lost(self, number: int, process: Launched) -> bool:
        """One has closed its connection: True unless all are closing."""
        with self._changed:
            if self._is_closing:
                return False
        status = process.wait()
        self._fail(f"{self._label(number)} has ended by itself (exit status {status})")
        return True

    def _fail(self, sentence: str) -> None:
        with self._changed:
            was_open = self._has_opened()
            self._failure = sentence
            self._changed.notify_all()
        if was_open:
            _LOGGER.error("%s", sentence)
            # first, as it may end the process: a step that fails meanwhile would end requests
            if self._on_lost is not None:
                self._on_lost(sentence)
        self._break()


# Divides the modules of an adapter: our part, and that of each process.
DividedAdapter = tuple[list[list[LoRAPart]], Mapping[int, list[list[LoRAPart]]]]


class DividedAdapters:
    """`OpTable.pack_lora` of a process with followers: every one packs its part of an adapter.

    An adapter has a number, by which steps name it, and the followers keep their parts of it as
    long as we keep ours.
    """

    def __init__(
        self,
        followers: Followers,
        ops: OpTable,
        divide: Callable[[Sequence[Sequence[LoRAPart]]], DividedAdapter],
    ) -> None:
        self._followers = followers
        self._pack = ops.pack_lora
        self._divide = divide
        self._numbers = itertools.count(1)

    def pack(self, modules: Sequence[Sequence[LoRAPart]]) -> LoRAAdapter:
        """Our part, once the others have theirs. Raises EngineError when a process is lost."""
        ours, theirs = self._divide(modules)
        own = self._pack(ours)
        if not own.number:  # else ranks of our own part have numbered it
            own = replace(own, number=next(self._numbers))
        self._followers.hold_adapter(own.number, theirs)
        finalizer = weakref.finalize(own, self._followers.drop_adapter, own.number)
        finalizer.atexit = False
        return own
