"""Defines `Exchange`, the answer to a request, which ends when the client leaves or the time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.serve.errors import ApiError, as_api_error

LAST_WORDS = 1.0  # seconds that a slow client has to read the error that ends its answer


class Output:
    """Sends the body of a response: one JSON object, or server-sent events.

    Attributes:
        streams: whether events were sent.
        named: whether events have a name: their key `type`.
    """

    def __init__(self, send: Send):
        self._send, self.streams, self.named = send, False, False

    async def json(self, body: Any) -> None:
        """Sends the complete response: a JSON object."""
        data = orjson.dumps(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data})

    async def events(self, *data: Any, last: bool = False) -> None:
        """Sends server-sent events; the first call also sends the header of the response.

        Args:
            data: JSON objects, or texts, which are sent as they are.
            last: whether the response ends with these events.
        """
        if not self.streams:
            self.streams = True
            # Proxies such as nginx must not collect events.
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        lines = []
        for one in data:
            if self.named:
                lines.append(b"event: %s\n" % one.get("type", "error").encode())
            lines.append(b"data: %s\n\n" % (one.encode() if isinstance(one, str) else orjson.dumps(one)))
        await self._send({"type": "http.response.body", "body": b"".join(lines), "more_body": not last})


class Exchanges:
    """The exchanges of an application that have not ended.

    Args:
        timeout: maximum time of an exchange, in seconds.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._aborts: set[asyncio.Future[ApiError]] = set()

    def abort(self, error: ApiError) -> None:
        """Ends all exchanges with an error."""
        for future in self._aborts:
            if not future.done():
                future.set_result(error)

    def new(self, work: Callable[[Output], Awaitable[None]], body: BaseModel) -> Exchange:
        return Exchange(self, work, body)


class Exchange(Response):
    """A response that a coroutine sends. The coroutine is cancelled when the client leaves or the time is over.

    An error before the first event becomes the status and the body of the response; a later error, the last event.

    Args:
        exchanges: the exchanges of the application.
        work: the coroutine.
        body: the request.
    """

    def __init__(self, exchanges: Exchanges, work: Callable[[Output], Awaitable[None]], body: BaseModel):
        super().__init__()
        self._exchanges, self._work, self._body = exchanges, work, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        output, loop = Output(send), asyncio.get_running_loop()
        abort: asyncio.Future[ApiError] = loop.create_future()
        self._exchanges._aborts.add(abort)
        work, left = asyncio.ensure_future(self._work(output)), asyncio.ensure_future(_disconnection(receive))
        try:
            timeout = self._exchanges.timeout
            await asyncio.wait({work, left, abort}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                error = work.exception()
            else:
                work.cancel()
                await asyncio.wait({work})
                if left.done():
                    return
                what = f"the answer was not complete after {timeout:g} seconds; ask for fewer tokens"
                error = abort.result() if abort.done() else ApiError(504, "timeout", what)
        finally:
            self._exchanges._aborts.discard(abort)
            work.cancel()
            left.cancel()
        if error is None:
            return
        error = as_api_error(error, self._body)
        if not output.streams:
            raise error
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await output.events(error.body, last=True)


async def _disconnection(receive: Receive) -> None:
    """Returns when the client has left. The body of the request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
