"""Connections of a listener that keep it waiting are closed: uvicorn itself has no limit for the time of a request.

Without one, whoever opens as many connections as the listener may have and sends nothing keeps all nodes out.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

REQUEST = 15.0
"""Seconds in which a connection must have sent its first or its next request, head and body."""
RATE = 16 << 10
"""Bytes a second that a large request must arrive with, and a large answer be taken with, if it takes longer."""
CROWD = 900
"""Open connections from which on the oldest that sent no complete request are closed for new ones; uvicorn refuses
further ones at `gate.CONNECTIONS`."""


class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol for one connection, with a time limit for requests; answers may take as long as they do."""

    waiting: ClassVar[dict[Any, None]] = {}
    """Connections without a complete request, the oldest first."""

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
        self._received += len(data)
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._stop_waiting()

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
