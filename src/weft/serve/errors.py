"""Errors of the server, and their bodies, which have the form of OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from weft.errors import UserError, describe_exception

logger = logging.getLogger("weft.serve")
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
TYPE_NAMES = {  # of the tags that pydantic gives to the types of a key; others are not simple
    "str": "a string",
    "list[str]": "a list of strings",
    "list[int]": "a list of integers",
    "list[list[int]]": "a list of lists of integers",
}
CODES = {404: "unknown_url", 405: "method_not_allowed"}  # of errors that Starlette raises


class ErrorDetail(BaseModel):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error that a request is answered with.

    Args:
        status: status of the HTTP response.
        code: name of the error, for programs.
        message: what is wrong and what to do about it, in one line.
        param: the parameter that is wrong, such as "messages.0.role", or None.
        headers: further headers of the response.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(status, message, headers)
        self.status, self.code, self.message, self.param = status, code, message, param

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def as_api_error(error: BaseException, body: BaseModel | None = None) -> ApiError:
    """Returns the error with which a request is answered. An error that the client did not cause is logged.

    Args:
        error: the exception that ended the request.
        body: the request, one of whose keys the error can name. Its attribute `renamed`, if any, maps names of keys
            that errors contain to the names in the request.
    """
    if isinstance(error, UserError):
        error = ApiError(400, "invalid_value", error.what, None if body is None else _param(error.what, body))
    if isinstance(error, ApiError):
        for old, new in getattr(body, "renamed", {}).items():
            error.message = error.message.replace(old, new)
            error.param = new if error.param == old else error.param
        return error
    logger.error("a request failed: %s", describe_exception(error), exc_info=error)
    return ApiError(500, "internal_error", "the server failed to answer this request; its log has the cause")


def _param(what: str, body: BaseModel) -> str | None:
    """Returns the key of a request to which a message of the engine or of a chat template belongs, or None."""
    fields, first = type(body).model_fields, what.split()[0]
    if first in fields:
        return first
    prompt = next((name for name in ("prompt", "input") if name in fields), "messages")
    constraint = "tools" if getattr(body, "tools", None) else "response_format"
    words = {"prompt": prompt, "template": "messages", "json_schema": constraint}
    return next((name for word, name in words.items() if word in what), None)


def handle_errors(app: FastAPI) -> None:
    """Makes an application answer all errors with a body in the form of OpenAI's API."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response

    async def answer_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        code = CODES.get(error.status_code, "invalid_request")
        message = {404: "there is no such path; see /openapi.json", 405: "this path does not support the method"}
        what = message.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, code, what, headers=dict(error.headers or {})).response

    async def answer_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid(error.errors(), error.body).response

    app.add_exception_handler(ApiError, answer)
    app.add_exception_handler(UserError, answer)
    app.add_exception_handler(Exception, answer)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_invalid)


def _invalid(problems: Sequence[dict[str, Any]], body: Any) -> ApiError:
    """Returns the error of a body that does not have the form of the endpoint's request.

    Args:
        problems: what pydantic found. A value that can have several types has a problem for each of them.
        body: the body.
    """
    # Of the problems of the first key, the one that says most: a value of the right type, deep in the body.
    first = [problem for problem in problems if problem["loc"][:2] == problems[0]["loc"][:2]]
    problem = max(first, key=lambda one: (not one["type"].endswith("_type"), len(_place(one, body)[0])))
    kind, (names, shared) = problem["type"], _place(problem, body)
    several = kind.endswith("_type") and len(shared) < len(problem["loc"]) - 1
    param = ".".join(shared if several else names) or None
    if kind == "json_invalid":
        return ApiError(400, "invalid_json", "the body is not valid JSON in UTF-8; correct it")
    if kind == "extra_forbidden":
        what = f"the server has no parameter {param!r}; remove it, or see /openapi.json for the parameters"
        return ApiError(400, "unknown_parameter", what, param)
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        param = f"{param}.type"
    if kind in ("missing", "union_tag_not_found"):
        if param is None:
            return ApiError(400, "missing_body", "the request has no body; send a JSON object")
        return ApiError(400, "missing_required_parameter", f"{param!r} is missing; set it", param)
    why = str(problem["msg"]).removeprefix("Value error, ")
    if param is None:
        return ApiError(400, "invalid_value", "the body is not a JSON object; send one")
    if kind == "union_tag_invalid":
        tag, known = problem["ctx"]["tag"], problem["ctx"]["expected_tags"]
        return ApiError(400, "invalid_value", f"{param!r} is {tag!r}; use one of {known}", param)
    if several:
        types = dict.fromkeys(TYPE_NAMES.get(tag) for one in first for tag in one["loc"][len(shared) + 1 :][:1])
        why = "it has none of the supported types"
        why += ", which /openapi.json lists" if None in types else f": {', '.join(map(str, types))}"
    return ApiError(400, "invalid_value", f"{param!r} is invalid: {why[:1].lower()}{why[1:]}; correct it", param)


def _place(problem: dict[str, Any], body: Any) -> tuple[list[str], list[str]]:
    """Returns the keys that lead to a problem; and those before the first type that pydantic inserts into its place."""
    names: list[str] = []
    shared: list[str] | None = None
    _, *place = problem["loc"]
    for index, part in enumerate(place):
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and part in range(len(body))):
            body = body[part]
        elif index < len(place) - 1 or problem["type"] != "missing":
            shared = [*names] if shared is None else shared
            continue
        names.append(str(part))
    return names, names if shared is None else shared
