"""Runs the web application until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.errors import UserError
from weft.observe.status import doing
from weft.processes import signal_handler
from weft.serve.errors import ApiError
from weft.serve.services import Services

AFTER_DRAIN = 5.0  # seconds in which clients can read the errors of requests that the drain timeout ended
AFTER_FORCE = 0.3  # seconds, as above, after a second Ctrl-C

MAX_HEADER = 2**16  # bytes

logger = logging.getLogger("weft.serve")


def open_socket(host: str, port: int) -> socket.socket:
    """Binds a socket. It does not accept connections yet.

    Raises:
        UserError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind, protocol)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        raise _unusable(host, port, error) from None
    return opened


def _unusable(host: str, port: int, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or str(error)
    return UserError(f"cannot listen on {host} port {port}: {why}; choose another --port (0: any) or --host")


class Connection(HttpToolsProtocol):
    """A connection that ends with the status 431 if the header of a request is larger than `MAX_HEADER`.

    Headers that arrive in one piece, which has at most 256 KiB, can be larger.
    """

    _in_header, _bytes = False, 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_header, self._bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_header = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        if self._in_header and self._bytes > MAX_HEADER:
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
            self.transport.close()


class Server(uvicorn.Server):
    """A server that ends requests in order: at the first signal it accepts no more, and at the second it ends at once.

    Args:
        app: the application, with `Services` in its state.
        drain_timeout: seconds that requests have to end after the first signal.
        ready: called when the server accepts connections.
        access_log: whether each request is logged.
    """

    def __init__(self, app: FastAPI, drain_timeout: float, ready: Callable[[], None], access_log: bool = True):
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=access_log,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=drain_timeout + AFTER_DRAIN,  # pyright: ignore[reportArgumentType]
        )
        super().__init__(config)
        self._services: Services = app.state.services
        self._drain_timeout, self._ready = drain_timeout, ready
        self._forced = asyncio.Event()
        self.failed = False

    def serve_until_signal(self, listener: socket.socket) -> int:
        """Serves until SIGINT, SIGTERM or SIGHUP. Returns the exit code: 1 if an engine failed.

        Raises:
            UserError: another process listens on the address.
        """
        host, port = listener.getsockname()[:2]
        try:
            listener.listen(self.config.backlog)
        except OSError as error:
            raise _unusable(host, port, error) from None
        with signal_handler(self.handle_exit, signal.SIGHUP):  # uvicorn handles SIGINT and SIGTERM
            self.run([listener])
        if self._forced.is_set() or any(model.worker.alive for model in self._services.models):
            # The end of the interpreter takes a second, and crashes if a thread is within a step of the engine.
            logging.shutdown()
            sys.stdout.flush()
            os._exit(int(self.failed))
        return int(self.failed)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._watches = [asyncio.ensure_future(self._watch(model)) for model in self._services.models]
        self._ready()

    async def _watch(self, model) -> None:
        """Ends the server when a model's engine fails: a supervisor can start it again."""
        await model.worker.failed.wait()
        self.failed = self.should_exit = True
        logger.critical("%s: %s; the server ends", model.name, model.worker.failure)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        error = ApiError(503, "server_shutting_down", "the server is shutting down; send the request again later")
        deadline = self._loop.call_later(self._drain_timeout, self._services.exchanges.abort, error)
        doing("answering the last requests", may_take=self._drain_timeout + 2 * AFTER_DRAIN)
        drained, forced = asyncio.ensure_future(super().shutdown(sockets)), asyncio.ensure_future(self._forced.wait())
        await asyncio.wait({drained, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            drained.cancel()
            await self._end_requests(error)
        for task in (deadline, forced, *self._watches):
            task.cancel()

    async def _end_requests(self, error: ApiError) -> None:
        """Ends all requests with an error, without waiting for clients and for the present step of engines."""
        self._services.exchanges.abort(error)
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=AFTER_FORCE)
        logging.getLogger("uvicorn.error").disabled = True  # uvicorn would log each cancelled task
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # pyright: ignore[reportAttributeAccessIssue]
        self._services.stop_timeout = 0.0
        await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Unlike uvicorn's, this method does not record the signal: the server's exit code is 0 after a signal.
        if self.should_exit and sig == signal.SIGINT:
            self._loop.call_soon_threadsafe(self._forced.set)
        self.should_exit = True
