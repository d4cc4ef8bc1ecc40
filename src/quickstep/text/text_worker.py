"""The process that works on long inputs: `python -m quickstep.text.text_worker CHECKPOINT`.

`text_process` starts it and talks to it, in frames over stdin and stdout. The first frame says how
inputs are prepared; its answer is empty and comes when the files are read.
"""

from __future__ import annotations

import os
import signal
import sys
from array import array
from datetime import datetime
from pathlib import Path

import msgspec

from quickstep.config import InputConfig
from quickstep.errors import RequestError
from quickstep.priority import lower_priority
from quickstep.text.chat_template import ChatTemplate
from quickstep.text.text_process import ChatToRender, RefusedChat, TextsToEncode, Work
from quickstep.text.tokenizer import Tokenizer
from quickstep.text.worker_process import read_frame, write_frame

_STDIN, _STDOUT = 0, 1


def main() -> int:
    """Serve the checkpoint in `argv[1]` until the input ends. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles them
        signal.signal(number, signal.SIG_IGN)
    lower_priority()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other processors are the engine's
    path = Path(sys.argv[1])
    try:
        inputs = msgspec.msgpack.decode(read_frame(_STDIN), type=InputConfig)
        tokenizer = Tokenizer.open(path)
        template = ChatTemplate.open(path, tokenizer.special_tokens, datetime.now, inputs)
        write_frame(_STDOUT, b"")
        while True:
            work = msgspec.msgpack.decode(read_frame(_STDIN), type=Work)
            write_frame(_STDOUT, msgspec.msgpack.encode(_done(work, tokenizer, template)))
    except (EOFError, BrokenPipeError):
        return 0


def _done(
    work: Work, tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[bytes] | str | RefusedChat:
    try:
        match work:
            case TextsToEncode(texts, add_special_tokens):
                found = tokenizer.encode_all(texts, add_special_tokens)
                return [array("i", ids).tobytes() for ids in found]
            case ChatToRender():
                assert template is not None, "the template of the caller renders in this process"
                return template.render(*msgspec.structs.astuple(work))
    except RequestError as error:
        return RefusedChat(str(error), error.param)


if __name__ == "__main__":
    sys.exit(main())
