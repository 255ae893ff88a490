"""The endpoint `/v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from weft.generation.embeddings import Pooling, embed
from weft.generation.engine import Engine
from weft.serve.engine_worker import EngineFailure
from weft.serve.errors import ApiError
from weft.serve.exchange import Output
from weft.serve.json_route import JsonRoute
from weft.serve.schemas import EmbeddingRequest, list_of_prompts
from weft.serve.served_model import ServedAdapter, ServedModel, engine_error
from weft.serve.services import Services, services_of

router = APIRouter(tags=["embeddings"], route_class=JsonRoute)


@router.post("/v1/embeddings")
async def create_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """Computes embeddings of texts from the model's final hidden states."""
    services = services_of(request)
    model, adapter = services.models.find(body.model)
    texts = list_of_prompts(body.input, "input")
    return services.exchanges.new(partial(_answer, services, model, adapter, body, texts), body)


async def _answer(
    services: Services,
    model: ServedModel,
    adapter: ServedAdapter | None,
    body: EmbeddingRequest,
    texts: Sequence[str | list[int]],
    output: Output,
) -> None:
    name = adapter and adapter.name
    async with model.slots(1, adapter):
        prompts = await asyncio.to_thread(_encode, services, model, texts)
        data = []
        for index, ids in enumerate(prompts):
            # One at a time, so that texts of other requests go on between two embeddings.
            try:
                values = await model.worker.call(embed_text, ids, body.pooling or "mean", name)
            except EngineFailure as error:
                raise engine_error(error) from None
            if body.dimensions is not None and body.dimensions != len(values):
                what = f"dimensions is {body.dimensions}, but the model's embeddings have {len(values)} numbers"
                raise ApiError(400, "unsupported_value", f"{what}; omit it", "dimensions")
            shown = _encode_base64(values) if body.encoding_format == "base64" else values
            data.append({"object": "embedding", "index": index, "embedding": shown})
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    await output.json({"object": "list", "data": data, "model": name or model.name, "usage": usage})


def embed_text(engine: Engine, ids: Sequence[int], pooling: Pooling, adapter: str | None) -> list[float]:
    """Returns the embedding of a text. Runs in the engine's thread."""
    return embed(engine.model, ids, pooling, engine.adapters.get(adapter))


def _encode(services: Services, model: ServedModel, texts: Sequence[str | list[int]]) -> list[list[int]]:
    """Returns the ids of texts, with the special tokens that the tokenizer adds, as sentence-transformers does.

    Raises:
        ApiError: a text is too long.
    """
    prompts = [
        model.tokenizer.encode(text, add_special_tokens=True) if isinstance(text, str) else text for text in texts
    ]
    for ids in prompts:
        services.check_prompt(ids, "input")
        if model.window is not None and len(ids) > model.window:
            what = f"a text has {len(ids):,} tokens, but the model's window has {model.window:,}"
            raise ApiError(400, "context_length_exceeded", f"{what}; shorten the text", "input")
    return prompts


def _encode_base64(values: Sequence[float]) -> str:
    """Returns numbers as little-endian float32 in base64, as OpenAI's API does."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
