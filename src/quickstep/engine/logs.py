"""The log that both processes write to stderr: lines of text, or one JSON object per line.

`install` is called once in each process, by the command and by the engine's service.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

import msgspec

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogSetup(msgspec.Struct, frozen=True):
    """The level and the format of the log.

    Attributes:
        level: The lowest level that is written, a number of `logging`.
        format: A format of `logging`, for lines of text.
        as_json: One JSON object per line instead.
    """

    level: int = logging.WARNING
    format: str = _TEXT
    as_json: bool = False


class JsonLines(logging.Formatter):
    """A record as one JSON object: time (UTC), level, logger, process, message, error."""

    def format(self, record: logging.LogRecord) -> str:
        """The object's text, on one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def install(setup: LogSetup) -> None:
    """Configure this process's log as in `setup`, unless it has been configured already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if setup.as_json else logging.Formatter(setup.format))
    logging.basicConfig(level=setup.level, handlers=[handler])
