"""Defines `JsonRoute`, the class of all routes."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request
from fastapi.routing import APIRoute

from weft.serve.errors import ApiError


class JsonRequest(Request):
    """A request whose body is parsed by orjson."""

    async def json(self) -> Any:
        # Refuses NaN, half surrogate pairs and deep nesting, which Python's parser accepts.
        return orjson.loads(await self.body())


class JsonRoute(APIRoute):
    """A route that accepts bodies of JSON only."""

    def get_route_handler(self):
        handler = super().get_route_handler()

        async def handle(request: Request):
            # Browsers ask before they send JSON to a server of another origin.
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method in ("POST", "PUT", "PATCH") and kind != "application/json":
                what = f"the body's type is {kind!r}; send JSON, with the header Content-Type: application/json"
                raise ApiError(415, "unsupported_media_type", what)
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
