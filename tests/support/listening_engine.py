"""`quickstep engine` with the demo model as a process of its own, and what connects to it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
from serve_process import SMALL, environment

from quickstep.engine.remote.hello import Hello, protocol
from quickstep.engine.remote.host import EngineAddress

TOKEN = "a-token-for-tests-of-32-characters"


class EngineCommand(msgspec.Struct):
    """A `quickstep engine` that listens."""

    process: subprocess.Popen[str]
    address: EngineAddress

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)


def hello(token: str = TOKEN) -> Hello:
    """As a server of this build sends it."""
    return Hello(protocol(), token)


def token_file(folder: Path) -> Path:
    """A file with the token that only its user may read."""
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN + "\n")
    return path


@contextmanager
def listening(
    *listen: str, token: Path, model: str = "demo", prefix: Sequence[str] = (), options: str = ""
) -> Iterator[list[EngineCommand]]:
    """Engines that listen on these addresses. `prefix` comes before each command."""
    with ExitStack() as stack:
        processes = []
        for address in listen:
            command = [*prefix, sys.executable, "-m", "quickstep", "engine", model, "--listen"]
            command += [address, "--engine-token-file", str(token), *SMALL, "--threads", "1"]
            process = subprocess.Popen(
                [*command, *options.split()],
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            processes.append(process)
            stack.callback(_end, process)
        yield [EngineCommand(process, _address(process)) for process in processes]


def _address(process: subprocess.Popen[str]) -> EngineAddress:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if " listens on " in line:
            return EngineAddress.parse(line.split(" listens on ")[1].strip(), "--listen")
    raise AssertionError(f"the engine did not start: {''.join(lines)}")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stderr is not None:
        process.stderr.close()
