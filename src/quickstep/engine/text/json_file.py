"""The small JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quickstep.errors import ConfigError

__all__ = ["read_json"]


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file.

    Raises:
        ConfigError: The file is not a JSON object.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a JSON {type(content).__name__}, it must be an object")
    return content
