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

from quickstep.errors import size_text

if TYPE_CHECKING:
    from rich.console import Console

    from quickstep.model.sizing import MemoryPlan

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

    On a terminal that is too narrow, texts wrap between words, then the columns are closer, and
    then the figures are divided among several tables. Elsewhere lines are as long as they need.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(header, *rows, strict=True))
    if not console.is_terminal:
        console.width = max(console.width, _table_width([_widest(column) for column in columns]))
    # without breaking a word
    least = [
        max(_widest(cell.split()) for cell in column)
        if place < num_text_columns
        else _widest(column)
        for place, column in enumerate(columns)
    ]
    is_dense = is_dense or _table_width(least) > console.width
    groups = _fitting(least, num_text_columns, console.width) if is_dense else [range(len(columns))]
    if title:
        console.print(Text(title, style="italic"))
    for group in groups:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, collapse_padding=is_dense)
        for place in group:
            is_text = place < num_text_columns
            table.add_column(
                header[place],
                justify="left" if is_text else "right",
                no_wrap=not is_text,
                min_width=least[place],
            )
        for row in rows:
            table.add_row(*(Text(row[place]) for place in group))
        console.print(table)


def _widest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _table_width(widths: Sequence[int], is_dense: bool = False) -> int:
    """Of columns: the space at both sides of each (one between two of a dense table) and a line
    between them.
    """
    return sum(widths) + (2 * len(widths) + 1 if is_dense else 3 * len(widths) - 1)


def _fitting(least: Sequence[int], num_text_columns: int, width: int) -> list[list[int]]:
    """The columns of tables that are at most that wide, each with all columns of text."""
    texts = list(range(num_text_columns))
    groups = [texts]
    for place in range(num_text_columns, len(least)):
        group = [*groups[-1], place]
        is_full = _table_width([least[index] for index in group], is_dense=True) > width
        if is_full and len(groups[-1]) > num_text_columns:
            groups.append([*texts, place])
        else:
            groups[-1] = group
    return groups


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The text that `print_table` prints if the output is not a terminal, without importing `rich`,
    which would slow down the start.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        label, *figures = (
            cell.rjust(column) if place else cell.ljust(column)
            for place, (cell, column) in enumerate(zip(row, widths, strict=True))
        )
        lines.append(f" {'   '.join((label, *figures))} ")
    return "\n".join((title, lines[0], "─" * _table_width(widths), *lines[1:], ""))


def print_memory(plan: MemoryPlan) -> None:
    """Print the memory plan and its notes to stderr."""
    title, header = "memory", ("part", "size", "of")
    rows = [(row.label, size_text(row.num_bytes), row.detail) for row in plan.rows]
    if sys.stderr.isatty():
        print_table(console_on(), title, header, rows)
    else:
        sys.stderr.write(plain_table(title, header, rows))
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
