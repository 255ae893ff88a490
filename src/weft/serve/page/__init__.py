"""The chat page: `page_routes` returns the routes of its static files, which are in this folder."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# Scripts run from this server only, and nothing turns text into HTML or code.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
    # A new version of Weft may serve other files at the same addresses.
    "cache-control": "no-cache",
}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class _File(NamedTuple):
    content: bytes
    media_type: str
    tag: str  # for If-None-Match


def page_routes() -> list[Route]:
    """Returns the routes of the chat page: `/`, and `/page/NAME` for its other files."""
    return [_route("/" if name == "index.html" else f"/page/{name}", file) for name, file in _read_files().items()]


def _read_files() -> dict[str, _File]:
    found = {}
    for entry in files(__name__).iterdir():
        media_type = TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            found[entry.name] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


def _route(path: str, file: _File) -> Route:
    async def respond(request: Request) -> Response:
        headers = HEADERS | {"etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return Route(path, respond)
