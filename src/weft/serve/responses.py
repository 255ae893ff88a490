"""The endpoint `/v1/responses`: its requests as chat completions, and its answers as items."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from weft.generation.stream import Piece
from weft.serve.choices import Choice
from weft.serve.completions import answer, prepare_chat
from weft.serve.errors import ApiError
from weft.serve.json_route import JsonRoute
from weft.serve.logprobs import chat_logprobs
from weft.serve.replies import Job, Reply
from weft.serve.response_schemas import Item, ItemText, ResponseCall, ResponseMessage, ResponseRequest
from weft.serve.schemas import ChatRequest
from weft.serve.served_model import ServedModel
from weft.serve.services import services_of
from weft.serve.tool_calls import Delta

router = APIRouter(tags=["generation"], route_class=JsonRoute)


@router.post("/v1/responses")
async def create_response(request: Request, body: ResponseRequest) -> Response:
    """Answers texts or items. Responses are not stored: send earlier items again."""
    services = services_of(request)
    model, adapter = services.models.find(body.model)
    chat = _as_chat(body)
    work = partial(answer, services, model, adapter, chat, 1, partial(prepare_chat, services, model, adapter, chat))
    return services.exchanges.new(partial(work, partial(ResponseReply, body)), body)


def _as_chat(body: ResponseRequest) -> ChatRequest:
    """Converts a request to one of chat completions.

    Raises:
        ApiError: a value is not supported.
    """
    if body.store or body.previous_response_id is not None:
        name = "store" if body.store else "previous_response_id"
        what = f"{name} is not supported, because responses are not stored; send the earlier items as input"
        raise ApiError(400, "unsupported_value", what, name)
    if not body.input:
        raise ApiError(400, "invalid_value", "input is empty; give a text or at least one item", "input")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for item in body.input:
            _add_item(messages, item)
    tools = [
        {"type": "function", "function": t.model_dump(exclude={"type"}, exclude_unset=True)} for t in body.tools or ()
    ]
    choice = body.tool_choice
    logprobs = body.include is not None and "message.output_text.logprobs" in body.include
    if body.top_logprobs and not logprobs:
        what = "top_logprobs needs include: ['message.output_text.logprobs']; set it"
        raise ApiError(400, "invalid_value", what, "top_logprobs")
    shared = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")
    return ChatRequest.model_validate(
        {
            **{name: getattr(body, name) for name in shared},
            "messages": messages,
            "max_completion_tokens": body.max_output_tokens,
            "tools": tools or None,
            "tool_choice": choice
            if choice is None or isinstance(choice, str)
            else {"type": "function", "function": {"name": choice.name}},
            "response_format": body.text and body.text.format and body.text.format.as_chat,
            "logprobs": logprobs,
            "top_logprobs": body.top_logprobs if logprobs else None,
        }
    )


def _add_item(messages: list[dict[str, Any]], item: Item) -> None:
    """Appends an item of the input to the messages of a chat."""
    if isinstance(item, ResponseMessage):
        messages.append({"role": item.role, "content": _text(item.content)})
    elif isinstance(item, ResponseCall):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        function = {"name": item.name, "arguments": item.arguments}
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})
    else:
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})


def _text(content: ItemText) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class ResponseReply(Reply):
    """The form of the answers of `/v1/responses`: a message, and calls of functions."""

    chat = named = True

    def __init__(self, body: ResponseRequest, model: ServedModel, name: str, job: Job):
        super().__init__(model, job, name, "resp", "response", "response")
        self._body, self._head["id"] = body, f"resp_{secrets.token_hex(24)}"
        self._parser = None if job.tools is None else job.tools.parser()
        self._output: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._numbers, self._logprobs, self._created = 0, list[Any](), int(time.time())

    def begin(self, index: int) -> list[Any]:
        for kind in ("created", "in_progress"):
            self._emit(f"response.{kind}", response=self._response("in_progress"))
        return self._take()

    def delta(self, index: int, choice: Choice, text: str, pieces: Sequence[Piece]) -> list[Any]:
        if self.job.sampling.logprobs is not None:
            self._logprobs += chat_logprobs(self.model.tokenizer, self.job.content(pieces))
        deltas = [Delta(text)] if text else []
        if self._parser is not None:
            deltas = self._parser.feed(text) + (self._parser.finish() if choice.finish else [])
        for delta in deltas:
            self._add(delta)
        if choice.finish:
            if not self._output:
                self._open({"type": "message", "role": "assistant", "content": []}, "msg")
            self._close("completed" if choice.finish == "stop" else "incomplete")
        return self._take()

    def end(self, choices: Sequence[Choice], usage: dict[str, int]) -> list[Any]:
        response = self._response(self._status(choices), usage)
        self._emit(f"response.{response['status']}", response=response)
        return self._take()

    def body(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        self.delta(0, choices[0], choices[0].text, choices[0].pieces)
        return self._response(self._status(choices), usage)

    def _status(self, choices: Sequence[Choice]) -> str:
        return "completed" if choices[0].finish == "stop" else "incomplete"

    def _take(self) -> list[Any]:
        taken, self._events = self._events, []
        return taken

    def _emit(self, kind: str, **keys: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._numbers, **keys})
        self._numbers += 1

    def _add(self, delta: Delta) -> None:
        """Adds a part of the answer to the last item, or to a new one."""
        kind = "message" if delta.index is None else "function_call"
        if delta.id is not None or not self._output or self._output[-1]["type"] != kind:
            self._close("completed")
            if kind == "message":
                self._open({"type": kind, "role": "assistant", "content": []}, "msg")
            else:
                self._open({"type": kind, "call_id": delta.id, "name": delta.name, "arguments": ""}, "fc")
        item, place = self._output[-1], self._place()
        if kind == "message":
            item["content"][0]["text"] += delta.content
            new, self._logprobs = self._logprobs, []
            item["content"][0]["logprobs"] += new
            self._emit("response.output_text.delta", **place, content_index=0, delta=delta.content, logprobs=new)
        elif delta.arguments:
            item["arguments"] += delta.arguments
            self._emit("response.function_call_arguments.delta", **place, delta=delta.arguments)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _open(self, item: dict[str, Any], kind: str) -> None:
        item |= {"id": f"{kind}_{secrets.token_hex(24)}", "status": "in_progress"}
        self._output.append(item)
        # The event has the item as it is now, because later events change it.
        self._emit("response.output_item.added", output_index=len(self._output) - 1, item=dict(item, **_content(item)))
        if item["type"] == "message":
            item["content"].append(_text_part())
            self._emit("response.content_part.added", **self._place(), content_index=0, part=_text_part())

    def _close(self, status: str) -> None:
        """Completes the last item, if it is open."""
        if not self._output or self._output[-1]["status"] != "in_progress":
            return
        item, place = self._output[-1], self._place()
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            done = {"text": part["text"], "logprobs": part["logprobs"]}
            self._emit("response.output_text.done", **place, content_index=0, **done)
            self._emit("response.content_part.done", **place, content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            self._emit("response.function_call_arguments.done", **place, **done)
        self._emit("response.output_item.done", output_index=place["output_index"], item=item)

    def _response(self, status: str, usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Returns the response object."""
        body = self._body
        asked = body.model_dump(exclude_none=True, by_alias=True)
        counts = usage and {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._head["model"],
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": asked.get("text", {"format": {"type": "text"}}),
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools", []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": counts,
            "user": body.user,
        }


def _text_part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _content(item: dict[str, Any]) -> dict[str, Any]:
    return {"content": []} if item["type"] == "message" else {}
