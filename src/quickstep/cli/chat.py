"""`quickstep chat`: a conversation on the terminal, from a pipe, or one `--message`.

With a model that is loaded here, or with `--url` with one of a running server. On a terminal,
answers are streamed and the history is kept; `/reset` clears it, and `/quit` or end of input ends
the program. From a pipe, each line is a message and each answer goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from quickstep.cli.flags.engine import (
    add_engine_flags,
    add_model,
    add_template_flags,
    engine_config,
    model_of,
    template_fields,
)
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.sampling import (
    add_sampling_flags,
    print_defaults,
    sampling_fields_of,
    sampling_params,
)
from quickstep.cli.flags.server_url import add_server_url, get, post_events
from quickstep.cli.screen import write_out
from quickstep.config import InputConfig
from quickstep.errors import ConfigError, EngineError, RequestError

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine

_COMMANDS = ("/reset", "/quit")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "chat", "Chat with a model.", run)
    add_model(parser)
    add_server_url(
        parser,
        url=None,
        what="chat with MODEL of a running server that has OpenAI's API, such as "
        "http://127.0.0.1:8000 (default: load MODEL here)",
        key="a key of the server of --url",
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--message", metavar="TEXT", help="send one message and exit")
    add_sampling_flags(parser, max_tokens=512)
    parser.set_defaults(own_flags=frozenset(vars(parser.parse_args([]))))
    add_template_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the end of input."""
    sampling_params(args, {})  # reports an invalid value before the model is loaded
    if args.url is not None:
        _chat_with_server(args)
        return 0
    if args.api_key is not None:
        raise ConfigError("--api-key is for a server; give --url too")
    from quickstep.cli.session import collect, with_engine

    async def work(engine: Engine) -> None:
        print_defaults(engine.default_sampling)
        sampling = sampling_params(args, engine.default_sampling)
        conversation = ChatHistory(args.system)
        for text in _texts(args, conversation):
            with _rejections(args):
                messages = conversation.with_message(text)
                stream = engine.generate(engine.chat_prompt(messages), sampling)
                (answer,) = await collect(stream, 1, write_out)
                write_out("\n")
                conversation.add_answer(messages, answer.text)

    inputs = InputConfig(**template_fields(args))
    with_engine(replace(engine_config(args, model_of(args)), inputs=inputs), work)
    return 0


def _chat_with_server(args: argparse.Namespace) -> None:
    """Chat with a running server. Raises ConfigError, RequestError, EngineError."""
    for name, value in vars(args).items():
        if name not in args.own_flags and value != args.parser.get_default(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for a model that is loaded here; leave it out with --url")
    fields = {"model": _served_model(args), "stream": True, **sampling_fields_of(args)}
    conversation = ChatHistory(args.system)
    for text in _texts(args, conversation):
        with _rejections(args):
            messages = conversation.with_message(text)
            answer = ""
            for event in post_events(
                args, "/v1/chat/completions", {**fields, "messages": messages}
            ):
                for choice in event.get("choices", ()):
                    content = choice.get("delta", {}).get("content") or ""
                    write_out(content)
                    answer += content
            write_out("\n")
            conversation.add_answer(messages, answer)


def _served_model(args: argparse.Namespace) -> str:
    """The model that is named, or the first of the server."""
    if args.model or args.model_flag:
        return model_of(args)
    try:
        return str(json.loads(get(args, "/v1/models"))["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise EngineError(f"the server at {args.url} lists no model; name one") from None


class ChatHistory:
    """The message history."""

    def __init__(self, system: str | None) -> None:
        self._system = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._system)

    def reset(self) -> None:
        """Clear the history; the system prompt stays."""
        self._messages = list(self._system)

    def with_message(self, text: str) -> list[dict[str, Any]]:
        """The history and the user's next message, which is not in it yet."""
        return [*self._messages, {"role": "user", "content": text}]

    def add_answer(self, messages: list[dict[str, Any]], answer: str) -> None:
        """The history is `messages` and their answer."""
        self._messages = [*messages, {"role": "assistant", "content": answer}]


def _texts(args: argparse.Namespace, conversation: ChatHistory) -> Iterator[str]:
    """The user's messages; commands are carried out."""
    if args.message is not None:
        yield args.message
        return
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
            yield line


@contextmanager
def _rejections(args: argparse.Namespace) -> Iterator[None]:
    """Of a conversation on a terminal, report a rejected message and continue."""
    try:
        yield
    except RequestError as error:
        if args.message is not None or not sys.stdin.isatty():
            raise
        print(f"{error} (/reset clears the conversation)", file=sys.stderr)


def _read_line(prompt: str) -> str | None:
    """The next line, stripped; None at the end of input. `input` offers line editing."""
    was_typed_before = prompt and select.select([sys.stdin], [], [], 0)[0]
    try:
        line = input(prompt).strip()
    except EOFError:
        return None
    if was_typed_before:  # while the model was loaded, without echo
        print(line)
    return line
