#!/usr/bin/env python3
"""Check commit messages: a subject of at most 72 characters, and a body that says why and how it
was checked.

    python tools/check_commits.py               commits that the upstream branch does not have
    python tools/check_commits.py FILE          a message that is about to be committed

`make check` runs the first form; without an upstream branch there is nothing to check. For the
second form: `ln -s ../../tools/check_commits.py .git/hooks/commit-msg`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_SUBJECT = 72


def faults(message: str) -> Iterator[str]:
    """What is wrong with a message."""
    lines = [line for line in message.strip().splitlines() if not line.startswith("#")]
    subject, body = lines[0] if lines else "", lines[1:]
    if len(subject) > MAX_SUBJECT:
        yield f"the subject has {len(subject)} characters, the limit is {MAX_SUBJECT}"
    if not any(line.strip() for line in body):
        yield "there is no body: say why, and how it was checked"
    elif body[0].strip():
        yield "the second line is not empty"


def new_messages() -> dict[str, str]:
    """The messages of commits that are not in the upstream branch, by their short hashes."""
    listing = subprocess.run(
        ["git", "log", "--format=%h%n%B%x00", "@{upstream}.."], capture_output=True, text=True
    )
    if listing.returncode:
        return {}
    commits = (commit.strip() for commit in listing.stdout.split("\0"))
    return dict(commit.split("\n", 1) for commit in commits if commit)


def main(argv: Sequence[str]) -> int:
    """Print every fault; exit status 1 if there is one."""
    given = {name: Path(name).read_text(encoding="utf-8") for name in argv}
    messages = given or new_messages()
    found = [(name, fault) for name, message in messages.items() for fault in faults(message)]
    for name, fault in found:
        print(f"{name}: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
