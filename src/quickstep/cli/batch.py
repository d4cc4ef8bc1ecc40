"""`quickstep batch -i IN -o OUT [MODEL]`: a file of requests in OpenAI's batch format, offline.

Every request gets the response that the server would give, bit for bit. Responses are appended to
the output file as they are finished; start the same command again to continue an interrupted run.
A run that was killed may leave an incomplete last line, which the next run removes, so that its
request runs again. The output file is locked while a run writes it. Exit code 1 means that some
lines of the output are errors.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from msgspec.structs import replace

from quickstep.cli.flags.engine import (
    add_engine_flags,
    add_model,
    add_template_flags,
    engine_config,
    model_of,
    template_fields,
)
from quickstep.cli.flags.options import add_options, size_text
from quickstep.cli.flags.parsing import Parser, bytes_size, command, positive_int
from quickstep.config import EngineConfig, InputConfig
from quickstep.errors import ConfigError
from quickstep.server.options import RequestLimits, ServerOptions

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine
    from quickstep.server.batches.lines import BatchLine, LineAnswer

_RETRY_S = 0.05
_RESPONSE_START = b'{"id":"batch_req_'  # of a line of output


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "batch", "Run a file of requests in OpenAI's batch format.", run)
    add_model(parser)
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests, one JSON object per line",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="responses; requests whose custom_id is already in it are skipped",
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="remove the errors from the output and run their requests again",
    )
    parser.add_argument(
        "--concurrency",
        type=positive_int,
        metavar="N",
        help="requests that run at the same time (default: twice --max-num-seqs)",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="model names that the requests may use (default: the model's)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=bytes_size,
        default=RequestLimits().body_bytes,
        metavar="SIZE",
        help=f"largest body of one request (default: {size_text(RequestLimits().body_bytes)})",
    )
    add_options(parser, EngineConfig, "seed")
    add_options(parser, ServerOptions, "tool_call_parser", "reasoning_parser")
    add_template_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the requests that the output file does not answer yet."""
    from quickstep.cli.session import with_engine

    source = Path(args.input_file)
    if source.resolve() == Path(args.output_file).resolve():
        raise ConfigError("--input-file and --output-file are the same file")
    _server_options(args)  # reports a wrong name before the model is loaded
    config = replace(
        engine_config(args, model_of(args), args.seed), inputs=InputConfig(**template_fields(args))
    )
    ids = _checked_ids(source, args.max_body_bytes)
    with _OutputFile(Path(args.output_file), args.retry_failed) as output:
        num_done = len(ids & output.done)
        progress = _Progress(len(ids), num_done, output.num_failed)

        async def work(engine: Engine) -> None:
            progress.start()
            with _bar(progress) as show:
                lines = _lines(source, args.max_body_bytes, output.done)
                await _answer_all(engine, args, lines, _writer(output, progress, show))

        try:
            if num_done < len(ids):
                with_engine(config, work)
        except KeyboardInterrupt:
            print("interrupted: run it again to resume", file=sys.stderr)
            raise
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
    from quickstep.server.models.registry import ModelRegistry
    from quickstep.server.operate.metrics import ServerMetrics

    options = _server_options(args)
    models = ModelRegistry.of_one(engine, options)
    endpoints = batch_endpoints(models, ServerMetrics(models, options.metrics))
    concurrency = args.concurrency or 2 * args.max_num_seqs
    answer = LineRunner(endpoints, retry_s=_RETRY_S).answer
    await run_lines(_each(lines), answer, write, concurrency)


async def _each(lines: Iterator[BatchLine]) -> AsyncIterator[BatchLine]:
    for line in lines:
        yield line


def _server_options(args: argparse.Namespace) -> ServerOptions:
    """The options of a server with these flags. Raises ConfigError."""
    from quickstep.server.models.served_model import check_names

    options = ServerOptions(
        served_model_names=tuple(args.served_model_name),
        limits=RequestLimits(body_bytes=args.max_body_bytes),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )
    check_names(options)
    return options


def _checked_ids(source: Path, max_line_bytes: int) -> set[str]:
    """Check every line; return the custom ids. Raises ConfigError, RequestError."""
    ids: set[str] = set()
    for line in _lines(source, max_line_bytes, ()):
        if line.custom_id in ids:
            raise ConfigError(
                f"{source} line {line.number}: custom_id {line.custom_id!r} is not unique"
            )
        ids.add(line.custom_id)
    if not ids:
        raise ConfigError(f"{source} holds no request")
    return ids


def _lines(source: Path, max_line_bytes: int, done: Collection[str]) -> Iterator[BatchLine]:
    """Read the requests that are not in `done`. Raises ConfigError."""
    from quickstep.server.batches.lines import BATCH_URLS, LineFault, numbered_lines, read_line

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


class _OutputFile:
    """The output file; open within `with`.

    Attributes:
        done: The custom ids in it.
        num_failed: How many of them are errors.
    """

    def __init__(self, path: Path, retry_failed: bool) -> None:
        self._path = path
        self._retry_failed = retry_failed
        self._file: BinaryIO | None = None
        self.done: set[str] = set()
        self.num_failed = 0

    def __enter__(self) -> _OutputFile:
        """Open, lock, read and repair the file. Raises ConfigError."""
        try:
            self._file = self._path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}") from None
        try:
            self._lock(self._file)
            self._read(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, line: bytes) -> None:
        """Append a line, which ends with a newline, and flush it to the file."""
        if self._file is None:
            raise RuntimeError("the output is not open")
        self._file.write(line)
        self._file.flush()

    def _lock(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path} is being written by another run") from None

    def _read(self, file: BinaryIO) -> None:
        """Read what is finished; remove an incomplete end and, if `retry_failed`, the errors."""
        lines: list[bytes] = []
        file.seek(0)
        end = 0
        for number, line in enumerate(file, 1):
            entry = _entry(line)
            is_cut = not line.endswith(b"\n") and (number > 1 or _begins_as_response(line))
            if entry is None and is_cut:
                break  # the end of an earlier run
            if entry is None:
                raise ConfigError(
                    f"{self._path} line {number} is not a batch response; give another file"
                )
            end += len(line)
            custom_id, succeeded = entry
            if self._retry_failed and not succeeded:
                continue
            self.done.add(custom_id)
            self.num_failed += not succeeded
            if self._retry_failed:
                lines.append(line)
        if self._retry_failed:
            self._replace(file, iter(lines))
            return
        file.truncate(end)
        if end and not _ends_a_line(file):
            file.write(b"\n")  # a complete response without its newline
            file.flush()

    def _replace(self, file: BinaryIO, lines: Iterator[bytes]) -> None:
        """Replace the file by `lines` atomically: a crash loses nothing."""
        copy_path = self._path.with_name(self._path.name + ".part")
        with copy_path.open("wb") as copy:
            for line in lines:
                copy.write(line if line.endswith(b"\n") else line + b"\n")
            copy.flush()
            os.fsync(copy.fileno())
        copy_path.replace(self._path)
        file.close()
        self._file = self._path.open("a+b")
        self._lock(self._file)


def _entry(line: bytes) -> tuple[str, bool] | None:
    """A line's custom id and whether it succeeded; None if it is not a batch response."""
    try:
        entry = json.loads(line)
        response = entry["response"] or {"status_code": 500}
        return str(entry["custom_id"]), int(response["status_code"]) < 400
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _begins_as_response(line: bytes) -> bool:
    return line.startswith(_RESPONSE_START) or _RESPONSE_START.startswith(line)


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


class _Progress:
    """Counts of requests, those of earlier runs included. `start` it when the model is loaded."""

    def __init__(self, num_lines: int, num_done: int, num_failed: int) -> None:
        self.num_lines = num_lines
        self.num_done = num_done
        self.num_failed = num_failed
        self._num_new = 0
        self._num_tokens = 0
        self._started_s = 0.0

    def start(self) -> None:
        """Start the clock of `rate`."""
        self._started_s = time.monotonic()

    def add(self, answer: LineAnswer) -> None:
        """Count a response that was written."""
        self.num_done += 1
        self._num_new += 1
        self.num_failed += not answer.succeeded
        self._num_tokens += answer.num_output_tokens

    @property
    def rate(self) -> str:
        """Generated tokens per second of this run."""
        seconds = time.monotonic() - self._started_s
        return f"{self._num_tokens / seconds if seconds > 0 else 0:.1f} tokens/s"

    def summary(self) -> str:
        """The line that is printed at the end."""
        return (
            f"{self.num_done} of {self.num_lines} requests are answered, {self._num_new} of them "
            f"by this run ({self._num_tokens} tokens, {self.rate}); {self.num_failed} failed"
        )


def _writer(
    output: _OutputFile, progress: _Progress, show: Callable[[], None]
) -> Callable[[LineAnswer], Awaitable[None]]:
    async def write(answer: LineAnswer) -> None:
        output.write(answer.text())
        progress.add(answer)
        show()

    return write


@contextmanager
def _bar(progress: _Progress) -> Iterator[Callable[[], None]]:
    """Yield a function that updates a progress bar; it does nothing if stderr is no terminal."""
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
