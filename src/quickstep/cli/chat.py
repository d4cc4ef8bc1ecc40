"""`quickstep chat`: a conversation on the terminal, from a pipe, or one `--message`.

On a terminal, answers are streamed and the history is kept; `/reset` clears it, and `/quit` or end
of input ends the program. From a pipe, each line is a message and each answer goes to stdout.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import add_engine_flags, add_model, engine_config, model_of
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.sampling import add_sampling_flags, print_defaults, sampling_params
from quickstep.cli.screen import write_out
from quickstep.errors import RequestError

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine
    from quickstep.types import SamplingParams

__all__ = ["add_parser", "run"]

_COMMANDS = ("/reset", "/quit")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "chat", "Chat with a model.", run)
    add_model(parser)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--message", metavar="TEXT", help="send one message and exit")
    add_sampling_flags(parser, max_tokens=512)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the end of input."""
    from quickstep.cli.session import with_engine

    sampling_params(args, {})  # reports an invalid value before the model is loaded

    async def work(engine: Engine) -> None:
        print_defaults(engine.default_sampling)
        conversation = Conversation(
            engine, sampling_params(args, engine.default_sampling), args.system
        )
        if args.message is not None:
            await conversation.send(args.message)
        else:
            await _read_messages(conversation)

    with_engine(engine_config(args, model_of(args)), work)
    return 0


class Conversation:
    """The message history, and sending the next message."""

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str | None) -> None:
        self._engine = engine
        self._sampling = sampling
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._system)

    def reset(self) -> None:
        """Clear the history; the system prompt stays."""
        self._messages = list(self._system)

    async def send(self, text: str) -> None:
        """Send a message, stream the answer to stdout, and add both to the history.

        Raises:
            RequestError: The conversation is too long, or the model has no chat template.
        """
        from quickstep.cli.session import collect

        messages = [*self._messages, {"role": "user", "content": text}]
        stream = self._engine.generate(self._engine.chat_prompt(messages), self._sampling)
        (answer,) = await collect(stream, 1, write_out)
        write_out("\n")
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]


async def _read_messages(conversation: Conversation) -> None:
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
            await _send(conversation, line, on_terminal)


async def _send(conversation: Conversation, line: str, on_terminal: bool) -> None:
    """On a terminal, report a rejected message and continue."""
    try:
        await conversation.send(line)
    except RequestError as error:
        if not on_terminal:
            raise
        print(f"{error} (/reset clears the conversation)", file=sys.stderr)


def _read_line(prompt: str) -> str | None:
    """The next line, stripped; None at the end of input. `input` offers line editing."""
    try:
        return input(prompt).strip()
    except EOFError:
        return None
