"""Defines `ServedModel`, a model with its engine's thread, and `ServedModels`, which finds them by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from weft.data.tokenizers.tokenizer import Prompt, Tokenizer
from weft.errors import UserError
from weft.generation.chat_format import ChatFormat, ChatPrompt, Messages
from weft.generation.engine import Engine
from weft.generation.limits import longest_text
from weft.generation.settings import Sampling
from weft.serve.engine_worker import Busy, EngineFailure, EngineWorker, Generation
from weft.serve.errors import ApiError


@dataclass
class ServedAdapter:
    """An adapter of a served model.

    Attributes:
        name: name in requests, and in the engine.
        path: folder of the adapter.
        chat: chat format of the adapter, if it has one of its own.
        created: Unix time at which the adapter was added.
        requests: number of unfinished requests that use the adapter.
    """

    name: str
    path: str
    chat: ChatFormat | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    requests: int = 0


class ServedModel:
    """A model that answers requests.

    Args:
        name: name in requests.
        engine: engine with a tokenizer.
        chat: renders conversations; None: the model has no chat template.
        max_waiting: maximum number of sequences that wait beside those that run.
        sharded: see `EngineWorker`.

    Attributes:
        worker: thread of the engine.
        adapters: adapters, by name.
        created: Unix time at which the model was loaded.
    """

    def __init__(
        self, name: str, engine: Engine, chat: ChatFormat | None, *, max_waiting: int = 256, sharded: bool = False
    ):
        assert engine.tokenizer is not None
        self.name, self.engine, self.chat = name, engine, chat
        self.tokenizer: Tokenizer = engine.tokenizer
        self.worker = EngineWorker(engine, engine.max_batch + max_waiting, sharded=sharded)
        self.adapters: dict[str, ServedAdapter] = {}
        self.created = int(time.time())
        self._check: asyncio.Task[None] | None = None
        self._frames: WeakKeyDictionary[ChatFormat, tuple[str, str, str]] = WeakKeyDictionary()

    @cached_property
    def window(self) -> int | None:
        """Maximum number of tokens of a prompt with its continuation, in the model and in the cache; None: any."""
        limits = [limit for limit in (longest_text(self.engine.model), self.engine.capacity) if limit is not None]
        return min(limits, default=None)

    def room(self, prompt: Sequence[int], param: str) -> int | None:
        """Returns the number of tokens that fit in the model's window after a prompt; None: any.

        Args:
            param: key of the request, for messages.

        Raises:
            ApiError: there is no room for a token.
        """
        if self.window is None:
            return None
        if len(prompt) >= self.window:
            # Clients such as LiteLLM recognize this error by OpenAI's words.
            what = f"This model's maximum context length is {self.window:,} tokens, and the prompt has {len(prompt):,}"
            raise ApiError(400, "context_length_exceeded", f"{what}; shorten the prompt", param)
        return self.window - len(prompt)

    def chat_format(self, adapter: ServedAdapter | None = None) -> ChatFormat:
        """Returns the chat format of the model, or of an adapter with its own.

        Raises:
            ApiError: there is no chat template.
        """
        chat = (adapter and adapter.chat) or self.chat
        if chat is None:
            what = (
                f"the model {self.name!r} has no chat template; use /v1/completions, or serve it with --chat-template"
            )
            raise ApiError(400, "no_chat_template", what, "model")
        return chat

    def chat_prompt(
        self,
        messages: Messages,
        tools: list[Any] | None = None,
        variables: dict[str, Any] | None = None,
        adapter: ServedAdapter | None = None,
    ) -> ChatPrompt:
        """Renders messages. Takes milliseconds, so it runs outside of the event loop.

        Raises:
            ApiError: the model has no chat template.
            UserError: the template cannot render the messages.
        """
        chat = self.chat_format(adapter)
        question: Messages = [{"role": "user", "content": "weft"}]
        if tools or variables:
            frame = chat.frame(question, tools, variables)
        else:
            frame = self._frames.get(chat) or self._frames.setdefault(chat, chat.frame(question))
        return chat.prompt(messages, frame, tools, variables)

    @asynccontextmanager
    async def slots(self, sequences: int, adapter: ServedAdapter | None = None) -> AsyncIterator[None]:
        """Context in which a request occupies places in the queue, and its adapter stays.

        Raises:
            ApiError: the queue is full or too small, or the adapter has been removed.
        """
        if adapter is not None and self.adapters.get(adapter.name) is not adapter:
            what = f"the adapter {adapter.name!r} has been removed; use another model"
            raise ApiError(404, "model_not_found", what, "model")
        if sequences > self.worker.max_open:
            what = f"{sequences} choices were requested, but the server's queue has {self.worker.max_open} places"
            raise ApiError(400, "too_many_choices", f"{what}; send several requests", "n")
        try:
            self.worker.reserve(sequences)
        except Busy:
            what = f"too many requests: {self.worker.open} texts are being generated or wait; try again later"
            raise ApiError(429, "queue_full", what, headers={"Retry-After": "1"}) from None
        if adapter is not None:
            adapter.requests += 1
        try:
            yield
        finally:
            self.worker.release(sequences)
            if adapter is not None:
                adapter.requests -= 1

    @asynccontextmanager
    async def generate(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        sampling: Sampling,
        *,
        stop_ids: frozenset[int] | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[Generation]:
        """Context in which a request is generated. See `Engine.submit_all`.

        Raises:
            ApiError: the engine failed, or refuses the request.
        """
        try:
            async with await self.worker.submit(prompts, sampling, stop_ids=stop_ids, adapter=adapter) as generation:
                yield generation
        except EngineFailure as error:
            raise engine_error(error) from None

    async def check(self, timeout: float = 30.0) -> str | None:
        """Asks the engine's thread for an answer. Returns what is wrong, or None.

        Calls at the same time wait for one answer, so that they do not queue up behind an engine that hangs.
        """
        if self._check is None or self._check.done():
            self._check = asyncio.ensure_future(self.worker.call(None))
        done, _ = await asyncio.wait({self._check}, timeout=timeout)
        if not done:
            return f"the engine has not responded for {timeout:g} seconds"
        error = self._check.exception()
        return None if error is None else str(error)


def engine_error(error: EngineFailure) -> ApiError:
    """Returns the error of a request whose engine failed."""
    return ApiError(500, "engine_error", str(error))


class ServedModels:
    """The models of a server, by name. The first answers requests that name no model."""

    def __init__(self, models: Sequence[ServedModel]):
        self._models = list(models)
        check_names([model.name for model in models])

    def __iter__(self):
        return iter(self._models)

    def find(self, name: str | None) -> tuple[ServedModel, ServedAdapter | None]:
        """Returns the model and the adapter that a request names.

        Raises:
            ApiError: there is no such model.
        """
        if name is None:
            return self._models[0], None
        for model in self._models:
            if name == model.name or name in model.adapters:
                return model, model.adapters.get(name)
        raise ApiError(
            404, "model_not_found", f"there is no model {name!r}; use one of {', '.join(self.names)}", "model"
        )

    @property
    def names(self) -> list[str]:
        """Names of the models and adapters."""
        return [name for model in self._models for name in (model.name, *model.adapters)]


def check_names(names: Sequence[str]) -> None:
    """Raises UserError if two models have the same name."""
    if double := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two models are named {min(double)!r}; give other names as NAME=PATH")
