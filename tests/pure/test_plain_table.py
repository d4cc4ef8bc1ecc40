"""A table off a terminal is written without `rich`, and reads as `rich` writes it."""

from __future__ import annotations

import io

import pytest

from quickstep.cli.screen import console_on, plain_table, print_table

HEADER = ("part", "size", "of")
ROWS = [
    [("weights", "942.29 MiB", "0.494 B parameters x 2 bytes"), ("spare", "18.43 GiB", "")],
    [("a", "b", "c")],
    [("KV cache, of a long name", "0 bytes", "x" * 60)],
]


@pytest.mark.parametrize("rows", ROWS)
def test_it_is_what_rich_writes(rows: list[tuple[str, ...]]) -> None:
    written = io.StringIO()
    print_table(console_on(written), "memory", HEADER, rows)
    assert plain_table("memory", HEADER, rows) == written.getvalue()


def test_a_table_wider_than_the_page_is_left_to_rich() -> None:
    assert plain_table("memory", HEADER, [("weights", "1 GiB", "x" * 90)]) is None
