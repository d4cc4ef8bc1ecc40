"""The keys that clients may call with, each with a name that logs and accounts may show, and with
the priorities that its requests may have.

Keys are kept and compared as digests, all of them every time, so that the time of an answer says
nothing about any of them. `cli.serve` gathers them from flags, a file and the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from quickstep.errors import ConfigError, RequestError

__all__ = ["ApiKeys", "PriorityRange", "read_key_file"]

_NAMED = re.compile(
    r"(?P<name>[A-Za-z0-9_.@-]{1,64})(?:\[(?P<range>[^\]]*)\])?[=:](?P<key>.*[^=].*)", re.DOTALL
)
_RANGE = re.compile(r"(-?[0-9]{1,10})\.\.(-?[0-9]{1,10})")
_MAX_PRIORITY = 2**31 - 1
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_SHARED_MODE = 0o077


class PriorityRange(msgspec.Struct, frozen=True):
    """The priorities that the requests of one client may have; lower goes first."""

    low: int = -10
    high: int = 10

    def check(self, priority: int) -> int:
        """The priority itself. Raises RequestError outside the range."""
        if not self.low <= priority <= self.high:
            raise RequestError(
                f"priority is {priority}, it must be between {self.low} and {self.high}",
                param="priority",
            )
        return priority


class ApiKeys:
    """Named keys; no keys means that everybody may call.

    `given` holds `KEY`, `NAME=KEY` or `NAME[LOW..HIGH]=KEY` each, where LOW and HIGH are the range
    of priorities; a key without a name is called by its place, `key-1`.
    """

    def __init__(self, given: Iterable[str] = ()) -> None:
        named: dict[str, bytes] = {}
        self._ranges: dict[str, PriorityRange] = {}
        for place, entry in enumerate(given, 1):
            name, key, priorities = _split(entry, place)
            digest = _digest(key.encode())
            if name in named:
                raise ConfigError(f"two API keys have the name {name}; give each its own")
            if digest in named.values():
                raise ConfigError(f"the API key of {name} has another name already")
            named[name] = digest
            self._ranges[name] = priorities
        self._digests = tuple(named.items())

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def names(self) -> tuple[str, ...]:
        """Whom the keys belong to."""
        return tuple(name for name, _ in self._digests)

    def priorities_of(self, name: str) -> PriorityRange:
        """What the requests of the key `name` may have; "" is a client of a server without keys."""
        return self._ranges.get(name, PriorityRange())

    @property
    def priorities(self) -> PriorityRange:
        """From the lowest to the highest that any client may have."""
        ranges = self._ranges.values() or (PriorityRange(),)
        return PriorityRange(min(one.low for one in ranges), max(one.high for one in ranges))

    def owner(self, presented: Sequence[bytes]) -> str | None:
        """The name of the key that is among `presented`, None if none is."""
        found = None
        for key in presented:
            digest = _digest(key)
            for name, known in self._digests:
                if hmac.compare_digest(digest, known):
                    found = name
        return found


def read_key_file(path: Path) -> tuple[list[str], bool]:
    """The entries of a file, one `NAME:KEY` or `NAME=KEY` a line
    (`NAME[LOW..HIGH]=KEY` with the range of its priorities); and whether others may read it.

    Empty lines and lines that begin with `#` say nothing.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        is_shared = bool(path.stat().st_mode & _SHARED_MODE)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
    entries = [line.strip() for line in lines]
    return [entry for entry in entries if entry and not entry.startswith("#")], is_shared


def _split(entry: str, place: int) -> tuple[str, str, PriorityRange]:
    """Name, key and priorities. `=` at a key's end is padding, so `abc==` has no name."""
    named = _NAMED.fullmatch(entry)
    name, key = (named.group("name"), named.group("key")) if named else (f"key-{place}", entry)
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"the API key of {name} is empty, too long or holds a blank; use up to 512 visible "
            "ASCII characters"
        )
    given = named.group("range") if named else None
    return name, key, PriorityRange() if given is None else _priority_range(given, name)


def _priority_range(given: str, name: str) -> PriorityRange:
    parts = _RANGE.fullmatch(given)
    low, high = (int(part) for part in parts.groups()) if parts else (1, 0)
    if not -_MAX_PRIORITY <= low <= high <= _MAX_PRIORITY:
        raise ConfigError(
            f"the priorities of the API key {name} are {given[:64]!r}; write LOW..HIGH, integers "
            f"from {-_MAX_PRIORITY} to {_MAX_PRIORITY}, such as {name}[-5..5]=KEY"
        )
    return PriorityRange(low, high)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
