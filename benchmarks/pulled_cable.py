"""Two hosts with a cable that a test pulls: network namespaces, or a proxy that keeps bytes."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from quickstep.engine.remote.host import EngineAddress

_PORT = 8100
_NOWHERE = "nowhere"  # a link of the other host that is down
# load a random number; 0 (no match) if it is above the limit, else a match
_LOSS = "4,32 0 0 4294963256,37 0 1 {},6 0 0 0,6 0 0 4294967295,"


class Cable(msgspec.Struct):
    """The way from this process to the other host.

    Attributes:
        prefix: Comes before a command that runs on the other host.
        listen: An address of the other host.
    """

    prefix: Sequence[str]
    listen: str
    namespace: str = ""
    proxy: Proxy | None = None

    def plug(self, engine: EngineAddress) -> EngineAddress:
        """The address at which this process reaches `engine`, which listens at `listen`."""
        if self.proxy is None:
            return engine
        self.proxy.target = engine
        return self.proxy.address

    def pull(self) -> None:
        """From now on nothing arrives, and neither end notices."""
        self._set("down")

    def mend(self) -> None:
        """Packets arrive again."""
        self._set("up")

    def _set(self, state: str) -> None:
        if self.proxy is None:
            _ip("-n", self.namespace, "link", "set", "inside", state)
        else:
            self.proxy.set_forwarding(state == "up")

    def lose(self, to_host: float = 0.0, from_host: float = 0.0) -> None:
        """Drop this part of the packets, chosen at random, until `lose()`. Namespaces only.

        A classic BPF program compares a random number; what it chooses is redirected to a link that
        is down (netem and the actions that drop are in few kernels).
        """
        for command in ("del", "add"):
            with suppress(subprocess.CalledProcessError):  # there was none
                _tc(self.namespace, "qdisc", command, "dev", "inside", "clsact")
        for direction, part in (("ingress", to_host), ("egress", from_host)):
            if part:
                program = ("bpf", "bytecode", _LOSS.format(int(part * (2**32 - 1))))
                place = ("filter", "add", "dev", "inside", direction, "protocol", "ip")
                away = ("action", "mirred", "egress", "redirect", "dev", _NOWHERE)
                _tc(self.namespace, *place, *program, *away)


def has_namespaces() -> bool:
    """Whether `cable` makes namespaces here."""
    with cable(number=9) as found:
        return found.proxy is None


@contextmanager
def cable(number: int = 0) -> Iterator[Cable]:
    """A namespace with a veth pair; a proxy where those are not permitted. Several of a process
    have different numbers.
    """
    namespace, outside = f"quickstep-{os.getpid()}-{number}", f"qs{os.getpid()}-{number}"
    subnet = f"10.{231 + number}.{os.getpid() % 250}"
    try:
        _ip("netns", "add", namespace)
    except (OSError, subprocess.CalledProcessError):
        with _proxied() as found:
            yield found
        return
    try:
        inside = ("peer", "name", "inside", "netns", namespace)
        _ip("link", "add", outside, "type", "veth", *inside)
        _ip("addr", "add", f"{subnet}.1/24", "dev", outside)
        _ip("link", "set", outside, "up")
        _ip("-n", namespace, "addr", "add", f"{subnet}.2/24", "dev", "inside")
        _ip("-n", namespace, "link", "set", "inside", "up")
        _ip("-n", namespace, "link", "add", _NOWHERE, "type", "veth", "peer", "name", "nobody")
        prefix = ("ip", "netns", "exec", namespace)
        yield Cable(prefix, f"{subnet}.2:{_PORT}", namespace)
    finally:
        _ip("netns", "del", namespace)
        with suppress(subprocess.CalledProcessError):  # it may have gone with its other end
            _ip("link", "del", outside)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _tc(namespace: str, *arguments: str) -> None:
    subprocess.run(["tc", "-n", namespace, *arguments], check=True, capture_output=True)


@contextmanager
def _proxied() -> Iterator[Cable]:
    with Proxy() as proxy:
        yield Cable((), "127.0.0.1:0", proxy=proxy)


class Proxy:
    """Forwards TCP connections to `target`, until it keeps everything."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_forwarding = threading.Event()
        self._is_forwarding.set()
        self.address = EngineAddress(*self._listener.getsockname()[:2])
        self.target: EngineAddress | None = None

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def set_forwarding(self, is_on: bool) -> None:
        """Whether bytes pass."""
        (self._is_forwarding.set if is_on else self._is_forwarding.clear)()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                assert self.target is not None
                far = socket.create_connection((self.target.host, self.target.port))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                self._is_forwarding.wait()
                sink.sendall(content)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
