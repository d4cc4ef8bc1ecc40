"""List the functions of Quickstep that a streamed chat request calls, in order of their first call.

    python tools/trace_request.py

Both processes are traced, the server's and the engine's, in the third request, so that functions
that only run at start are not listed. `docs/design/0011-the-path-of-a-request.md` has the figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[1] / "src" / "quickstep") + os.sep
BODY = {"messages": [{"role": "user", "content": "def add("}], "max_tokens": 8, "stream": True}


class Trace:
    """The functions called while `is_on`, in order."""

    def __init__(self) -> None:
        self.is_on = False
        self._codes: dict[CodeType, None] = {}

    def install(self) -> None:
        """Trace this thread and those that start later."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.is_on and frame.f_code.co_filename.startswith(PACKAGE):
            self._codes.setdefault(frame.f_code)

    @property
    def lines(self) -> list[str]:
        """`path name` of each function, without comprehensions."""
        return [
            f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}"
            for code in self._codes
            if "comp>" not in code.co_qualname and "genexpr>" not in code.co_qualname
        ]


def worker(out: str, arguments: list[str]) -> int:
    """The engine's process: USR1 starts the trace, USR2 writes it to `out`."""
    trace = Trace()
    trace.install()

    def start(*_: object) -> None:
        trace.is_on = True

    def write(*_: object) -> None:
        trace.is_on = False
        Path(out).write_text("\n".join(trace.lines))

    signal.signal(signal.SIGUSR1, start)
    signal.signal(signal.SIGUSR2, write)
    from quickstep.engine.remote.worker import main as serve

    return serve(arguments)


def request(port: int) -> None:
    """Send one streamed chat request and read the response."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    head = {"content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(BODY).encode(), head)
    ) as response:
        response.read()


async def traced(out: Path, trace: Trace) -> None:
    """Serve the bundled model and send three requests; trace the third."""
    from quickstep.config import EngineConfig
    from quickstep.engine.remote.engine import RemoteEngine
    from quickstep.server.options import ServerOptions
    from quickstep.server.run import bind, server_for

    command = (sys.executable, __file__, "--worker", str(out))
    engine = RemoteEngine(EngineConfig(), command=command)
    await engine.open()
    with bind("127.0.0.1", 0) as sock:
        server = server_for(engine, ServerOptions(drain_s=0.0))
        serving = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        port = sock.getsockname()[1]
        await asyncio.to_thread(request, port)
        await asyncio.sleep(2.0)  # the engine captures steps in the meantime
        await asyncio.to_thread(request, port)
        os.kill(engine.process_id or 0, signal.SIGUSR1)
        trace.is_on = True
        await asyncio.to_thread(request, port)
        trace.is_on = False
        os.kill(engine.process_id or 0, signal.SIGUSR2)
        while not out.exists():
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving


def main() -> int:
    """Print the functions of both processes."""
    if sys.argv[1:2] == ["--worker"]:
        return worker(sys.argv[2], sys.argv[3:])
    trace = Trace()
    trace.install()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "engine.txt"
        asyncio.run(traced(out, trace))
        time.sleep(0.1)
        functions = {"server": trace.lines, "engine": out.read_text().splitlines()}
    for process, lines in functions.items():
        print(f"{process}'s process: {len(lines)} functions")
        print("\n".join(f"    {line}" for line in lines))
    print(f"total: {sum(map(len, functions.values()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
