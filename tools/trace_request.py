"""List the functions that a streamed chat request calls, and count the calls of a token.

    python tools/trace_request.py            functions, in order of their first call
    python tools/trace_request.py --calls    Python calls per token, and per further row

Both processes are traced, the server's and the engine's, in the third request, so that functions
that only run at start are not listed. The calls are those of requests with 72 tokens without those
of the same requests with 8, per step, at one stream and at five; speculation is off.
`docs/design/0011-the-path-of-a-request.md` has the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[1] / "src" / "quickstep") + os.sep
# Their frames are no calls from Python 3.12 on, and none that a reader sees.
COMPREHENSIONS = frozenset(("<listcomp>", "<dictcomp>", "<setcomp>"))
BODY = {
    "messages": [{"role": "user", "content": "def add("}],
    "max_tokens": 8,
    "stream": True,
    "ignore_eos": True,
    "speculation": False,
}
FEW_TOKENS, MANY_TOKENS = 8, 72
NUM_STREAMS = 5


Calls = Counter[str]  # of each function, as `path name`


class Trace:
    """The calls of functions while `is_on`, in the order of the first."""

    def __init__(self) -> None:
        self.is_on = False
        self._calls: Counter[CodeType] = Counter()

    def install(self) -> None:
        """Trace this thread and those that start later."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def uninstall(self) -> None:
        """Trace no more."""
        threading.setprofile(None)
        sys.setprofile(None)

    def start(self) -> None:
        """Count from now on."""
        self._calls.clear()
        self.is_on = True

    def stop(self) -> Calls:
        """What was counted."""
        self.is_on = False
        calls: Calls = Counter()
        for code, count in self._calls.items():
            calls[f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}"] += count
        return calls

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not self.is_on or code.co_name in COMPREHENSIONS:
            return
        if code.co_filename.startswith(PACKAGE):
            self._calls[code] += 1


def functions_of(calls: Calls) -> list[str]:
    """The functions, without generator expressions."""
    return [name for name in calls if "genexpr>" not in name]


def worker(out: str, arguments: list[str]) -> int:
    """The engine's process: USR1 starts a trace, USR2 writes it to `out`."""
    trace = Trace()
    trace.install()

    def start(*_: object) -> None:
        trace.start()

    def write(*_: object) -> None:
        written = Path(f"{out}.part")
        written.write_text(json.dumps(trace.stop()))
        written.rename(out)

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, write)
    from quickstep.engine.remote.worker import main as serve

    return serve(arguments)


def request(port: int, num_tokens: int = FEW_TOKENS) -> None:
    """Send one streamed chat request and read the response."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    head = {"content-type": "application/json"}
    body = json.dumps({**BODY, "max_tokens": num_tokens}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, head)) as response:
        response.read()


class TracedServer:
    """The bundled model, served, and the traces of the server's and the engine's process."""

    def __init__(self, port: int, process_id: int, out: Path, trace: Trace) -> None:
        self._port = port
        self._process_id = process_id
        self._out = out
        self._trace = trace

    async def send(self, num_streams: int = 1, num_tokens: int = FEW_TOKENS) -> None:
        """Requests at the same time."""
        sent = [asyncio.to_thread(request, self._port, num_tokens) for _ in range(num_streams)]
        await asyncio.gather(*sent)

    async def calls(
        self, num_streams: int = 1, num_tokens: int = FEW_TOKENS
    ) -> tuple[Calls, Calls]:
        """The calls of requests at the same time, in the server's and in the engine's process."""
        self._out.unlink(missing_ok=True)
        os.kill(self._process_id, signal.SIGUSR1)
        self._trace.start()
        await self.send(num_streams, num_tokens)
        calls = self._trace.stop()
        os.kill(self._process_id, signal.SIGUSR2)
        while not self._out.exists():
            await asyncio.sleep(0.01)
        return calls, Counter(json.loads(self._out.read_text()))

    async def calls_per_step(self, num_streams: int) -> dict[str, float]:
        """The calls of a step with so many rows, and of all that follows it, by function."""
        few = sum(await self.calls(num_streams, FEW_TOKENS), start=Counter())
        many = sum(await self.calls(num_streams, MANY_TOKENS), start=Counter())
        return {name: (many[name] - few[name]) / (MANY_TOKENS - FEW_TOKENS) for name in many}


@contextlib.asynccontextmanager
async def traced_server(out: Path, trace: Trace) -> AsyncIterator[TracedServer]:
    """A served model that has answered two requests."""
    from quickstep.config import EngineConfig
    from quickstep.engine.remote.engine import RemoteEngine
    from quickstep.server.models.registry import ModelRegistry
    from quickstep.server.options import ServerOptions
    from quickstep.server.run import bind, server_for

    command = (sys.executable, __file__, "--worker", str(out))
    engine = RemoteEngine(EngineConfig(), command=command)
    await engine.open()
    with bind("127.0.0.1", 0) as sock:
        options = ServerOptions(drain_s=0.0)
        server = server_for(ModelRegistry.of_one(engine, options), options)
        serving = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        served = TracedServer(sock.getsockname()[1], engine.process_id or 0, out, trace)
        await served.send()
        await asyncio.sleep(2.0)  # the engine captures steps in the meantime
        await served.send()
        yield served
        server.should_exit = True
        await serving


async def print_functions(out: Path, trace: Trace) -> None:
    """Print the functions of both processes."""
    async with traced_server(out, trace) as served:
        of_server, of_engine = await served.calls()
    functions = {"server": functions_of(of_server), "engine": functions_of(of_engine)}
    for process, names in functions.items():
        print(f"{process}'s process: {len(names)} functions")
        print("\n".join(f"    {name}" for name in names))
    print(f"total: {sum(map(len, functions.values()))}")


async def calls_by_function(out: Path, trace: Trace) -> tuple[dict[str, float], dict[str, float]]:
    """The calls of a token at batch size 1, and those of each further stream, by function."""
    async with traced_server(out, trace) as served:
        await served.send(NUM_STREAMS, MANY_TOKENS)
        first = await served.calls_per_step(1)
        together = await served.calls_per_step(NUM_STREAMS)
    per_row = {
        name: (count - first.get(name, 0.0)) / (NUM_STREAMS - 1) for name, count in together.items()
    }
    return first, per_row


async def num_calls(out: Path) -> tuple[float, float]:
    """The calls of a token at batch size 1, and those of each further stream."""
    trace = Trace()
    trace.install()
    try:
        first, per_row = await calls_by_function(out, trace)
    finally:
        trace.uninstall()
    return sum(first.values()), sum(per_row.values())


async def print_calls(out: Path, trace: Trace) -> None:
    """Print the calls of a token, and those of each function."""
    first, per_row = await calls_by_function(out, trace)
    for name in sorted(first, key=lambda name: (-first[name], name)):
        if max(first[name], per_row.get(name, 0.0)) >= 0.05:
            print(f"{first[name]:6.2f} {per_row.get(name, 0.0):6.2f}  {name}")
    print(f"Python calls per token at batch size 1: {sum(first.values()):.0f}")
    print(f"Python calls per further row: {sum(per_row.values()):.0f}")


def main() -> int:
    """Print the functions of both processes, or the calls."""
    if sys.argv[1:2] == ["--worker"]:
        return worker(sys.argv[2], sys.argv[3:])
    trace = Trace()
    trace.install()
    report = print_calls if "--calls" in sys.argv[1:] else print_functions
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(report(Path(folder) / "engine.txt", trace))
    return 0


if __name__ == "__main__":
    sys.exit(main())
