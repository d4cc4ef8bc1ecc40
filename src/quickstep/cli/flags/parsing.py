"""Argument parsing: errors in one sentence that suggest the nearest flag, sizes such as 2G."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

__all__ = [
    "Parser",
    "bytes_size",
    "command",
    "fraction",
    "json_objects",
    "non_negative_int",
    "non_negative_number",
    "positive_int",
    "positive_number",
    "readable_file",
    "token_count",
]

_Number = TypeVar("_Number", int, float)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<binary>i?)b?", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations that suggests the nearest flag or choice."""

    def __init__(self, prog: str | None = None, **texts: str | None) -> None:
        super().__init__(
            prog=prog,
            description=texts.get("description"),
            epilog=texts.get("epilog"),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit with code 2."""
        print(f"{self.prog}: {_with_suggestion(message)}", file=sys.stderr)
        raise SystemExit(2)

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """Report the first unknown argument, and suggest the nearest flag."""
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{name!r} is one argument too many; see {self.prog} --help")
        near = _nearest(name, self._option_string_actions)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        self.error(f"there is no flag {name}; {hint}")


def _with_suggestion(message: str) -> str:
    """Argparse's sentence; if it lists choices, with the nearest one."""
    wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
    if not wrong:
        return message
    near = _nearest(wrong.group(1), re.findall(r"[\w-]+", wrong.group(2)))
    return f"{message}; did you mean {near}?" if near else message


def _nearest(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return near[0] if near else None


def command(
    subparsers: argparse._SubParsersAction[Parser],
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
    examples: str = "",
) -> Parser:
    """Add a subcommand that calls `run`. `examples`: lines that its help shows."""
    epilog = "examples:\n" + textwrap.indent(examples, "  ") if examples else None
    parser = subparsers.add_parser(name, help=text, description=text, epilog=epilog)
    parser.set_defaults(run=run, parser=parser)
    return parser


def json_objects(text: str) -> dict[str, Any] | list[dict[str, Any]]:
    """A JSON object, or a list of them."""
    try:
        value: dict[str, Any] | list[dict[str, Any]] = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    objects = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) for one in objects):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object and no list of objects")
    return value


def bytes_size(text: str) -> int:
    """Parse a size in bytes: `4000000`, `4M` or `2GiB`."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 4000000, 500M or 2GiB")
    unit = match.group("unit").lower()
    if match.group("binary") and not unit:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 4000000, 500M or 2GiB")
    factor = _BINARY_UNITS[unit] if match.group("binary") else _UNITS[unit]
    return int(_in_64_bits(float(match.group("number")) * factor, text))


def token_count(text: str) -> int:
    """Parse a number of tokens: `8192`, `8k` (thousands) or `8Ki`, as in vLLM."""
    match = _SIZE.fullmatch(text.strip())
    if not match or text.strip().lower().endswith("b"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count, such as 8192 or 8k")
    return positive_int(str(bytes_size(text)))


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    return _int_from(1, text)


def non_negative_int(text: str) -> int:
    """Parse an integer of at least 0."""
    return _int_from(0, text)


def _int_from(lowest: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if value < lowest:
        raise argparse.ArgumentTypeError(f"{value} is below {lowest}")
    return _in_64_bits(value, text)


def _in_64_bits(value: _Number, text: str) -> _Number:
    """`value`; larger ones cannot be sent to the engine's process."""
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text[:50]} is above 2^63 - 1")
    return value


def positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def readable_file(text: str) -> Path:
    """Parse the path of a file that can be read."""
    path = Path(text)
    try:
        path.open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error.strerror}") from None
    return path


def non_negative_number(text: str) -> float:
    """Parse a finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value


def fraction(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    value = positive_number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def positive_or_all(text: str) -> int:
    """Parse an integer of at least 1, or -1 for no limit."""
    return -1 if text.strip() == "-1" else positive_int(text)
