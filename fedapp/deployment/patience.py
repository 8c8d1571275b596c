"""Limits of a listener for connections, for the time of a request and for the size of its head: uvicorn has none.

Without a limit for connections that holds before the TLS handshake, one machine that opens many and sends nothing takes
all descriptors and gigabytes of memory. Without one for the time of a request, it keeps all nodes out with as many
connections as the listener may have. Without one for the head, a single connection without a key fills the memory.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import logging
import resource
import socket
import time
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

REQUEST = 15.0
"""Seconds in which a connection must have sent its first or its next request, head and body."""
HEAD, FIELDS = 64 << 10, 100
"""Most bytes and fields of a request's head; a SuperNode's has about 1 KiB and 10 fields."""
RATE = 16 << 10
"""Bytes a second that a large body must arrive with, and a large answer be taken with, if it takes longer."""
MAX_CONNECTIONS, MAX_PER_ADDRESS = 900, 256
"""Open connections, of all and of one address, from which on the oldest that sent no complete request is closed for a
new one; uvicorn answers 503 at `gate.CONNECTIONS`."""
QUEUE, BATCH = 2048, 64
"""Connections that the system keeps until they are accepted, and how many are accepted before others get a turn."""
RECORD = 16 << 10
"""Bytes that are decrypted at once, the largest record of TLS; asyncio keeps 256 KiB for each connection."""


class LimitedListener(socket.socket):
    """A listening socket with limits for connections, which hold from the moment that they are accepted.

    Parameters
    ----------
    listener : the socket that this one replaces.   total, per_address : most open connections, of all addresses and
        of one.
    """

    def __init__(
        self, listener: socket.socket, total: int = MAX_CONNECTIONS, per_address: int = MAX_PER_ADDRESS
    ) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self.total, self.per_address = total, per_address
        self.open: collections.Counter[bytes] = collections.Counter()
        self.pending: dict[CountedConnection, None] = {}
        """Connections without a complete request, the oldest first."""
        self._exhausted = False

    def listen(self, backlog: int = 0) -> None:
        """Listen with a long queue; `backlog` is how many connections asyncio accepts at once."""
        super().listen(QUEUE)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and close the oldest pending one if there are too many.

        Raises
        ------
        OSError : there is none, or the system has no resources for it.
        """
        if self._exhausted:
            self._exhausted = False
            raise BlockingIOError  # asyncio pauses for a second, but asks again up to `BATCH` times before
        try:
            accepted, address = super().accept()
        except OSError as e:
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._exhausted = True
                for _ in range(BATCH):
                    self._close_oldest()
            raise
        connection = CountedConnection(self, accepted.detach(), _origin(address[0]))
        if self.open[connection.origin] > self.per_address:
            self._close_oldest(connection.origin)
        if self.open.total() > self.total:
            self._close_oldest()
        return connection, address

    def _close_oldest(self, origin: bytes | None = None) -> None:
        oldest = next((c for c in self.pending if origin in (None, c.origin)), None)
        if oldest is not None:
            oldest.disconnect()


class CountedConnection(socket.socket):
    """A connection of a :class:`LimitedListener`.

    It counts until it is closed. It is pending while no complete request has arrived.
    """

    def __init__(self, listener: LimitedListener, number: int, origin: bytes) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=number)
        self.listener, self.origin, self._counts = listener, origin, True
        listener.open[origin] += 1
        self.set_pending(True)

    def set_pending(self, pending: bool) -> None:
        """Note whether a complete request is still to come."""
        self.listener.pending.pop(self, None)
        if pending and self._counts:
            self.listener.pending[self] = None

    def disconnect(self) -> None:
        """End the connection; asyncio sees that and closes it, also during a handshake."""
        self._stop_counting()
        with contextlib.suppress(OSError):  # the other side was faster
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._stop_counting()
        super().close()

    def _stop_counting(self) -> None:
        if self._counts:
            self._counts = False
            self.listener.open[self.origin] -= 1
            if not self.listener.open[self.origin]:
                del self.listener.open[self.origin]
        self.set_pending(False)


def _origin(host: str) -> bytes:
    """Return the part of an address that its owner does not choose freely: of IPv6 the network of 64 bits."""
    if ":" in host:
        return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8]
    return host.encode()


def raise_limit() -> int:
    """Let this process open as many files as it may; return their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class TimeLimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol for one connection, with a time limit for requests; answers may take as long as they do."""

    _head = _fields = 0
    _headed = False
    """Bytes and fields of the head that is being read, and whether it has ended."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self.logger = _QUIET
        self._connection: CountedConnection = transport.get_extra_info("socket")._sock
        # With TLS an answer waits in the transport below until the other side has taken it.
        self._wire = getattr(getattr(transport, "_ssl_protocol", None), "_transport", transport)
        self._timer: asyncio.TimerHandle | None = None
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take further bytes of a request."""
        if self._headed:
            self._received += len(data)
        else:
            self._head += len(data)
        super().data_received(data)
        # Also while an answer is on its way, when no timer runs: the next head may follow at once.
        if not self._headed and self._head > HEAD:
            self._close()
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._stop_waiting()

    def on_message_begin(self) -> None:
        """Begin to read a head."""
        super().on_message_begin()
        # What was read with the end of the request before does not count; it is one read at most.
        self._head, self._fields, self._headed = 0, 0, False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of a head; the parser answers 400 to errors raised here."""
        self._fields += 1
        if self._fields > FIELDS:
            raise ValueError(f"a request has at most {FIELDS} fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to read a body; the parser answers 400 to errors raised here."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD:
            raise ValueError(f"the head of a request has at most {HEAD} bytes")
        self._headed = True
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._await_request()

    def _await_request(self) -> None:
        self._stop_waiting()
        self._since, self._received = time.monotonic(), 0
        self._unsent = self._wire.get_write_buffer_size()
        self._connection.set_pending(True)
        self._timer = self.loop.call_later(REQUEST, self._late)

    def _stop_waiting(self) -> None:
        self._connection.set_pending(False)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        taken = self._unsent - self._wire.get_write_buffer_size()
        if taken >= min(self._unsent, REQUEST * RATE) > 0:
            # The answer before is still on its way, or has just arrived.
            self._await_request()
            return
        left = REQUEST + self._received / RATE - (time.monotonic() - self._since)
        if left <= 0:
            self._close()
        else:
            self._timer = self.loop.call_later(left, self._late)

    def _close(self) -> None:
        self._stop_waiting()
        self.transport.abort()


_QUIET = logging.getLogger("fedapp.requests")
_QUIET.setLevel(logging.ERROR)  # a warning for each request that cannot be read would let strangers fill the log
