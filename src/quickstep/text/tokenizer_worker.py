"""The process that tokenises long texts: `python -m quickstep.text.tokenizer_worker CHECKPOINT`.

`tokenizer_process` starts it and talks to it, in frames over stdin and stdout.
"""

from __future__ import annotations

import os
import signal
import sys
from array import array
from pathlib import Path

import msgspec

from quickstep.text.tokenizer import Tokenizer
from quickstep.text.tokenizer_process import TextsToEncode
from quickstep.text.worker_process import read_frame, write_frame

_NICE = 10
_STDIN, _STDOUT = 0, 1


def main() -> int:
    """Serve the checkpoint in `argv[1]` until the input ends. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other processors are the engine's
    tokenizer = Tokenizer.open(Path(sys.argv[1]))
    try:
        while True:
            request = msgspec.msgpack.decode(read_frame(_STDIN), type=TextsToEncode)
            found = tokenizer.encode_all(request.texts, request.add_special_tokens)
            packed = [array("i", ids).tobytes() for ids in found]
            write_frame(_STDOUT, msgspec.msgpack.encode(packed))
    except (EOFError, BrokenPipeError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
