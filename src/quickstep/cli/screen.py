"""Tables, progress bars and colours that commands print.

They go to stderr unless the table is the output of the command, so that stdout can be piped.
Colours and bars appear only on a terminal. `rich` is imported where it is used, because parsing
flags does not need it.
"""

from __future__ import annotations

import logging
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from quickstep.model.sizing import MemoryPlan

__all__ = [
    "console_on",
    "counting_bar",
    "loading_bar",
    "plain_table",
    "print_memory",
    "print_table",
    "size_text",
    "without_echo",
    "write_out",
]

_PLAIN_WIDTH = 100


def console_on(stream: IO[str] | None = None) -> Console:
    """A console on `stream` (default: stderr); plain text unless that is a terminal."""
    from rich.console import Console

    stream = stream or sys.stderr
    on_terminal = stream.isatty()
    return Console(
        file=stream,
        highlight=False,
        soft_wrap=not on_terminal,
        width=None if on_terminal else _PLAIN_WIDTH,
    )


def size_text(num_bytes: float) -> str:
    """A number of bytes in binary units, such as `1.50 GiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_text_columns: int = 1,
    is_dense: bool = False,
) -> None:
    """Print a table; its first `num_text_columns` columns are text, the others figures. Columns of
    a dense one are closer.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        collapse_padding=is_dense,
    )
    for place, name in enumerate(header):
        is_text = place < num_text_columns
        table.add_column(
            name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str | None:
    """The text that `print_table` prints if the output is not a terminal, without importing `rich`,
    which would slow down the start. None if the table is too wide; `rich` wraps it.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    width = sum(widths) + 3 * len(widths) - 1
    if width > _PLAIN_WIDTH:
        return None
    lines = []
    for row in (header, *rows):
        label, *figures = (
            cell.rjust(column) if place else cell.ljust(column)
            for place, (cell, column) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(f" {'   '.join((label, *figures))} ")
    return "\n".join((title, lines[0], "─" * width, *lines[1:], ""))


def print_memory(plan: MemoryPlan) -> None:
    """Print the memory plan and its notes to stderr."""
    title, header = "memory", ("part", "size", "of")
    rows = [(row.label, size_text(row.num_bytes), row.detail) for row in plan.rows]
    text = None if sys.stderr.isatty() else plain_table(title, header, rows)
    if text is None:
        print_table(console_on(), title, header, rows)
    else:
        sys.stderr.write(text)
    if logging.getLogger("quickstep").isEnabledFor(logging.INFO):
        return  # the engine has logged the notes
    for note in plan.notes:
        print(note, file=sys.stderr)


@contextmanager
def without_echo(stream: IO[str]) -> Iterator[None]:
    """What is typed meanwhile on the terminal `stream` is kept for its next reader, not shown."""
    if not stream.isatty():
        yield
        return
    before = termios.tcgetattr(stream)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(stream, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)


@contextmanager
def loading_bar(text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield `progress(done, total)`, which updates a bar of bytes; None if there is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(text), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with without_echo(sys.stdin), Progress(*columns, console=console_on(), transient=True) as bar:
        task = bar.add_task(text, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress


@contextmanager
def counting_bar(prefix: str = "") -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield `progress(what, done, total)`, which updates a bar; None if there is no terminal.
    `prefix` begins its text.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description:<32}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console_on(), transient=True) as bar:
        task = bar.add_task(prefix, total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=prefix + what, completed=done, total=total)

        yield progress


def write_out(text: str) -> None:
    """Write a piece of streamed text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
