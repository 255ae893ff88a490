"""Defines `Guard`, which refuses requests before an endpoint sees them, and sets security headers."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serve.errors import ApiError
from weft.serve.services import Settings

OPEN_PATHS = ("/", "/health", "/favicon.ico")  # paths that need no key
OPEN_FOLDER = "/page/"  # files of the page
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


class Guard:
    """Refuses requests without a key, for another host, or with a large body. Sets headers of responses.

    A HEAD request is answered as a GET request, without the body.

    Args:
        app: the application.
        settings: the limits.
    """

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        head = scope["method"] == "HEAD"
        if head:  # routes of FastAPI do not accept HEAD
            scope = {**scope, "method": "GET"}
        request_id = secrets.token_hex(8)
        received, started, complete = 0, False, False
        deadline = asyncio.get_running_loop().time() + self.settings.body_timeout

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            elif head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        async def receive_limited() -> Message:
            nonlocal received, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                what = f"the body did not arrive within {self.settings.body_timeout:g} seconds; send it faster"
                raise ApiError(408, "body_timeout", what, headers={"Connection": "close"}) from None
            complete = complete or not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self.settings.max_body:
                raise self._too_large()
            return message

        try:
            self._check(Headers(scope=scope), scope["path"])
            await self.app(scope, receive_limited, send_with_headers)
        except ApiError as error:
            if started:
                raise
            await error.response(scope, receive, send_with_headers)

    def _check(self, headers: Headers, path: str) -> None:
        """Raises ApiError if the header of a request is refused."""
        hosts = self.settings.hosts
        if hosts is not None and _host_name(headers.get("host", "")) not in hosts:
            what = "the header Host names another host than this server's"
            raise ApiError(403, "host_not_allowed", f"{what}; use its address, or start it with --allow-host")
        open_path = path in OPEN_PATHS or path.startswith(OPEN_FOLDER)
        keys = (*self.settings.api_keys, *self.settings.admin_keys)
        if self.settings.api_keys and not open_path and not has_key(headers, keys):
            what = "this server needs an API key; send it in the header Authorization: Bearer KEY"
            if "authorization" in headers:
                what = "the API key is not valid; send a valid key in the header Authorization: Bearer KEY"
            raise ApiError(401, "invalid_api_key", what, headers={"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.settings.max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        what = f"the body has more than {self.settings.max_body:,} bytes, the server's limit"
        close = {"Connection": "close"}  # the rest of the body is not read
        return ApiError(413, "request_too_large", f"{what}; send a smaller request", headers=close)


def has_key(headers: Headers, keys: Collection[str]) -> bool:
    """Returns whether a request has one of the keys. Takes the same time for each wrong key."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    given = given.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
    matches: Sequence[bool] = [hmac.compare_digest(given, key.encode()) for key in keys]
    return any(matches)


def _host_name(host: str) -> str:
    """Returns the name in a header Host, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
