"""Reads server-sent events, and sends requests whose client can leave."""

import asyncio
import json
import threading


def events(response) -> list:
    """The data of a response's server-sent events, without the `[DONE]` with which they must end."""
    *data, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(one) for one in data]


class Caller:
    """A client that can leave at any time: sends one POST request to an ASGI application."""

    def __init__(self, client, path, body):
        self._app, self._left, self.received = client._transport.app, asyncio.Event(), []
        data = json.dumps(body).encode()
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        self._scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80), "asgi": {"version": "3.0"},
        }  # fmt: skip
        self._messages = [{"type": "http.request", "body": data, "more_body": False}]
        self.task = asyncio.create_task(self._app(self._scope, self._receive, self._send))

    async def _receive(self):
        if self._messages:
            return self._messages.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.received.append(message)

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.received).decode()

    async def leave(self):
        self._left.set()
        await self.task


class Gate:
    """Lets an engine run only as many steps as the test allows."""

    def __init__(self, engine):
        self._steps, self._step, self._all = threading.Semaphore(0), engine.step, False
        engine.step = self.step

    def step(self):
        if not self._all:
            self._steps.acquire()
        return self._step()

    def allow(self, steps):
        self._steps.release(steps)

    def open(self):
        self._all = True
        self._steps.release(1)


async def until(condition):
    """Waits until a condition holds. The test's time limit ends the wait."""
    while not condition():
        await asyncio.sleep(0.005)
