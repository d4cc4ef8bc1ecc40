"""`Option`: what an operator can set, declared once, at the field of its config struct.

    block_size: Annotated[int, Option("tokens per KV block", Kind.COUNT)] = 16

The command line (`cli.flags.options`), `--config FILE`, `LLM`'s arguments, the checks of bounds and
`docs/reference/cli.md` read the declaration: type, help, flag, bounds, unit; the default is the
field's. Nothing here knows argparse.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from quickstep.errors import ConfigError


class Kind(enum.Enum):
    """How the text of a value is read; the value is the usual placeholder in help texts."""

    TEXT = ""
    COUNT = "N"  # an integer of at least 1
    COUNT_OR_ALL = "N or -1"  # or -1 for no limit
    INTEGER = "INTEGER"
    TOKENS = "TOKENS"  # a count such as 8192 or 8k
    BYTES = "SIZE"  # bytes such as 500M or 2GiB
    SECONDS = "SECONDS"
    PATH = "FILE"
    JSON = "JSON"


class AllowedRange(msgspec.Struct, frozen=True):
    """The values that are allowed: from `least` (or above `above`) to `most`."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    is_finite: bool = False

    def __contains__(self, value: float) -> bool:
        # a comparison that holds: NaN is outside of any bounds
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (not self.is_finite or -float("inf") < value < float("inf"))
        )

    def __str__(self) -> str:
        if self.most is not None:
            return f"from {self.least:g} to {self.most:g}"
        limit = f"at least {self.least:g}" if self.above is None else f"above {self.above:g}"
        return f"{limit} and finite" if self.is_finite else limit


POSITIVE = AllowedRange(above=0)
AT_LEAST_0 = AllowedRange(least=0)
AT_LEAST_1 = AllowedRange(least=1)


class Option(msgspec.Struct, frozen=True):
    """The declaration of an option, next to the type and the default of its field.

    Attributes:
        help: The text of `--help`. The default is added to it, unless the text has `{default}`.
        kind: How the text of a value is read.
        flag: The long flag; "" for the field's name.
        aliases: Other names of the flag.
        metavar: The placeholder in help texts; "" for the usual one of `kind`.
        choices: The known values; () for any, or for those of the field's enum.
        default_text: The default in words, where the field's value says too little.
        bounds: The values that are allowed; None for all that `kind` reads.
        turns_off: The flag sets the field to False.
        argument: The name in `LLM(...)`; "" for the flag's, None if `LLM` does not have it.
        other_arguments: More names in `LLM(...)`.
        repeats: How a field with several values gets them: in one flag (`once`), in several that
            add up (`extend`), or one per flag (`append`).
    """

    help: str
    kind: Kind = Kind.TEXT
    flag: str = ""
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    choices: tuple[str, ...] = ()
    default_text: str = ""
    bounds: AllowedRange | None = None
    turns_off: bool = False
    argument: str | None = ""
    other_arguments: tuple[str, ...] = ()
    repeats: str = "once"


class Declared(NamedTuple):
    """An option with the field that declares it."""

    field: str
    type: Any
    default: Any  # `msgspec.NODEFAULT` if the field is required
    option: Option

    @property
    def flag(self) -> str:
        """The long flag."""
        return self.option.flag or "--" + self.field.replace("_", "-")

    @property
    def name(self) -> str:
        """The flag's name among parsed arguments."""
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names in `LLM(...)`."""
        if self.option.argument is None:
            return ()
        return (self.option.argument or self.name, *self.option.other_arguments)


@cache
def options_of(section: type[msgspec.Struct]) -> Mapping[str, Declared]:
    """The options among the fields of a struct, by field."""
    hints = get_type_hints(section, include_extras=True)
    found: dict[str, Declared] = {}
    for field in msgspec.structs.fields(section):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, *notes = get_args(hint)
        option = next((note for note in notes if isinstance(note, Option)), None)
        if option is None:
            continue
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        found[field.name] = Declared(field.name, kind, default, option)
    return found


def check_bounds(section: msgspec.Struct) -> None:
    """Raise ConfigError for a value outside the bounds of its option."""
    for declared in options_of(type(section)).values():
        value, bounds = getattr(section, declared.field), declared.option.bounds
        if bounds is not None and value is not None and value not in bounds:
            text = f"{value:g}" if isinstance(value, float) else value
            raise ConfigError(f"{declared.flag} is {text}, it must be {bounds}")
