"""Defines `Settings`, the limits of a server, and `Services`, what the endpoints share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request

from weft.serve.errors import ApiError
from weft.serve.exchange import Exchanges
from weft.serve.metrics import Metrics
from weft.serve.schemas import SamplingRequest
from weft.serve.served_model import ServedModel, ServedModels


@dataclass(frozen=True)
class Settings:
    """Limits of a server.

    Attributes:
        api_keys: keys, one of which each request must have, except for the page and `/health`; empty: none is needed.
        admin_keys: keys of requests that change what the server serves; empty: nobody can change it.
        adapter_folder: folder of the adapters that can be added while the server runs; None: none can.
        hosts: names that the header Host can have; None: any.
        cors_origins: origins of other web pages that may use the server.
        max_body: maximum size of a request's body, in bytes.
        max_prompt_tokens: maximum number of tokens of a prompt; None: only the model's window.
        max_new_tokens: maximum number of new tokens per choice; None: only the model's window.
        max_choices: maximum number of choices of a request, over all of its prompts.
        request_timeout: maximum time of a request, in seconds.
        body_timeout: maximum time in which the body of a request arrives, in seconds.
        log_prompts: whether prompts and answers are logged.
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    adapter_folder: str | None = None
    hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()
    max_body: int = 10 * 2**20
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    max_choices: int = 128
    request_timeout: float = 600.0
    body_timeout: float = 60.0
    log_prompts: bool = False


@dataclass
class Services:
    """What the endpoints of an application share.

    Attributes:
        models: the models.
        settings: the limits.
        exchanges: the requests that are being answered.
        metrics: the numbers of the server.
        admin_lock: held by the request that changes what is served.
        stop_timeout: seconds that the end of the server waits for the present step of each engine.
    """

    models: ServedModels
    settings: Settings
    exchanges: Exchanges = field(init=False)
    metrics: Metrics = field(init=False)
    admin_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    stop_timeout: float = 10.0

    def __post_init__(self):
        self.exchanges, self.metrics = Exchanges(self.settings.request_timeout), Metrics(self.models)

    def check_limits(self, body: SamplingRequest, prompts: int) -> None:
        """Raises ApiError if a request asks for more choices or tokens than the server allows."""
        if prompts * (body.n or 1) > self.settings.max_choices:
            what = f"{prompts * (body.n or 1)} choices were requested, but the limit is {self.settings.max_choices}"
            raise ApiError(400, "too_many_choices", f"{what}; send several requests", "n")
        for name in ("max_completion_tokens", "max_tokens"):
            wanted, limit = getattr(body, name, None), self.settings.max_new_tokens
            if wanted is not None and limit is not None and wanted > limit:
                what = f"{name} is {wanted:,}, but the server's limit is {limit:,}"
                raise ApiError(400, "too_many_tokens", f"{what}; lower it", name)

    def room(self, model: ServedModel, prompt: Sequence[int], param: str) -> int | None:
        """Returns the number of tokens that fit in the model's window after a prompt; None: any.

        Args:
            param: key of the request, for messages.

        Raises:
            ApiError: the prompt is too long.
        """
        self.check_prompt(prompt, param)
        return model.room(prompt, param)

    def check_prompt(self, prompt: Sequence[int], param: str) -> None:
        """Raises ApiError if a prompt has more tokens than the server allows."""
        limit = self.settings.max_prompt_tokens
        if limit is not None and len(prompt) > limit:
            what = f"the prompt has {len(prompt):,} tokens, but the server's limit is {limit:,}"
            raise ApiError(400, "context_length_exceeded", f"{what}; shorten the prompt", param)


def services_of(request: Request) -> Services:
    """Returns the services of the application that handles a request."""
    return request.app.state.services
