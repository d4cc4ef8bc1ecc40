"""A table off a terminal is written without `rich`, and reads as `rich` writes it."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from quickstep.cli.screen import console_on, plain_table, print_table

HEADER = ("part", "size", "of")
ROWS = [
    [("weights", "942.29 MiB", "0.494 B parameters x 2 bytes"), ("spare", "18.43 GiB", "")],
    [("a", "b", "c")],
    [("KV cache, of a long name", "0 bytes", "x" * 60)],
    [("KV cache, of a long name", "0 bytes", "x" * 160)],
]


@pytest.mark.parametrize("rows", ROWS)
def test_it_is_what_rich_writes(rows: list[tuple[str, ...]]) -> None:
    written = io.StringIO()
    print_table(console_on(written), "memory", HEADER, rows)
    assert plain_table("memory", HEADER, rows) == written.getvalue()


def printed_on_a_terminal(width: int, header: tuple[str, ...], rows: list, **options: int) -> str:
    written = io.StringIO()
    console = Console(file=written, width=width, force_terminal=True, no_color=True)
    print_table(console, "title", header, rows, **options)
    return re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())


WIDE = (
    ("scenario", "compared", "differ", "chunks", "preempt", "overlap", "drafts", "loads"),
    [
        ("all at once, prefill-first", *(str(10**place) for place in range(7))),
        ("with tools", *(str(7 * 10**place) for place in range(7))),
    ],
)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_breaks_no_word_and_loses_no_cell(width: int) -> None:
    header, rows = WIDE
    lines = printed_on_a_terminal(width, header, rows).splitlines()
    assert all(len(line) <= width for line in lines)
    words = " ".join(lines).split()
    for row in (header, *rows):
        assert set(" ".join(row).split()) <= set(words)


@given(
    width=st.integers(36, 100),
    names=st.lists(st.text("abc", min_size=1, max_size=8), min_size=2, max_size=12, unique=True),
    texts=st.integers(1, 2),
)
@settings(max_examples=30)
def test_any_table_keeps_its_words(width: int, names: list[str], texts: int) -> None:
    rows = [tuple(name.upper() for name in names)]
    lines = printed_on_a_terminal(width, tuple(names), rows, num_text_columns=texts).splitlines()
    assert set(names) | set(rows[0]) <= set(" ".join(lines).split())
    assert all(len(line) <= width for line in lines)


def test_off_a_terminal_a_row_is_one_line() -> None:
    header, rows = WIDE
    written = io.StringIO()
    long = [(row[0] * 9, *row[1:]) for row in rows]
    print_table(console_on(written), "title", header, long)
    assert len(written.getvalue().splitlines()) == 3 + len(rows)
