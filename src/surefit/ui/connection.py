"""Connections that never ask: uvicorn waits for the end of a request's head for ever, and may run out of files."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MOST = 400
"""Connections at once; most systems let a process open 1,024 files."""


class IdleConnectionLimit(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's own protocol, but that beyond `MOST` a new connection ends those that have no request under way."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """As uvicorn does it, with room for the next one."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            for other in self.connections - {self}:
                if other.cycle is None or other.cycle.response_complete:
                    other.transport.abort()
