"""API keys: who may call, and what follows from the key for a request: the account that its work
counts on, the prefix cache that it may hit, and its priority.

A key has a name, which logs and accounts use, a range of priorities, and perhaps rate limits and
budgets (`server.usage.limits`), which only a YAML file of keys can have. Keys are stored and
compared as digests, all of them every time, so that the response time reveals nothing about them.
An admin key may also call the operator's routes (`http.route.with_admin_check`).
`cli.serve` collects them from flags, a file and the environment.

What a client writes into the body divides its own key's account and cache further, and never
reaches another key's. Without keys there is one client, and only the body separates requests.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from quickstep.errors import ConfigError, RequestError
from quickstep.server.usage.limits import Budget, KeyLimits
from quickstep.yaml_file import read_yaml

__all__ = [
    "ApiKey",
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
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_MAX_PRIORITY = 2**31 - 1
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_SHARED_MODE = 0o077
_YAML_SUFFIXES = (".yaml", ".yml")


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


class ApiKey(msgspec.Struct, frozen=True):
    """A key with what its requests may do. `weight` is its part of the device under the scheduling
    policy `fair`, in proportion to those of the other keys.
    """

    name: str
    key: str
    priorities: PriorityRange = PriorityRange()
    limits: KeyLimits = KeyLimits()
    weight: float = 1.0


class ApiKeys:
    """Named keys; without keys, every client may call.

    Each of `entries` is an `ApiKey`, or the text `KEY`, `NAME=KEY` or `NAME[LOW..HIGH]=KEY`, where
    LOW and HIGH are the range of priorities; a key without a name is named by its position,
    `key-1`. The keys of `admin_entries` are keys like the others that may also call the operator's
    routes.
    """

    def __init__(
        self, entries: Iterable[str | ApiKey] = (), admin_entries: Iterable[str] = ()
    ) -> None:
        named: dict[str, bytes] = {}
        self._ranges: dict[str, PriorityRange] = {}
        self._limits: dict[str, KeyLimits] = {}
        self._weights: dict[str, float] = {}
        self._admin_names: set[str] = set()
        entries, admin_entries = tuple(entries), tuple(admin_entries)
        for place, entry in enumerate((*entries, *admin_entries), 1):
            api_key = _split(entry, place) if isinstance(entry, str) else entry
            name = api_key.name
            _check_key(name, api_key.key)
            api_key.limits.check(name)
            if not 0.0 < api_key.weight < math.inf:
                raise ConfigError(
                    f"the weight of the API key {name} is {api_key.weight:g}, it must be above 0"
                )
            self._weights[name] = api_key.weight
            if place > len(entries):
                self._admin_names.add(name)
            digest = _digest(api_key.key.encode())
            if name in named:
                raise ConfigError(f"two API keys have the name {name}; give each its own")
            if digest in named.values():
                raise ConfigError(f"the API key of {name} has another name already")
            named[name] = digest
            self._ranges[name] = api_key.priorities
            if api_key.limits != KeyLimits():
                self._limits[name] = api_key.limits
        self._digests = tuple(named.items())

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the keys."""
        return tuple(name for name, _ in self._digests)

    @property
    def limits(self) -> Mapping[str, KeyLimits]:
        """The limits of the keys that have some, by name."""
        return self._limits

    def weight_of(self, name: str) -> float:
        """The weight of the key `name`; "" is a client of a server without keys."""
        return self._weights.get(name, 1.0)

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


class _YamlKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key in a YAML file, below its name."""

    key: str
    priorities: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budget: Budget | list[Budget] | None = None
    weight: float = 1.0

    def api_key(self, name: str) -> ApiKey:
        """The key `name`. Raises ConfigError."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"the name {name[:64]!r} of an API key must be 1 to 64 letters, digits and any of "
                "`_.@-`"
            )
        given = self.budget
        budgets = given if isinstance(given, list) else [] if given is None else [given]
        return ApiKey(
            name,
            self.key,
            PriorityRange() if self.priorities is None else _priority_range(self.priorities, name),
            KeyLimits(self.requests_per_minute, self.tokens_per_minute, tuple(budgets)),
            self.weight,
        )


def read_key_file(path: Path) -> tuple[list[str | ApiKey], bool]:
    """The entries of a file, and whether others may read it. Raises ConfigError.

    In a text file, each line is `NAME:KEY` or `NAME=KEY` (`NAME[LOW..HIGH]=KEY` with the range of
    its priorities); empty lines and lines that begin with `#` are skipped. A file named `.yaml` or
    `.yml` is a mapping from names to keys with their limits.
    """
    try:
        is_shared = bool(path.stat().st_mode & _SHARED_MODE)
        if path.suffix in _YAML_SUFFIXES:
            keys = read_yaml(path, dict[str, _YamlKey], "--api-key-file")
            return [key.api_key(name) for name, key in keys.items()], is_shared
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
    entries = [line.strip() for line in lines]
    return [entry for entry in entries if entry and not entry.startswith("#")], is_shared


def _split(entry: str, place: int) -> ApiKey:
    """A line of text. `=` at a key's end is padding, so `abc==` has no name."""
    named = _NAMED.fullmatch(entry)
    if named is None:
        return ApiKey(f"key-{place}", entry)
    name, key, given = named.group("name", "key", "range")
    return ApiKey(name, key, PriorityRange() if given is None else _priority_range(given, name))


def _check_key(name: str, key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"the API key of {name} is empty, too long or holds a blank; use up to 512 visible "
            "ASCII characters"
        )


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
