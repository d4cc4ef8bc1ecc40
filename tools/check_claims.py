"""Check docs/claims.md: `make check` runs it.

A claim has a command. A command is a target of the Makefile, a module of benchmarks/, tests that
exist, or a command of `quickstep`; flags of benchmarks are in the module's source
(`tools/check_docs.py` checks those of `quickstep`, and links). README's table of claims is the
first two columns of the first table.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = ROOT / "docs" / "claims.md"
README = ROOT / "README.md"
HEAD = "| claim | command that proves it |"
CODE = re.compile(r"`([^`]+)`")
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
NUM_PROMISES = 22


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the rows of the table whose first line begins with `head`."""
    lines = text[text.index(head) :].splitlines()[2:]
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def faults(claims: str, readme: str) -> Iterator[str]:
    """What is wrong in the text of the two pages."""
    claimed, promised = rows(claims, HEAD), rows(claims, "| | promise | command |")
    if [row[:2] for row in claimed] != [row[:2] for row in rows(readme, HEAD)]:
        yield "README's table of claims is not the first two columns of the first table"
    numbers = [row[0] for row in promised]
    if numbers != [f"R{number}" for number in range(1, NUM_PROMISES + 1)]:
        yield f"the promises are {', '.join(numbers)}, and not R1 to R{NUM_PROMISES}"
    for claim, text in [(row[0], row[1]) for row in claimed] + [
        (row[0], row[2]) for row in promised
    ]:
        commands = CODE.findall(text)
        if not commands:
            yield f"{claim}: there is no command"
        for command in commands:
            yield from (f"{claim}: `{command}`: {fault}" for fault in faults_of(command))


def faults_of(command: str) -> Iterator[str]:
    """What of a command does not exist."""
    program, *words = shlex.split(command)
    if program == "make":
        targets = TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
        phony = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        yield from (
            f"there is no target {word}"
            for word in words
            if "=" not in word and word not in targets and word not in " ".join(phony).split()
        )
    elif program == "pytest":
        yield from (f"there is no {word}" for word in words if not (ROOT / word).exists())
    elif program == "quickstep":
        module = ROOT / "src" / "quickstep" / "cli" / f"{words[0]}.py"
        if not (module.exists() or module.with_suffix("").is_dir()):
            yield f"there is no command {words[0]}"
    elif [program, *words[:1]] == ["python", "-m"]:
        path = ROOT / words[1].replace(".", "/")
        source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        yield from faults_of_source(words[1], source, words[2:])
    elif program == "python":
        yield from faults_of_source(words[0], ROOT / words[0], words[1:])
    else:
        yield "it is neither make, pytest, quickstep, python nor a module"


def faults_of_source(name: str, source: Path, arguments: list[str]) -> Iterator[str]:
    """What of a module or a script, and of its flags, does not exist."""
    if not source.exists():
        yield f"there is no {name}"
        return
    text = source.read_text(encoding="utf-8")
    for flag in arguments:
        if flag.startswith("--") and f'"{flag}"' not in text:
            yield f"{name} has no flag {flag}"


def main() -> int:
    """Print every fault; exit status 1 if there is one."""
    found = list(faults(CLAIMS.read_text(encoding="utf-8"), README.read_text(encoding="utf-8")))
    for fault in found:
        print(f"docs/claims.md: {fault}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
