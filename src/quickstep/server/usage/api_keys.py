"""API keys: who may call, and what follows from the key for a request: the account that its work
counts on, the prefix cache that it may hit, and its priority.

A key has a name, which logs and accounts use, a range of priorities, and perhaps rate limits and
budgets (`server.usage.limits`), which only a YAML file of keys can have. Keys are stored and
compared as digests, all of them every time, so that the response time reveals nothing about them.
An admin key may also call the operator's routes (`http.route.with_admin_check`).
`cli.serve` collects them from flags, a file and the environment; SIGHUP reads them again.

What a client writes into the body divides its own key's account and cache further, and never
reaches another key's. Without keys there is one client, and only the body separates requests.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from quickstep.errors import ConfigError, RequestError
from quickstep.server.usage.limits import Budget, KeyLimits
from quickstep.yaml_file import read_yaml

_NAMED = re.compile(
    r"(?P<name>[A-Za-z0-9_.@-]{1,64})(?:\[(?P<range>[^\]]*)\])?[=:](?P<key>.*[^=].*)", re.DOTALL
)
_RANGE = re.compile(r"(-?[0-9]{1,10})\.\.(-?[0-9]{1,10})")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_MAX_PRIORITY = 2**31 - 1
_NAME_DIGITS = 12  # of the digest that names a key without a name
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


class _KeyTable:
    """The keys of one reading, by name."""

    def __init__(self, entries: Iterable[str | ApiKey], admin_entries: Iterable[str]) -> None:
        self.digests: dict[str, bytes] = {}
        self.ranges: dict[str, PriorityRange] = {}
        self.limits: dict[str, KeyLimits] = {}
        self.weights: dict[str, float] = {}
        self.admin_names: set[str] = set()
        for entry in entries:
            self._add(entry)
        for entry in admin_entries:
            self.admin_names.add(self._add(entry))

    def _add(self, entry: str | ApiKey) -> str:
        """Returns the name. Raises ConfigError."""
        api_key = _split(entry) if isinstance(entry, str) else entry
        name = api_key.name
        _check_key(name, api_key.key)
        api_key.limits.check(name)
        if not 0.0 < api_key.weight < math.inf:
            raise ConfigError(
                f"the weight of the API key {name} is {api_key.weight:g}, it must be above 0"
            )
        digest = _digest(api_key.key.encode())
        if self.digests.get(name) == digest:
            raise ConfigError(f"the API key {name} is given twice")
        if name in self.digests:
            raise ConfigError(f"two API keys have the name {name}; give each its own")
        if digest in self.digests.values():
            raise ConfigError(f"the API key of {name} has another name already")
        self.digests[name] = digest
        self.ranges[name] = api_key.priorities
        self.weights[name] = api_key.weight
        if api_key.limits != KeyLimits():
            self.limits[name] = api_key.limits
        return name


Entries = tuple[Sequence[str | ApiKey], Sequence[str]]  # of keys, and of admin keys


class ApiKeys:
    """Named keys; without keys, every client may call.

    Each of `entries` is an `ApiKey`, or the text `KEY`, `NAME=KEY` or `NAME[LOW..HIGH]=KEY`, where
    LOW and HIGH are the range of priorities. A key without a name is named by its digest, so that
    it keeps its name, and what is stored under it, when others come and go. The keys of
    `admin_entries` are keys like the others that may also call the operator's routes.

    `read` gives the entries for `reload`; without it there is nothing to read again.
    """

    def __init__(
        self,
        entries: Iterable[str | ApiKey] = (),
        admin_entries: Iterable[str] = (),
        read: Callable[[], Entries] | None = None,
    ) -> None:
        self._known = _KeyTable(entries, admin_entries)
        self._read = read
        self._followers: list[Callable[[Mapping[str, KeyLimits]], None]] = []

    def __bool__(self) -> bool:
        return bool(self._known.digests)

    def reload(self, check: Callable[[Mapping[str, KeyLimits]], None]) -> None:
        """Take the keys as they are now; requests that run continue.

        Raises:
            ConfigError: They cannot be read, `check` refuses their limits, or none would be left,
                which would open the server. The keys are then as before.
        """
        if self._read is None:
            return
        known = _KeyTable(*self._read())
        if self and not known.digests:
            raise ConfigError("no key is left, and the server would be open")
        check(known.limits)
        self._known = known
        for follower in self._followers:
            follower(known.limits)

    def follow(self, follower: Callable[[Mapping[str, KeyLimits]], None]) -> None:
        """Call it with the limits whenever they have changed."""
        self._followers.append(follower)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the keys."""
        return tuple(self._known.digests)

    @property
    def limits(self) -> Mapping[str, KeyLimits]:
        """The limits of the keys that have some, by name."""
        return self._known.limits

    def weight_of(self, name: str) -> float:
        """The weight of the key `name`; "" is a client of a server without keys."""
        return self._known.weights.get(name, 1.0)

    def priorities_of(self, name: str) -> PriorityRange:
        """The priorities of the key `name`; "" is a client of a server without keys."""
        return self._known.ranges.get(name, PriorityRange())

    @property
    def priorities(self) -> PriorityRange:
        """The range from the lowest to the highest priority that any client may have."""
        ranges = self._known.ranges.values() or (PriorityRange(),)
        return PriorityRange(
            min(of_key.low for of_key in ranges), max(of_key.high for of_key in ranges)
        )

    def is_admin(self, name: str) -> bool:
        """Whether the key `name` may call the operator's routes."""
        return name in self._known.admin_names

    def owner(self, presented: Sequence[bytes]) -> str | None:
        """The name of the first known key in `presented`, or None."""
        found = None
        for key in presented:
            digest = _digest(key)
            for name, known in self._known.digests.items():
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


def _split(entry: str) -> ApiKey:
    """A line of text. `=` at a key's end is padding, so `abc==` has no name."""
    named = _NAMED.fullmatch(entry)
    if named is None:
        return ApiKey(f"key-{_digest(entry.encode()).hex()[:_NAME_DIGITS]}", entry)
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
