"""The endpoints `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from weft.data.conversations.messages import convert_messages, join_parts
from weft.data.conversations.template import ChatTemplate
from weft.data.sources.values import Unfit
from weft.data.tokenizers.tokenizer import Prompt
from weft.generation.constraints import new_constraint
from weft.generation.settings import Sampling
from weft.generation.stream import Piece
from weft.serve.choices import Choice
from weft.serve.errors import ApiError
from weft.serve.exchange import Output
from weft.serve.json_route import JsonRoute
from weft.serve.replies import ChatReply, CompletionReply, Job, Reply
from weft.serve.sampling import make_sampling
from weft.serve.schemas import ChatRequest, CompletionRequest, SamplingRequest, TokenizeRequest, list_of_prompts
from weft.serve.served_model import ServedAdapter, ServedModel
from weft.serve.services import Services, services_of
from weft.serve.template_names import check_names
from weft.serve.tools import plain_calls, prepare_tools, schema_of

SILENT: Any = {"token": None, "text": "", "finish": "length"}  # instead of the token that the engine generates
COMPLETION_TOKENS = 16  # default of `max_tokens` of completions, as in OpenAI's API
UNKNOWN_WINDOW = 4096  # default of new tokens of a chat with a model whose window is not known

logger = logging.getLogger("weft.serve")
router = APIRouter(tags=["generation"], route_class=JsonRoute)


@router.post("/v1/completions")
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continues texts."""
    services = services_of(request)
    model, adapter = services.models.find(body.model)
    many = list_of_prompts(body.prompt, "prompt")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "unsupported_value", "best_of is supported only with the value of n; remove it", "best_of")
    if body.max_tokens == 0 and not body.echo:
        what = "max_tokens is 0, so there is nothing to answer; set it to at least 1, or set echo"
        raise ApiError(400, "invalid_value", what, "max_tokens")
    work = partial(answer, services, model, adapter, body, len(many))
    prepare = partial(_prepare_completion, services, model, body, many)
    return services.exchanges.new(partial(work, prepare, CompletionReply), body)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answers the last message of a conversation."""
    services = services_of(request)
    model, adapter = services.models.find(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "invalid_value", "top_logprobs needs logprobs: true; set it", "top_logprobs")
    work = partial(answer, services, model, adapter, body, 1)
    prepare = partial(prepare_chat, services, model, adapter, body)
    return services.exchanges.new(partial(work, prepare, ChatReply), body)


def _prepare_completion(
    services: Services, model: ServedModel, body: CompletionRequest, given: Sequence[str | list[int]]
) -> Job:
    """Encodes the prompts of a completion. Runs outside of the event loop."""
    special, scored = body.add_special_tokens is not False, bool(body.echo) and body.logprobs is not None
    encode = partial(model.tokenizer.prompt, special=special, whole=scored)
    prompts = [encode(one) if isinstance(one, str) else one for one in given]
    ids = [prompt.ids if isinstance(prompt, Prompt) else prompt for prompt in prompts]
    rooms = [services.room(model, one, "prompt") for one in ids]
    wanted = COMPLETION_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    room = min((one for one in rooms if one is not None), default=wanted)
    sampling = make_sampling(body, min(wanted, room), logprobs=body.logprobs, prompt_logprobs=scored)
    _load_token_bytes(model, sampling)
    texts = [one if isinstance(one, str) else model.tokenizer.decode(one) if body.echo else "" for one in given]
    leads = [
        text[len(prompt.text) :] if isinstance(prompt, Prompt) else ""
        for text, prompt in zip(texts, prompts, strict=True)
    ]
    stop_ids = _stop_ids(model.engine.stop_ids, body)
    return Job(prompts, sampling, stop_ids, leads, texts if body.echo else (), silent=body.max_tokens == 0)


def prepare_chat(services: Services, model: ServedModel, adapter: ServedAdapter | None, body: ChatRequest) -> Job:
    """Renders the messages of a chat. Runs outside of the event loop."""
    chat = model.chat_format(adapter)
    messages = template_messages(body, chat.template)
    schema = schema_of(body.response_format, "response_format")
    several = body.parallel_tool_calls is not False
    tools = prepare_tools(
        chat.template, model.tokenizer, body.tools or (), body.tool_choice, several=several, schema=schema
    )
    asked = model.chat_prompt(messages, tools and tools.tools, body.chat_template_kwargs, adapter)
    room = services.room(model, asked.prompt.ids, "messages")
    limit = services.settings.max_new_tokens or UNKNOWN_WINDOW
    wanted = body.max_completion_tokens or body.max_tokens or (limit if room is None else min(room, limit))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar = tools and tools.grammar
    constraint = {"grammar": grammar, "json_schema": schema if grammar is None else None}
    sampling = asked.sampling(make_sampling(body, wanted, logprobs=logprobs, **constraint), room)
    if tools is not None and tools.visible:
        sampling = replace(sampling, skip_special_tokens=False)
    _load_token_bytes(model, sampling)
    stop_ids = _stop_ids(model.engine.stop_ids | asked.stop_ids, body)
    # Compiled here, because the engine's thread, which uses the result again, would hold up other requests.
    new_constraint(sampling.constraint, model.tokenizer, stop_ids, asked.prompt.first is not None)
    return Job([asked.prompt], sampling, stop_ids, [asked.lead], tools=tools)


def template_messages(body: ChatRequest | TokenizeRequest, template: ChatTemplate) -> list[dict[str, Any]]:
    """Returns the messages of a request in the form that its chat template expects.

    Raises:
        ApiError: a message has no text, or the template does not use a key or a variable.
    """
    raw = [message.model_dump(exclude_none=True) for message in body.messages or ()]
    check_names(template, raw, body.chat_template_kwargs, with_tools=bool(body.tools))
    try:
        converted = [join_parts(one) for one in convert_messages(raw, "messages", "role", "content")]
    except Unfit as bad:
        what = f"{bad.reason} ({bad.hint})" if bad.hint else bad.reason
        raise ApiError(400, "invalid_message", f"messages: {what}; correct it", "messages") from None
    # Templates know the role under its earlier name.
    converted = [one | {"role": "system"} if one["role"] == "developer" else one for one in converted]
    return plain_calls(converted, template)


async def answer(
    services: Services,
    model: ServedModel,
    adapter: ServedAdapter | None,
    body: SamplingRequest,
    prompts: int,
    prepare: Callable[[], Job],
    form: Callable[[ServedModel, str, Job], Reply],
    output: Output,
) -> None:
    """Generates the choices of a request, and sends them."""
    services.check_limits(body, prompts)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "invalid_value", "stream_options needs stream: true; set it", "stream_options")
    watch = services.metrics.watch(model)
    async with model.slots(prompts * (body.n or 1), adapter):
        job = await asyncio.to_thread(prepare)
        watch.begin(job.prompt_tokens)
        reply = form(model, adapter.name if adapter else model.name, job)
        choices = job.choices(whole_characters=reply.chat)
        name = adapter and adapter.name
        output.named = reply.named
        reply.wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        async with model.generate(job.prompts, job.sampling, stop_ids=job.stop_ids, adapter=name) as generation:
            if body.stream:
                await output.events(*(event for index in range(len(choices)) for event in reply.begin(index)))
            async for pieces in generation.read():
                watch.add()
                by_choice: Mapping[int, list[Piece]] = defaultdict(list)
                for index, piece in pieces:
                    by_choice[index].append(replace(piece, **SILENT) if job.silent else piece)
                new = []
                for index, some in by_choice.items():
                    choice = choices[index]
                    text = choice.add(some)
                    if body.stream:
                        new += reply.delta(index, choice, text, some)
                if new:
                    await output.events(*new)
        watch.end(max(choice.tokens for choice in choices))
        usage = _usage(job, choices)
        _log(services, model, job, choices, usage)
        if not body.stream:
            await output.json(reply.body(choices, usage))
            return
        await output.events(*reply.end(choices, usage), last=True)


def _log(services: Services, model: ServedModel, job: Job, choices: Sequence[Choice], usage: Mapping[str, int]) -> None:
    """Logs the numbers of tokens of an answered request; and, if the server is asked to, prompts and answers."""
    counts = f"{usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} new tokens"
    logger.info("%s: %s", model.name, counts)
    if services.settings.log_prompts:
        prompts = [p.text if isinstance(p, Prompt) else model.tokenizer.decode(p) for p in job.prompts]
        answers = [choice.text for choice in choices]
        logger.info("%s", orjson.dumps({"prompts": prompts, "answers": answers}).decode())


def _usage(job: Job, choices: Sequence[Choice]) -> dict[str, int]:
    new = sum(choice.tokens for choice in choices)
    return {"prompt_tokens": job.prompt_tokens, "completion_tokens": new, "total_tokens": job.prompt_tokens + new}


def _stop_ids(ids: frozenset[int], body: SamplingRequest) -> frozenset[int]:
    return frozenset() if body.ignore_eos else ids


def _load_token_bytes(model: ServedModel, sampling: Sampling) -> None:
    """Computes what log-probabilities need once, outside of the event loop."""
    if sampling.logprobs is not None:
        _ = model.tokenizer.token_bytes
