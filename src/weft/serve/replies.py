"""Defines `Job`, a prepared request, and the forms of answers of completions and chat completions."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import weft
from weft.data.tokenizers.tokenizer import Prompt
from weft.generation.settings import Sampling
from weft.generation.stream import Piece
from weft.serve.choices import Choice
from weft.serve.logprobs import CompletionLogprobs, chat_logprobs, token_bytes
from weft.serve.served_model import ServedModel
from weft.serve.tool_calls import Delta, ToolCallParser, join_deltas
from weft.serve.tools import ToolUse


@dataclass
class Job:
    """A prepared request.

    Attributes:
        prompts: the prompts.
        sampling: the settings.
        stop_ids: tokens that end a choice.
        leads: for each prompt, the text that its choices do not contain (see `Choice`).
        echoes: for each prompt, the text with which its choices begin.
        tools: the tools that choices can call, or None.
        silent: whether the choices have no new tokens.
    """

    prompts: Sequence[Prompt | list[int]]
    sampling: Sampling
    stop_ids: frozenset[int]
    leads: Sequence[str]
    echoes: Sequence[str] = ()
    tools: ToolUse | None = None
    silent: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids if isinstance(prompt, Prompt) else prompt) for prompt in self.prompts)

    def choices(self, *, whole_characters: bool) -> list[Choice]:
        """Returns an empty choice for each continuation."""
        return [Choice(lead, whole_characters=whole_characters) for lead in self.leads for _ in range(self.sampling.n)]

    def content(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Returns the pieces of the text: without the token that ended the text, and the end of a cancelled text."""
        return [p for p in pieces if p.token is not None and (p.finish != "stop" or p.token not in self.stop_ids)]


class Reply:
    """The form of an endpoint's answers.

    Args:
        model: the model.
        job: the request.
        name: name of the model in the request.
        kind: beginning of the answer's id.
        object: type of the answer, such as "text_completion".
        chunk: type of each event of a stream.

    Attributes:
        wants_usage: whether a stream ends with the numbers of tokens.
        chat: whether the answers are messages of a chat.
        named: whether the name of each event is its key `type`.
    """

    wants_usage, chat, named = False, False, False

    def __init__(self, model: ServedModel, job: Job, name: str, kind: str, object: str, chunk: str):
        self.model, self.job = model, job
        self._head = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}
        self._head["system_fingerprint"] = f"weft-{weft.__version__}"
        self._object, self._chunk = object, chunk

    def body(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """Returns a complete answer."""
        found = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return {**self._head, "object": self._object, "choices": found, "usage": usage}

    def begin(self, index: int) -> list[Any]:
        """Returns the first events of a choice."""
        return []

    def delta(self, index: int, choice: Choice, text: str, pieces: Sequence[Piece]) -> list[Any]:
        """Returns the events for new pieces of a choice."""
        raise NotImplementedError

    def end(self, choices: Sequence[Choice], usage: dict[str, int]) -> list[Any]:
        """Returns the last events."""
        return [*([self._event([], usage=usage)] if self.wants_usage else []), "[DONE]"]

    def _event(self, choices: list[dict], **more: Any) -> dict[str, Any]:
        every = {"usage": None} if self.wants_usage else {}
        return {**self._head, "object": self._chunk, "choices": choices, **every, **more}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Returns a complete choice."""
        raise NotImplementedError


class CompletionReply(Reply):
    """The form of the answers of `/v1/completions`."""

    def __init__(self, model: ServedModel, name: str, job: Job):
        super().__init__(model, job, name, "cmpl", "text_completion", "text_completion")
        self._converters: dict[int, CompletionLogprobs] = {}

    def begin(self, index: int) -> list[Any]:
        echo = self._echo(index)
        # The first new token brings the log-probabilities of the prompt.
        return [self._part(index, echo, None, None)] if echo and not self.job.sampling.prompt_logprobs else []

    def delta(self, index: int, choice: Choice, text: str, pieces: Sequence[Piece]) -> list[Any]:
        logprobs = self._logprobs(index, pieces)
        if any(piece.prompt for piece in pieces):
            text = self._echo(index) + text
        return [self._part(index, text, logprobs, choice.finish)] if text or logprobs or choice.finish else []

    def _part(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        return self._event([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}])

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text, logprobs = self._echo(index) + choice.text, self._logprobs(index, choice.pieces)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}

    def _echo(self, index: int) -> str:
        return self.job.echoes[index // self.job.sampling.n] if self.job.echoes else ""

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self.job.sampling.logprobs is None:
            return None
        prompt = [token for piece in pieces for token in piece.prompt]
        if index not in self._converters:
            echo, tokenizer = self._echo(index), self.model.tokenizer
            # The text that is echoed lacks a token such as `<s>`, with which the prompt begins.
            scored = b"".join(token_bytes(tokenizer, token.token) for token in prompt if token.token is not None)
            offset = len(echo) - len(scored.decode(errors="replace"))
            self._converters[index] = CompletionLogprobs(tokenizer, offset)
        return self._converters[index].convert([*prompt, *self.job.content(pieces)])


class ChatReply(Reply):
    """The form of the answers of `/v1/chat/completions`."""

    chat = True

    def __init__(self, model: ServedModel, name: str, job: Job):
        super().__init__(model, job, name, "chatcmpl", "chat.completion", "chat.completion.chunk")
        self._parsers: dict[int, ToolCallParser] = defaultdict(lambda: message_parser(job))

    def begin(self, index: int) -> list[Any]:
        return [self._part(index, {"role": "assistant", "content": "", "refusal": None})]

    def delta(self, index: int, choice: Choice, text: str, pieces: Sequence[Piece]) -> list[Any]:
        deltas: list[dict[str, Any]] = [{"content": text}] if text else []
        if self.job.tools is not None:
            parser = self._parsers[index]
            found = parser.feed(text) + (parser.finish() if choice.finish else [])
            deltas = [_chat_delta(delta) for delta in found]
        logprobs = self._logprobs(pieces)
        if not (deltas or logprobs or choice.finish):
            return []
        # A choice has one finish reason, and the log-probabilities of each token once.
        last = len(deltas) - 1
        parts = [
            self._part(index, delta, logprobs if i == 0 else None, self._finish(index, choice) if i >= last else None)
            for i, delta in enumerate(deltas or [{}])
        ]
        return parts

    def _finish(self, index: int, choice: Choice) -> str | None:
        called = self.job.tools is not None and self._parsers[index].calls
        return "tool_calls" if called and choice.finish == "stop" else choice.finish

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        if self.job.tools is not None:
            parser = self._parsers[index]
            content, calls = join_deltas(parser.feed(choice.text) + parser.finish())
            message["content"] = content or (None if calls else "")
            if calls:
                message["tool_calls"] = [_call(one.id, {"name": one.name, "arguments": one.arguments}) for one in calls]
        finish, logprobs = self._finish(index, choice), self._logprobs(choice.pieces)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _part(self, index: int, delta: dict, logprobs: Any = None, finish: Any = None) -> dict[str, Any]:
        return self._event([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}])

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self.job.sampling.logprobs is None:
            return None
        return {"content": chat_logprobs(self.model.tokenizer, self.job.content(pieces)), "refusal": None}


def message_parser(job: Job) -> ToolCallParser:
    """Returns a parser for the text of a choice of a request with tools."""
    assert job.tools is not None
    return job.tools.parser()


def _chat_delta(delta: Delta) -> dict[str, Any]:
    if delta.index is None:
        return {"content": delta.content}
    if delta.id is None:
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"tool_calls": [{"index": delta.index, **_call(delta.id, function)}]}


def _call(id: str, function: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": function}
