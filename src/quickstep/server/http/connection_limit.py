"""The limit of open connections; one object for all connections of a server.

Addresses share it (`core.shares`), since a connection has no key until its first request. A proxy
is one address: it can have all connections but those that are kept for addresses without any.
"""

from __future__ import annotations

import asyncio
import logging
from ipaddress import IPv6Address, ip_network

from quickstep.core.shares import NoRoom, Shares
from quickstep.errors import RequestError

_LOG = logging.getLogger("quickstep.server")
_LOG_EVERY_S = 10.0
_MAX_ANSWERED = 256
_NETWORK_BITS = 64  # of an IPv6 address: what one customer of a provider has


def address_of(transport: asyncio.BaseTransport) -> str:
    """Which client a connection counts for; "" if it has no address, as that of a Unix socket."""
    peer = transport.get_extra_info("peername")
    return client_of_host(str(peer[0]) if isinstance(peer, tuple) and peer else "")


def client_of_host(host: str) -> str:
    """What one client has of the addresses: an IPv4 address, or the /64 of an IPv6 address."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    if address.ipv4_mapped is not None:  # of a socket for both
        return str(address.ipv4_mapped)
    return str(ip_network((address, _NETWORK_BITS), strict=False))


class ConnectionLimit:
    """Counts connections from the moment they are accepted, those before a TLS handshake too."""

    def __init__(self, max_connections: int) -> None:
        self._shares = Shares(max_connections)
        self._num_answered = 0  # open ones that get a refusal as their response
        self._num_refused = 0
        self._logged_s: dict[str, float] = {}

    def enter(self, address: str, now: float) -> None:
        """Count a connection; logs refusals, each kind at most every ten seconds.

        Raises:
            RequestError: It is one too many, of all or of its address.
        """
        try:
            self._shares.take(address)
        except NoRoom as refusal:
            self._num_refused += 1
            raise self._refused(address, refusal, now) from None

    def leave(self, address: str) -> None:
        """A connection that was counted is closed."""
        self._shares.give_back(address)

    def begin_answer(self) -> bool:
        """Whether a refused connection may stay for its response; then call `end_answer`."""
        if self._num_answered == _MAX_ANSWERED:
            return False
        self._num_answered += 1
        return True

    def end_answer(self) -> None:
        """A refused connection is closed."""
        self._num_answered -= 1

    def _refused(self, address: str, refusal: NoRoom, now: float) -> RequestError:
        if refusal.owner:
            what = f"{refusal.num_held} connections of your address are open, its share"
            whose = "the address %s has its share of --max-connections"
        else:
            what = f"{refusal.num_held} connections are open, which is the limit"
            whose = (
                f"{refusal.num_held} are open, which is --max-connections; the last one is of %s"
            )
        if self.report(now, f"refused %d connections: {whose}", self._num_refused, address):
            self._num_refused = 0
        return RequestError(
            f"{what}; close some, or try again later", status=503, code="too_many_connections"
        )

    def report(self, now: float, text: str, *values: object) -> bool:
        """Log a warning, each at most every ten seconds. Returns whether it was logged."""
        if now - self._logged_s.get(text, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        self._logged_s[text] = now
        _LOG.warning(text, *values)
        return True
