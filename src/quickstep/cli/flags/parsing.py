"""Argument parsing: errors in one sentence that suggest a flag that is near, flags of other
engines (`cli.flags.foreign`), sizes such as 2G.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from quickstep.cli.flags.foreign import ForeignFlag, foreign_flag

_Number = TypeVar("_Number", int, float)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<binary>i?)b?", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations that suggests a flag or choice that is near.

    `foreign_flags` are flags of other engines that the command answers. `read_defaults` sets
    defaults by the arguments, before they are parsed (`cli.flags.config_file`); `file_sections`
    are keys of that file which are no flags: their content is in `args.file_sections`.
    """

    def __init__(self, prog: str | None = None, **texts: str | None) -> None:
        super().__init__(
            prog=prog,
            description=texts.get("description"),
            epilog=texts.get("epilog"),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.foreign_flags: Sequence[ForeignFlag] = ()
        self.read_defaults: Callable[[Parser, Sequence[str]], None] | None = None
        self.file_sections: tuple[str, ...] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, without the flags of other engines that ask for what holds anyway."""
        arguments = self._without_foreign(sys.argv[1:] if args is None else args)
        if self.read_defaults is not None:
            self.read_defaults(self, arguments)
        return super().parse_known_args(arguments, namespace)

    def _without_foreign(self, arguments: Sequence[str]) -> list[str]:
        """The arguments in flags of this command. One of another engine may end the command."""
        own: list[str] = []
        known = self._option_string_actions
        left = iter(range(len(arguments)))
        for place in left:
            argument = arguments[place]
            if argument == "--":
                return [*own, *arguments[place:]]
            name, has_value, value = argument.partition("=")
            is_flag = name.startswith("-") and name not in known
            flag = foreign_flag(name, self.foreign_flags) if is_flag else None
            if flag is None:
                own.append(argument)
                continue
            following = arguments[place + 1] if place + 1 < len(arguments) else None
            given = value if has_value else None
            if given is None and flag.has_value(following):
                given = following
                next(left)
            ours = flag.replacement(given)
            if ours is None:
                self.error(flag.refusal(name, given, known))
            own += ours
        return own

    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit with code 2."""
        print(f"{self.prog}: {_with_suggestion(message)}", file=sys.stderr)
        raise SystemExit(2)

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """Report the first unknown argument, and suggest a flag that is near."""
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{name!r} is one argument too many; see {self.prog} --help")
        near = nearest_name(name, self._option_string_actions)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        self.error(f"there is no flag {name}; {hint}")


def _with_suggestion(message: str) -> str:
    """Argparse's sentence; if it lists choices, with one that is near."""
    wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
    if not wrong:
        return message
    near = nearest_name(wrong.group(1), re.findall(r"[\w-]+", wrong.group(2)))
    return f"{message}; did you mean {near}?" if near else message


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The only name that is meant: a quarter of the letters differ, or it has the same words and
    more; None if there is none, or several.
    """
    wanted = name.strip("-").replace("_", "-")
    names = {choice: choice.strip("-") for choice in known}
    edits = {choice: _num_edits(wanted, text) for choice, text in names.items()}
    least = min(edits.values(), default=len(wanted))
    near = [choice for choice in names if edits[choice] == least]
    if least > len(wanted) // 4:
        words = set(wanted.split("-"))
        near = [choice for choice, text in names.items() if words <= set(text.split("-"))]
        near = near if len(words) > 1 else []
    return near[0] if len(near) == 1 else None


def _num_edits(first: str, second: str) -> int:
    """Letters to insert, drop, replace or swap with the next one (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(second) + 1))
    for place, letter in enumerate(first):
        before_last, before, row = before, row, [place + 1]
        for column, other in enumerate(second):
            best = min(before[column] + (letter != other), before[column + 1] + 1, row[column] + 1)
            swaps = place and column and letter == second[column - 1] and first[place - 1] == other
            row.append(min(best, before_last[column - 1] + 1) if swaps else best)
    return row[-1]


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
    if not all(isinstance(element, dict) for element in objects):
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
