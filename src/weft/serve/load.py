"""Defines `Loader`, which loads models to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.adapter_start import check_adapter_fits
from weft.checkpoint.load import find_checkpoint, resolve
from weft.checkpoint.load_model import load_model, load_sharded_model
from weft.data.conversations.template import ChatTemplate, find_template, has_template, template_folder
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.generation.chat_format import ChatFormat
from weft.generation.engine import Engine
from weft.generation.text import stop_ids_of, tokenizer_of
from weft.observe.console import Console
from weft.parallel.world import World, local_device
from weft.serve.served_model import ServedAdapter, ServedModel

# Prompts are computed in parts, between which other texts go on. On a CPU, a part of 512 tokens is fast enough already.
STEP_TOKENS = {"cpu": 512}
GPU_STEP_TOKENS = 2048


@dataclass(frozen=True)
class Loader:
    """Loads models to serve.

    Attributes:
        dtype: name of the dtype; None: as saved.
        quantize: see `weft.load_model`.
        chat_template: see `find_template`; None: the model's own.
        adapters: name -> folder of each adapter.
        draft: path of a draft model, or None.
        max_waiting: see `ServedModel`.
        engine: keyword arguments of `Engine`; `max_step_tokens` can be None.
        world: the tensor parallel ranks, which all load the model; None: this process has the complete model.
    """

    dtype: str | None = None
    quantize: str | None = None
    chat_template: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    draft: str | None = None
    max_waiting: int = 256
    engine: Mapping[str, Any] = field(default_factory=dict)
    world: World | None = None

    def __call__(self, source: str) -> ServedModel:
        """Loads a model. Tokenizer, template and adapters are checked before.

        Args:
            source: a run directory, a checkpoint or a Hugging Face folder, possibly with a name: `name=path`.

        Raises:
            UserError: the model cannot be loaded, an adapter does not fit, or a chat template is invalid.
        """
        name, checkpoint = model_name(source), resolve(named_path(source)[1])
        if name in self.adapters:
            raise UserError(f"the adapter {name!r} has the name of the model; choose another name")
        tokenizer, stop_ids = tokenizer_of(checkpoint), stop_ids_of(checkpoint)
        for folder in self.adapters.values():
            check_adapter_fits(folder, checkpoint)
        console = Console()
        device = local_device(console) if self.world is None else self.world.device
        chat = _chat_format(tokenizer, tokenizer.path, self.chat_template, console)
        model = self._load(checkpoint, device)
        step_tokens = self.engine.get("max_step_tokens") or STEP_TOKENS.get(device.type, GPU_STEP_TOKENS)
        draft = self._load(Path(self.draft), device, draft=True) if self.draft else None
        options = {**self.engine, "max_step_tokens": step_tokens, "draft": draft}
        engine = Engine(model, tokenizer, stop_ids=stop_ids, **options)
        served = ServedModel(name, engine, chat, max_waiting=self.max_waiting, sharded=self.world is not None)
        for name, folder in self.adapters.items():
            engine.add_adapter(name, folder)
            served.adapters[name] = make_adapter(name, folder, tokenizer, console)
        return served

    def _load(self, path: Path, device: torch.device, draft: bool = False) -> nn.Module:
        dtype = getattr(torch, self.dtype) if self.dtype else None
        if self.world is not None:
            return load_sharded_model(path, self.world, dtype)
        return load_model(path, device, dtype, quantize=None if draft else self.quantize)


def named_path(source: str) -> tuple[str, str]:
    """Splits `name=path` into name and path. The name is "" if there is none, or if `source` is a path that exists.

    Raises:
        UserError: the name or the path is empty.
    """
    name, equals, path = ("", "", source) if source and Path(source).exists() else source.partition("=")
    if not equals:
        name, path = "", source
    if not path or (equals and not name):
        raise UserError(f"the model {source!r} has no {'name' if path else 'path'}; write PATH or NAME=PATH")
    return name, path


def model_name(source: str) -> str:
    """Returns the name of a model in requests: the given name, or that of the run or of the Hugging Face folder.

    Raises:
        UserError: `source` has no checkpoint.
    """
    name, path = named_path(source)
    checkpoint = find_checkpoint(path).absolute()
    return name or (checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint).name


def make_adapter(name: str, folder: str, tokenizer: Tokenizer, console: Console) -> ServedAdapter:
    """Returns the description of an adapter, with its own chat format if the folder has a template."""
    own = template_folder(folder, tokenizer.path)
    chat = None if own == tokenizer.path else _chat_format(tokenizer, own, None, console)
    return ServedAdapter(name, folder, chat)


def _chat_format(tokenizer: Tokenizer, folder: Path, name: str | None, console: Console) -> ChatFormat | None:
    """Returns the chat format with the template `name`, or with that of a folder; None if there is none."""
    if name is None and not has_template(folder):
        return None
    template = ChatTemplate.for_tokenizer(find_template(folder, name), tokenizer.path)
    for line in template.warnings(tokenizer.added_tokens):
        console.warning(line)
    chat = ChatFormat(template, tokenizer, "change the messages, or serve the model with another --chat-template")
    chat.frame([{"role": "user", "content": "weft"}])  # refused now if the template writes no answers
    return chat
