"""`quickstep chat`: a conversation on the terminal, from a pipe, or one `--message`.

Interactive: answers stream, the history is kept, `/reset` forgets it, `/quit` (or end of input)
leaves. From a pipe, each line is a message and each answer goes to stdout.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import add_engine_flags, add_model, engine_config, model_of
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.sampling import add_sampling_flags, sampling_params, say_defaults
from quickstep.errors import RequestError

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine
    from quickstep.types import SamplingParams

__all__ = ["add_parser", "run"]

_COMMANDS = ("/reset", "/quit")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "chat", "Talk with a model.", run)
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    parser.add_argument("--message", metavar="TEXT", help="send this one message and leave")
    add_sampling_flags(parser, max_tokens=512)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the end of input."""
    from quickstep.cli.session import with_engine

    sampling_params(args, {})  # a wrong value is told before the model is loaded

    async def work(engine: Engine) -> None:
        say_defaults(engine.default_sampling)
        conversation = Conversation(
            engine, sampling_params(args, engine.default_sampling), args.system
        )
        if args.message is not None:
            await conversation.say(args.message)
        else:
            await _converse(conversation)

    with_engine(engine_config(args, model_of(args)), work)
    return 0


class Conversation:
    """The history and the way to add to it."""

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._opening)

    def reset(self) -> None:
        """Forget everything but the instructions."""
        self._messages = list(self._opening)

    async def say(self, text: str) -> None:
        """Send a message, print the answer as it comes, and remember both.

        Raises:
            RequestError: The conversation does not fit, or the model cannot chat.
        """
        from quickstep.cli.answers import collect

        messages = [*self._messages, {"role": "user", "content": text}]
        stream = self._engine.generate(self._engine.chat_prompt(messages), self._sampling)
        (answer,) = await collect(stream, 1, _write)
        _write("\n")
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]


async def _converse(conversation: Conversation) -> None:
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        print(f"{', '.join(_COMMANDS)}; end with Ctrl-D", file=sys.stderr)
    while True:
        line = _read_line("> " if on_terminal else "")
        if line is None or line == "/quit":
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            print(f"there is no command {line}; use {' or '.join(_COMMANDS)}", file=sys.stderr)
        elif line:
            await _say(conversation, line, on_terminal)


async def _say(conversation: Conversation, line: str, on_terminal: bool) -> None:
    """On a terminal a refused message is told and the conversation continues."""
    try:
        await conversation.say(line)
    except RequestError as error:
        if not on_terminal:
            raise
        print(f"{error} (/reset forgets the conversation)", file=sys.stderr)


def _read_line(prompt: str) -> str | None:
    """A line without its end; None at the end of input. `input` brings line editing."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
