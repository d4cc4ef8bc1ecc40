"""What the commands show beside their output: tables, a progress bar, colours on a terminal only.

Everything here goes to stderr unless a command's purpose is the table itself, so that stdout
stays what a pipe wants. `rich` is imported where it is used: it is not needed to parse flags.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console_on", "loading_bar", "plain_table", "print_table", "size_text"]

_PLAIN_WIDTH = 100


def console_on(stream: IO[str] | None = None) -> Console:
    """A console on `stream` (stderr). Plain text unless it is a terminal."""
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
    """Bytes as people read them, in binary units."""
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
) -> None:
    """A table whose first columns are text and whose others are figures."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for place, name in enumerate(header):
        is_text = place < num_text_columns
        table.add_column(
            name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str | None:
    """What `print_table` prints off a terminal, for tables that a start waits for: `rich` takes as
    long to import as all of Starlette. None for a table that does not fit, which `rich` breaks.
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


@contextmanager
def loading_bar(text: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yields `progress(done, total)` that draws a bar of bytes; None off a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(text), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console_on(), transient=True) as bar:
        task = bar.add_task(text, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress
