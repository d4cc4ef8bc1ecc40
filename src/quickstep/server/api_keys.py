"""The keys that clients may call with, each with a name that logs and accounts may show.

Keys are kept and compared as digests, all of them every time, so that the time of an answer says
nothing about any of them. `cli.serve` gathers them from flags, a file and the environment.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from quickstep.errors import ConfigError

__all__ = ["ApiKeys", "read_key_file"]

_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.@-]{1,64})[=:](?P<key>.*[^=].*)", re.DOTALL)
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_SHARED_MODE = 0o077


class ApiKeys:
    """Named keys; no keys means that everybody may call.

    `given` holds `KEY` or `NAME=KEY` each; a key without a name is called by its place, `key-1`.
    """

    def __init__(self, given: Iterable[str] = ()) -> None:
        named: dict[str, bytes] = {}
        for place, entry in enumerate(given, 1):
            name, key = _split(entry, place)
            digest = _digest(key.encode())
            if name in named:
                raise ConfigError(f"two API keys have the name {name}; give each its own")
            if digest in named.values():
                raise ConfigError(f"the API key of {name} has another name already")
            named[name] = digest
        self._digests = tuple(named.items())

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def names(self) -> tuple[str, ...]:
        """Whom the keys belong to."""
        return tuple(name for name, _ in self._digests)

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
    """The entries of a file, one `NAME:KEY` or `NAME=KEY` a line; and whether others may read it.

    Empty lines and lines that begin with `#` say nothing.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        is_shared = bool(path.stat().st_mode & _SHARED_MODE)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error}") from None
    entries = [line.strip() for line in lines]
    return [entry for entry in entries if entry and not entry.startswith("#")], is_shared


def _split(entry: str, place: int) -> tuple[str, str]:
    """Name and key. `=` at a key's end is padding, so `abc==` has no name."""
    named = _NAMED.fullmatch(entry)
    name, key = (named.group("name"), named.group("key")) if named else (f"key-{place}", entry)
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"the API key of {name} is empty, too long or holds a blank; use up to 512 visible "
            "ASCII characters"
        )
    return name, key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
