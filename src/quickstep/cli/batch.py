"""`quickstep batch -i IN -o OUT [MODEL]`: a file of requests in OpenAI's batch format, offline.

Every line is answered as the server would answer it, with the same bits. Answers are appended as
they come, so that an interrupted run continues where it stopped: start it again. Exit code 1 says
that some lines of the output hold errors.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.cli.flags.engine import (
    add_engine_flags,
    add_format_flags,
    add_model,
    engine_config,
    model_of,
)
from quickstep.cli.flags.parsing import Parser, bytes_size, command, positive_int
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.cli.batch_output import BatchOutput
    from quickstep.engine.engine import Engine
    from quickstep.server.batches.lines import BatchLine, LineAnswer
    from quickstep.server.options import ServerOptions

__all__ = ["add_parser", "run"]

_RETRY_S = 0.05


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "batch", "Answer a file of requests, as OpenAI's batches.", run)
    add_model(parser)
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests, one JSON object a line"
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers; requests whose custom_id stands in it are done already",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="drop the errors in the output, try them again"
    )
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        metavar="N",
        help="requests at a time (default: twice --max-num-seqs)",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that the requests may use (default: the model's)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=bytes_size,
        default=4 * 1024 * 1024,
        metavar="SIZE",
        help="largest body of a line (default: 4MiB)",
    )
    parser.add_argument("--seed", type=int, help="seeds the draw of seeds for unseeded requests")
    add_format_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet."""
    from quickstep.cli.batch_output import BatchOutput
    from quickstep.cli.session import with_engine

    source = Path(args.input_file)
    if source.resolve() == Path(args.output_file).resolve():
        raise ConfigError("--input-file and --output-file are the same file")
    _server_options(args)  # a wrong name is told before the model is loaded
    ids = _checked_ids(source, args.max_body_bytes)
    with BatchOutput(Path(args.output_file), args.retry_failed) as output:
        num_done = len(ids & output.done)
        progress = _Progress(len(ids), num_done, output.num_failed)

        async def work(engine: Engine) -> None:
            progress.start()
            with _bar(progress) as show:
                lines = _lines(source, args.max_body_bytes, output.done)
                await _answer_all(engine, args, lines, _writer(output, progress, show))

        try:
            if num_done < len(ids):
                with_engine(engine_config(args, model_of(args), args.seed), work)
        finally:
            print(progress.summary(), file=sys.stderr)
        return 1 if progress.num_failed else 0


async def _answer_all(
    engine: Engine,
    args: argparse.Namespace,
    lines: Iterator[BatchLine],
    write: Callable[[LineAnswer], Awaitable[None]],
) -> None:
    from quickstep.server.batches.lines import LineRunner, batch_endpoints, run_lines
    from quickstep.server.generate.adapter import Served
    from quickstep.server.metrics import Metrics

    options = _server_options(args)
    served = Served.of(engine, options)
    endpoints = batch_endpoints(served, Metrics(engine, served.names[0]))
    concurrency = args.concurrency or 2 * args.max_num_seqs
    answer = LineRunner(endpoints, retry_s=_RETRY_S).answer
    await run_lines(_each(lines), answer, write, concurrency)


async def _each(lines: Iterator[BatchLine]) -> AsyncIterator[BatchLine]:
    for line in lines:
        yield line


def _server_options(args: argparse.Namespace) -> ServerOptions:
    """What a server with these flags would have. Raises ConfigError."""
    from quickstep.server.generate.adapter import check_names
    from quickstep.server.options import RequestLimits, ServerOptions

    options = ServerOptions(
        served_model_names=tuple(args.served_model_name),
        limits=RequestLimits(body_bytes=args.max_body_bytes),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )
    check_names(options)
    return options


def _checked_ids(source: Path, max_line_bytes: int) -> set[str]:
    """The custom ids of a file that is in order. Raises ConfigError, RequestError."""
    ids: set[str] = set()
    for line in _lines(source, max_line_bytes, ()):
        if line.custom_id in ids:
            raise ConfigError(
                f"{source} line {line.number}: custom_id {line.custom_id!r} stands above already"
            )
        ids.add(line.custom_id)
    if not ids:
        raise ConfigError(f"{source} holds no request")
    return ids


def _lines(source: Path, max_line_bytes: int, done: Collection[str]) -> Iterator[BatchLine]:
    """The requests that are not done. Raises ConfigError."""
    from quickstep.server.batches.lines import BATCH_URLS, LineFault, numbered_lines, read_line
    from quickstep.server.options import RequestLimits

    limits = RequestLimits(body_bytes=max_line_bytes)
    try:
        file = source.open("rb")
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
    with file:
        for number, text in numbered_lines(file, limits):
            try:
                line = read_line(number, text, BATCH_URLS, limits)
            except LineFault as fault:
                hint = "; raise --max-body-bytes" if fault.code == "request_too_large" else ""
                raise ConfigError(f"{source} {fault}{hint}") from None
            if line.custom_id not in done:
                yield line


class _Progress:
    """Counts of one run and, for lines that stood in the output, of those before.

    `start` it when the model is loaded.
    """

    def __init__(self, num_lines: int, num_done: int, num_failed: int) -> None:
        self.num_lines = num_lines
        self.num_done = num_done
        self.num_failed = num_failed
        self._num_new = 0
        self._num_tokens = 0
        self._started_s = 0.0

    def start(self) -> None:
        """From now on tokens are made."""
        self._started_s = time.monotonic()

    def add(self, answer: LineAnswer) -> None:
        """An answer was written."""
        self.num_done += 1
        self._num_new += 1
        self.num_failed += not answer.succeeded
        self._num_tokens += answer.num_output_tokens

    @property
    def rate(self) -> str:
        """Generated tokens a second."""
        seconds = time.monotonic() - self._started_s
        return f"{self._num_tokens / seconds if seconds > 0 else 0:.1f} tokens/s"

    def summary(self) -> str:
        """One line for the end."""
        return (
            f"{self.num_done} of {self.num_lines} requests are answered, {self._num_new} of them "
            f"now ({self._num_tokens} tokens, {self.rate}); {self.num_failed} failed"
        )


def _writer(
    output: BatchOutput, progress: _Progress, show: Callable[[], None]
) -> Callable[[LineAnswer], Awaitable[None]]:
    async def write(answer: LineAnswer) -> None:
        output.write(answer.text())
        progress.add(answer)
        show()

    return write


@contextmanager
def _bar(progress: _Progress) -> Iterator[Callable[[], None]]:
    """Yields what draws the counts: a bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeColumn

    from quickstep.cli.screen import console_on

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}, {task.fields[failed]} failed"),
        TimeColumn(),
    )
    with Progress(*columns, console=console_on(), transient=True) as bar:
        task = bar.add_task(
            "", total=progress.num_lines, completed=progress.num_done, rate="", failed=0
        )

        def show() -> None:
            bar.update(
                task, completed=progress.num_done, rate=progress.rate, failed=progress.num_failed
            )

        yield show
