"""The endpoints that add and remove adapters while the server runs, with the paths and bodies of vLLM's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from weft.errors import UserError
from weft.generation.adapters import check_base
from weft.generation.engine import Engine
from weft.observe.console import Console
from weft.serve.engine_worker import EngineFailure
from weft.serve.errors import ApiError
from weft.serve.json_route import JsonRoute
from weft.serve.load import make_adapter
from weft.serve.middleware import has_key
from weft.serve.schemas import LoadAdapterRequest, UnloadAdapterRequest
from weft.serve.served_model import ServedModel, engine_error
from weft.serve.services import Services, services_of

router = APIRouter(tags=["adapters"], route_class=JsonRoute)


@router.post("/v1/load_lora_adapter")
async def load_adapter(request: Request, body: LoadAdapterRequest) -> dict[str, Any]:
    """Adds an adapter, which requests then use as the model `lora_name`. Needs an admin key."""
    services = _check_admin(request)
    folder = _allowed_folder(body.lora_path, services.settings.adapter_folder)
    model = _base(services, body.base_model_name)
    async with services.admin_lock:  # two requests must not add the same name
        if body.lora_name in services.models.names:
            what = f"there is a model or an adapter {body.lora_name!r} already; unload it, or choose another name"
            raise ApiError(400, "adapter_exists", what, "lora_name")
        try:
            await asyncio.to_thread(check_base, model.engine.model, folder)  # hashes the base model once
            adapter = await asyncio.to_thread(make_adapter, body.lora_name, str(folder), model.tokenizer, Console())
            await model.worker.call(Engine.add_adapter, body.lora_name, folder)
        except UserError as error:
            raise ApiError(400, "invalid_adapter", str(error), "lora_path") from None
        except EngineFailure as error:
            raise engine_error(error) from None
        model.adapters[body.lora_name] = adapter
    return {"id": body.lora_name, "object": "model", "parent": model.name, "loaded": True}


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(request: Request, body: UnloadAdapterRequest) -> dict[str, Any]:
    """Removes an adapter that no unfinished request uses. Needs an admin key."""
    services = _check_admin(request)
    async with services.admin_lock:
        model = next((one for one in services.models if body.lora_name in one.adapters), None)
        if model is None:
            names = [name for one in services.models for name in one.adapters]
            remedy = f"name one of {', '.join(names)}" if names else "no adapter is loaded"
            what = f"there is no adapter {body.lora_name!r}; {remedy}"
            raise ApiError(404, "adapter_not_found", what, "lora_name")
        if count := model.adapters[body.lora_name].requests:
            requests = "an unfinished request uses" if count == 1 else f"{count} unfinished requests use"
            what = f"{requests} the adapter {body.lora_name!r}; try again later"
            raise ApiError(409, "adapter_in_use", what, "lora_name")
        adapter = model.adapters.pop(body.lora_name)  # a request that arrives now does not find it
        try:
            await model.worker.call(Engine.remove_adapter, body.lora_name)
        except (UserError, EngineFailure) as error:
            model.adapters[body.lora_name] = adapter
            if isinstance(error, EngineFailure):
                raise engine_error(error) from None
            raise ApiError(409, "adapter_in_use", error.what, "lora_name") from None
    return {"id": body.lora_name, "object": "model", "parent": model.name, "loaded": False}


def _check_admin(request: Request) -> Services:
    """Returns the services of the application. Raises ApiError if the request may not change what is served."""
    services = services_of(request)
    if not services.settings.admin_keys:
        what = "this server was started without an admin key, so adapters cannot be changed; set WEFT_ADMIN_KEY"
        raise ApiError(403, "admin_disabled", what)
    if not has_key(request.headers, services.settings.admin_keys):
        raise ApiError(403, "admin_key_required", "adapters are changed with the admin key only; send it")
    return services


def _base(services: Services, name: str | None) -> ServedModel:
    models = list(services.models)
    if name is None and len(models) > 1:
        what = f"several models are served; set base_model_name to one of {', '.join(one.name for one in models)}"
        raise ApiError(400, "missing_required_parameter", what, "base_model_name")
    model, adapter = services.models.find(name)
    if adapter is not None:
        what = f"{name!r} is an adapter, to which no other can be added; name a model"
        raise ApiError(400, "invalid_value", what, "base_model_name")
    return model


def _allowed_folder(path: str, root: str | None) -> Path:
    """Returns the path of an adapter. A relative path begins in the folder of adapters, as do all allowed paths."""
    if root is None:
        what = "this server was started without --adapter-folder, so no adapters can be loaded"
        raise ApiError(403, "adapters_disabled", what, "lora_path")
    if "\0" in path:
        raise ApiError(400, "invalid_value", "lora_path has a null character; correct it", "lora_path")
    allowed = Path(root).resolve()
    folder = (allowed / path).resolve()
    if not folder.is_relative_to(allowed):
        what = "lora_path is outside of the server's folder of adapters; give a path in that folder"
        raise ApiError(403, "path_not_allowed", what, "lora_path")
    return folder
