"""A directory that only its owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from quickstep.errors import ConfigError


def private_directory(path: Path, source: str, content: str) -> None:
    """Make a directory if it is not there. `source` is the sentence that names where the path comes
    from, `content` what others must not read or change.

    Raises:
        ConfigError: It is of another user, or open to others.
        OSError: It cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid():
        raise ConfigError(f"{source}, and {path} is of another user; give another one")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{source}, and others may read {path}, which holds {content}; run chmod 700 {path}"
        )
