"""The endpoints `/tokenize`, `/detokenize` and `/tokenizer_info`, with the bodies of vLLM's."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from weft.data.conversations.template import special_tokens
from weft.serve.completions import template_messages
from weft.serve.errors import ApiError
from weft.serve.json_route import JsonRoute
from weft.serve.logprobs import token_text
from weft.serve.schemas import DetokenizeRequest, TokenizeRequest
from weft.serve.served_model import ServedAdapter, ServedModel
from weft.serve.services import services_of

router = APIRouter(tags=["tokens"], route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
    """Returns the token ids of a text, or of the prompt that a chat template writes for messages."""
    model, adapter = services_of(request).models.find(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "invalid_value", "give either prompt or messages", "prompt")
    ids = await asyncio.to_thread(_encode, model, adapter, body)
    texts = [token_text(model.tokenizer, id) for id in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.window, "tokens": ids, "token_strs": texts}


@router.get("/tokenizer_info")
async def describe_tokenizer(request: Request, model: str | None = None) -> dict[str, Any]:
    """Describes the tokenizer of a model: its special tokens, and the chat template."""
    served, adapter = services_of(request).models.find(model)
    names = await asyncio.to_thread(special_tokens, served.tokenizer.path)
    chat = (adapter and adapter.chat) or served.chat
    return {**names, "chat_template": chat and chat.template.source.source, "model_max_length": served.window}


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, Any]:
    """Returns the text of token ids."""
    model, _ = services_of(request).models.find(body.model)
    largest, size = max(body.tokens, default=0), model.tokenizer.vocab_size
    if largest >= size:
        what = f"the token id {largest} is not in the vocabulary, which has ids 0 to {size - 1}; remove it"
        raise ApiError(400, "invalid_value", what, "tokens")
    return {"prompt": await asyncio.to_thread(model.tokenizer.decode, body.tokens)}


def _encode(model: ServedModel, adapter: ServedAdapter | None, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        return model.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    chat = model.chat_format(adapter)
    messages = template_messages(body, chat.template)
    tools = [tool.model_dump(exclude_unset=True, exclude_none=True) for tool in body.tools or ()] or None
    if body.add_generation_prompt is not False:
        return model.chat_prompt(messages, tools, body.chat_template_kwargs, adapter).prompt.ids
    return model.tokenizer.encode(chat.render(messages, tools, body.chat_template_kwargs))
