"""Connections of a listener that keep it waiting are closed, and those whose head does not end: uvicorn has no limit.

Without one for the time of a request, whoever opens as many connections as the listener may have and sends nothing
keeps all nodes out. Without one for the head, a single connection without a key fills the memory.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

REQUEST = 15.0
"""Seconds in which a connection must have sent its first or its next request, head and body."""
HEAD, FIELDS = 64 << 10, 100
"""Most bytes and fields of a request's head; a SuperNode's has about 1 KiB and 10 fields."""
RATE = 16 << 10
"""Bytes a second that a large body must arrive with, and a large answer be taken with, if it takes longer."""
CROWD = 900
"""Open connections from which on the oldest that sent no complete request are closed for new ones; uvicorn refuses
further ones at `gate.CONNECTIONS`."""


class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol for one connection, with a time limit for requests; answers may take as long as they do."""

    waiting: ClassVar[dict[Any, None]] = {}
    """Connections without a complete request, the oldest first."""
    _head = _fields = 0
    _headed = False
    """Bytes and fields of the head that is being read, and whether it has ended."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request, and make room if there are many connections."""
        super().connection_made(transport)
        # With TLS an answer waits in the transport below until the other side has taken it.
        self._wire = getattr(getattr(transport, "_ssl_protocol", None), "_transport", transport)
        self._timer: asyncio.TimerHandle | None = None
        self._await_request()
        while len(self.connections) > CROWD and self.waiting:
            next(iter(self.waiting))._close()

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
        """Take a field of a head; the parser answers 400 to what is raised here."""
        self._fields += 1
        if self._fields > FIELDS:
            raise ValueError(f"a request has at most {FIELDS} fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to read a body."""
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
        self.waiting[self] = None
        self._timer = self.loop.call_later(REQUEST, self._late)

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
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
        # asyncio says only later that the connection is lost, and until then more would be closed than need be.
        self.connections.discard(self)
        self.transport.abort()
