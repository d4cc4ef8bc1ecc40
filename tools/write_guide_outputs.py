"""Run the commands of `docs/guide` and write what they print below them, or check it; and write the
tables of the formats of calls and of reasoning.

A page shows a command in a block of `sh` and what it prints in the block of `text` that follows.
`plan` and `simulate` with named hardware print the same everywhere, so those blocks are generated;
measurements of a machine are not. `make reference` writes them; `--check` exits with status 1 if a
page differs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reference_page import ROOT, cell

if TYPE_CHECKING:
    from quickstep.text.tool_calls.call_grammar import CallSpelling

PAGES = ROOT / "docs" / "guide"
BLOCKS = re.compile(r"```sh\n(?P<commands>[^`]*)```\n\n```text\n[^`]*```")
REPEATABLE = ("quickstep plan ", "quickstep simulate ")
# Blocks with one of these take seconds: `make docs-test` checks them, `make test` the others.
SLOW = (
    *("--sweep ", "--rate 2,8,32 ", "--rate 1,6,12,18 ", "--replicas 1,2,4 ", "--adapters 1000 "),
    *("--tenant ", "static,length-grouped,mixed", "--input 3900 ", "h100x8 "),
)


def printed(command: str) -> str:
    """What a command prints, without spaces at the ends of lines."""
    from quickstep.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(shlex.split(command)[1:])  # `plan` exits with 1 if the target is not met
    lines = [line.rstrip() for line in out.getvalue().strip("\n").splitlines()]
    return "\n".join(lines)


def with_outputs(page: str, slow_too: bool = True) -> str:
    """The page with the outputs of its repeatable commands."""

    def shown(block: re.Match[str]) -> str:
        commands = block["commands"].replace("\\\n", " ").strip().splitlines()
        if not all(command.startswith(REPEATABLE) for command in commands):
            return block[0]
        if not slow_too and any(part in block["commands"] for part in SLOW):
            return block[0]
        outputs = "\n\n".join(map(printed, commands))
        return f"```sh\n{block['commands']}```\n\n```text\n{outputs}\n```"

    return BLOCKS.sub(shown, page)


def with_tables(page: str) -> str:
    """The page with the rows of its tables of formats."""
    from quickstep.text.tool_calls.formats import REASONING_FORMATS, TOOL_CALL_FORMATS

    calls = [
        (known.name, written_call(known.spelling), known.families)
        for known in TOOL_CALL_FORMATS.values()
    ]
    reasoning = [
        (known.name, " ".join(known.passage), known.families)
        for known in REASONING_FORMATS.values()
    ]
    for flag, rows in (("--tool-call-parser", calls), ("--reasoning-parser", reasoning)):
        text = "".join(
            f"| `{name}` | `{cell(example)}` | {models} |\n" for name, example, models in rows
        )
        table = re.compile(rf"(\| `{flag}` \|[^\n]*\n\|[-|]+\|\n)(?:\|[^\n]*\n)*")
        page = table.sub(lambda found, text=text: found[1] + text, page)
    return page


def written_call(spelling: CallSpelling) -> str:
    """A call with names in capitals."""
    from quickstep.text.tool_calls.call_grammar import CallSlot

    slots = {
        CallSlot.NAME: "NAME",
        CallSlot.NUMBER: "0",
        CallSlot.ARGUMENTS: "{...}",
        CallSlot.KEYWORDS: "KEY=VALUE",
        CallSlot.BRACED: "{KEY:VALUE}",
    }
    if spelling.parameters is not None:
        tag = spelling.parameters
        parts = (*tag.before_key, "KEY", *tag.before_string, "VALUE", tag.line_end, tag.stop)
        slots[CallSlot.PARAMETERS] = "".join((*parts, *tag.after_stop))
    pieces = (*spelling.begin, *spelling.call, *spelling.end)
    return "".join(piece if isinstance(piece, str) else slots[piece] for piece in pieces)


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` name those that are not current."""
    sys.path.insert(0, str(ROOT / "src"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    stale = []
    for path in sorted(PAGES.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        current = with_tables(with_outputs(page))
        if current != page:
            stale.append(path.relative_to(ROOT))
            if not args.check:
                path.write_text(current, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'differs; run make reference' if args.check else 'written'}")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
