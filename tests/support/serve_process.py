"""`quickstep serve` with the bundled model, as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SMALL = ("--num-blocks", "64", "--max-num-seqs", "4", "--device", "cpu")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@contextmanager
def serving(*argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`quickstep serve` on a free port: the process and its address, as its log tells it."""
    command = [sys.executable, "-m", "quickstep", "serve", "--port", "0", *SMALL, *argv]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if " serving " in line:
                address = line.split(" at ")[1].split("/v1")[0]
                yield process, address
                break
        else:
            raise AssertionError("the server did not start")
    finally:
        process.kill()
        process.wait()
