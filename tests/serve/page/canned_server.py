"""A server of the real page whose answers a test chooses, in a thread of this process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from weft.serve.page import page_routes

MODELS = [{"id": "base", "parent": None}, {"id": "poet", "parent": "base"}, {"id": "other", "parent": None}]


class CannedServer:
    """What the server answers and has been asked.

    Attributes:
        answer: returns, for the body of a request, the parts of a text or a response; a part can also be a dict, which
            is sent as an event of its own.
        pause: seconds between two parts.
        bodies: the requests for answers.
        headers: their headers.
        left: number of clients that did not wait for the end of an answer.
        key: the API key that is needed, or None.
    """

    def __init__(self):
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: ["Sure", ": *", "hello", "*."]
        self.pause = 0.0
        self.models = list(MODELS)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.left = 0
        self.key: str | None = None
        self.url = ""

    def application(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.router.routes.extend(page_routes())

        def refusal(request: Request) -> JSONResponse | None:
            if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
                return None
            return error_response(401, "this server needs an API key", "invalid_api_key")

        @app.get("/v1/models")
        async def models(request: Request):
            return refusal(request) or {"object": "list", "data": self.models}

        @app.post("/v1/chat/completions")
        async def chat(request: Request):
            if refused := refusal(request):
                return refused
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            made = self.answer(body)
            return made if isinstance(made, JSONResponse) else StreamingResponse(self._events(made), 200, EVENTS)

        return app

    async def _events(self, parts: Iterable[str | dict[str, Any]]):
        count = 0
        try:
            yield event(delta={"role": "assistant", "content": ""})
            for part in parts:
                count += 1
                yield f"data: {json.dumps(part)}\r\n\r\n" if isinstance(part, dict) else event(delta={"content": part})
                if isinstance(part, dict) and part.get("error"):
                    return
                await asyncio.sleep(self.pause)
            yield ": a comment\n\n" + event(delta={}, finish_reason="stop")
            usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise


EVENTS = {"content-type": "text/event-stream"}


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'finish_reason': None, **choice}]})}\n\n"


def error_response(status: int, message: str, code: str, **headers: str) -> JSONResponse:
    body = {"error": {"message": message, "type": "error", "param": None, "code": code}}
    return JSONResponse(body, status, headers)


@contextmanager
def running(app: FastAPI):
    """Runs an application on a free port, in a thread, and yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join(10)
