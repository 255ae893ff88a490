"""Defines `create_app`, which returns the web application of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware

import weft
from weft.serve import adapters, completions, embeddings, responses, tokens
from weft.serve.errors import ApiError, ErrorReply, handle_errors
from weft.serve.json_route import JsonRoute
from weft.serve.metrics import CountRequests
from weft.serve.middleware import Guard
from weft.serve.page import page_routes
from weft.serve.served_model import ServedModel, ServedModels
from weft.serve.services import Services, Settings, services_of

router = APIRouter(tags=["server"], route_class=JsonRoute)


def create_app(models: Sequence[ServedModel], settings: Settings | None = None) -> FastAPI:
    """Returns the web application that serves models. While it runs, each model has a thread.

    Args:
        models: the models.
        settings: limits of the server. Default: no keys are needed.

    Raises:
        UserError: two models have the same name.
    """
    settings = settings or Settings()
    services = Services(ServedModels(models), settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI):
        for model in services.models:
            model.worker.start()
        yield
        await asyncio.gather(*(model.worker.stop(services.stop_timeout) for model in services.models))

    app = FastAPI(title="Weft", version=weft.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.services = services
    handle_errors(app)
    app.router.routes.extend(page_routes())
    for part in (router, *(one.router for one in (completions, responses, embeddings, tokens, adapters))):
        app.include_router(part, responses={"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}})
    app.add_middleware(Guard, settings=settings)
    if settings.cors_origins:  # outside of the guard: a browser's preflight request has no key
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.add_middleware(CountRequests, metrics=services.metrics)
    return app


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the models and adapters."""
    models = services_of(request).models
    return {"object": "list", "data": [entry for model in models for entry in _entries(model)]}


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """Describes a model or an adapter."""
    model, _ = services_of(request).models.find(name)
    return next(entry for entry in _entries(model) if entry["id"] == name)


@router.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """Returns the numbers of the server, in the text format of Prometheus."""
    return Response(generate_latest(services_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/health")
async def check_health(request: Request) -> JSONResponse:
    """Asks the engine of each model for an answer. The status is 503 if an engine has failed or does not answer."""
    models = list(services_of(request).models)
    problems = await asyncio.gather(*(model.check() for model in models))
    for model, problem in zip(models, problems, strict=True):
        if problem is not None:
            raise ApiError(503, "engine_unavailable", f"{model.name}: {problem}")
    return JSONResponse({"status": "ok"})


def _entries(model: ServedModel) -> list[dict[str, Any]]:
    """Returns the descriptions of a model and its adapters."""
    shared = {"object": "model", "owned_by": "weft", "max_model_len": model.window}
    base = {"id": model.name, "created": model.created, **shared, "parent": None}
    adapters = [
        {"id": one.name, "created": one.created, **shared, "parent": model.name} for one in model.adapters.values()
    ]
    return [base, *adapters]
