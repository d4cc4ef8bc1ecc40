"""Where Quickstep stores what it has learnt about this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path | None:
    """QUICKSTEP_CACHE_DIR, else `quickstep` in the user's cache directory (XDG).

    None if the variable is empty: nothing is stored then.
    """
    given = environ.get("QUICKSTEP_CACHE_DIR")
    if given is not None:
        return Path(given) if given else None
    user = environ.get("XDG_CACHE_HOME", "")  # the specification ignores relative paths
    try:
        return (Path(user) if user.startswith("/") else Path.home() / ".cache") / "quickstep"
    except RuntimeError:  # there is no home directory
        return None
