"""Idle connections: uvicorn waits for the end of a request's head forever, and may run out of open files."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MOST = 400
"""Connections at once; most systems let a process open 1,024 files."""


class IdleConnectionLimit(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's own protocol, except that a new connection beyond `MOST` closes those that have no request in
    progress."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Accept a connection as uvicorn does, and close idle ones if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            for connection in self.connections - {self}:
                if connection.cycle is None or connection.cycle.response_complete:
                    connection.transport.abort()
