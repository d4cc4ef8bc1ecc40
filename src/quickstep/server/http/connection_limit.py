"""The limit of open connections; one object for all connections of a server."""

from __future__ import annotations

import logging
from collections.abc import Sized

from quickstep.errors import RequestError

__all__ = ["ConnectionLimit"]

_LOG = logging.getLogger("quickstep.server")
_LOG_EVERY_S = 10.0


class ConnectionLimit:
    """Counts connections from the moment they are accepted.

    Attributes:
        open: The connections that have an HTTP protocol.
        num_handshakes: Those whose TLS handshake has yet to end.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.open: Sized = ()
        self.num_handshakes = 0
        self._num_refused = 0
        self._logged_s: dict[str, float] = {}

    def num_over(self, num_more: int = 0) -> int:
        """How many connections there would be too many with `num_more`."""
        return len(self.open) + self.num_handshakes + num_more - self.max_connections

    def refused(self, now: float) -> RequestError:
        """The error for one connection too many; logged at most every ten seconds."""
        self._num_refused += 1
        text = (
            f"refused %d connections: {self.max_connections} are open, which is --max-connections"
        )
        if self.report(now, text, self._num_refused):
            self._num_refused = 0
        return RequestError(
            f"{self.max_connections} connections are open, which is the limit; try again later",
            status=503,
            code="too_many_connections",
        )

    def report(self, now: float, text: str, *values: object) -> bool:
        """Log a warning, each at most every ten seconds. Returns whether it was logged."""
        if now - self._logged_s.get(text, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        self._logged_s[text] = now
        _LOG.warning(text, *values)
        return True
