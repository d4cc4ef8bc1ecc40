"""API keys: who may call, and what follows from the key for a request: the account that its work
counts on, the prefix cache that it may hit, and its priority.

A key has a name, which logs and accounts use, and a range of priorities. Keys are stored and
compared as digests, all of them every time, so that the response time reveals nothing about them.
An admin key may also call the operator's routes (`http.route.with_admin_check`).
`cli.serve` collects them from flags, a file and the environment.

What a client writes into the body divides its own key's account and cache further, and never
reaches another key's. Without keys there is one client, and only the body separates requests.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from quickstep.errors import ConfigError, RequestError

__all__ = [
    "ApiKeys",
    "PriorityRange",
    "cache_salt_of",
    "priority_of_key",
    "read_key_file",
    "tenant_of_key",
]

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


_WITHIN_BATCH = PriorityRange()


class ApiKeys:
    """Named keys; without keys, every client may call.

    Each of `entries` is `KEY`, `NAME=KEY` or `NAME[LOW..HIGH]=KEY`, where LOW and HIGH are the
    range of priorities; a key without a name is named by its position, `key-1`. The keys of
    `admin_entries` are keys like the others that may also call the operator's routes.
    """

    def __init__(self, entries: Iterable[str] = (), admin_entries: Iterable[str] = ()) -> None:
        named: dict[str, bytes] = {}
        self._ranges: dict[str, PriorityRange] = {}
        admins = tuple(admin_entries)
        first_admin = len(entries := tuple(entries)) + 1
        self._admin_names: set[str] = set()
        for place, entry in enumerate((*entries, *admins), 1):
            name, key, priorities = _split(entry, place)
            if place >= first_admin:
                self._admin_names.add(name)
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
        """The names of the keys."""
        return tuple(name for name, _ in self._digests)

    def priorities_of(self, name: str) -> PriorityRange:
        """The priorities of the key `name`; "" is a client of a server without keys."""
        return self._ranges.get(name, PriorityRange())

    @property
    def priorities(self) -> PriorityRange:
        """The range from the lowest to the highest priority that any client may have."""
        ranges = self._ranges.values() or (PriorityRange(),)
        return PriorityRange(min(one.low for one in ranges), max(one.high for one in ranges))

    def is_admin(self, name: str) -> bool:
        """Whether the key `name` may call the operator's routes."""
        return name in self._admin_names

    def owner(self, presented: Sequence[bytes]) -> str | None:
        """The name of the first known key in `presented`, or None."""
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

    Empty lines and lines that begin with `#` are skipped.
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


def tenant_of_key(caller: str, label: str) -> str:
    """The account: the key's name, then the client's own label. Names of keys hold no slash."""
    if not caller:
        return label
    return f"{caller}/{label}" if label else caller


def cache_salt_of(caller: str, salt: str, is_shared: bool) -> str:
    """What separates prefix caches. `is_shared` lets keys hit each other's prompts.

    The length in front makes it unambiguous: two keys never get the same salt.
    """
    return salt if is_shared or not caller else f"{len(caller)}:{caller}{salt}"


def priority_of_key(caller: str, priority: int, keys: ApiKeys, added: int = 0) -> int:
    """The priority, if the key may have it. Raises RequestError.

    `added` is for the lines of batches: their own priority orders them among each other, and never
    puts one in front of other requests.
    """
    allowed = keys.priorities_of(caller).check(priority)
    if not added:
        return allowed
    return added + max(_WITHIN_BATCH.low, min(allowed, _WITHIN_BATCH.high))
