"""Defines `weft.evaluate`, which evaluates a model on token stores and on benchmark tasks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.adapter_start import check_adapter_fits
from weft.checkpoint.load import resolve, tokenizer_folder
from weft.checkpoint.load_model import checkpoint_of, load_model
from weft.config.data import held_out_sets
from weft.config.dump import read_saved
from weft.config.run import RunConfig
from weft.data.raw.pack_sources import pack_sources
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.evaluation.perplexity import StoreResult, combine, evaluate_store
from weft.evaluation.preferences import PreferenceResult, evaluate_preferences
from weft.evaluation.settings import WINDOWS, Settings
from weft.evaluation.tasks import evaluate_tasks, find_tasks
from weft.generation.adapters import with_adapter
from weft.headers import is_raw
from weft.observe.console import Console
from weft.parallel.world import local_device


@dataclass(frozen=True)
class Evaluation:
    """The results of `evaluate`.

    Attributes:
        model: path of the checkpoint; None if the model was a module that was not loaded from a checkpoint.
        stores: result of each token store of texts or conversations.
        tasks: for each task, a dict with `questions`, `shots`, `version` and `scores`.
        windows: the values of the settings `sequence_length`, `stride` and `documents` that were used for the stores.
        adapter: path of the adapter that was added to the model, or None.
        preferences: result of each token store of preferences.
    """

    model: Path | None
    stores: list[StoreResult] = field(default_factory=list)
    tasks: dict[str, Any] = field(default_factory=dict)
    windows: dict[str, Any] = field(default_factory=dict)
    adapter: Path | None = None
    preferences: list[PreferenceResult] = field(default_factory=list)

    @property
    def all(self) -> StoreResult:
        """The combined result of all stores. Raises UserError if the model was evaluated on tasks only."""
        if not self.stores:
            raise UserError("this evaluation has no loss, because it has no token store; set `store`")
        return combine(self.stores)

    @property
    def loss(self) -> float:
        """The loss over all stores, in nats per token."""
        return self.all.loss

    @property
    def perplexity(self) -> float:
        """The perplexity over all stores."""
        return self.all.perplexity

    @property
    def bits_per_byte(self) -> float | None:
        """The bits per byte over all stores; None if the number of bytes of a store is unknown."""
        return self.all.bits_per_byte

    def as_dict(self) -> dict[str, Any]:
        """Returns the results as JSON values."""
        found: dict[str, Any] = {"model": None if self.model is None else str(self.model)}
        found |= ({} if self.adapter is None else {"adapter": str(self.adapter)}) | self.windows
        if self.stores:
            found |= {"stores": [one.as_dict() for one in self.stores], "all": self.all.as_dict()}
        if self.preferences:
            found["preferences"] = [one.as_dict() for one in self.preferences]
        return found | ({"tasks": self.tasks} if self.tasks else {})


def evaluate(
    model: nn.Module | str | Path,
    store: str | Path | TokenStore | Sequence[str | Path | TokenStore] | None = None,
    tasks: str | Sequence[str] | None = None,
    *,
    console: Console | None = None,
    **settings: Any,
) -> Evaluation:
    """Evaluates a model on token stores, on tasks of EleutherAI's lm-evaluation-harness, or on both.

    >>> found = weft.evaluate("runs/run", store="heldout", max_tokens=1000)
    >>> found.stores[0].tokens
    1000
    >>> bool(0 < found.bits_per_byte < found.loss)
    True

    Args:
        model: path of a run directory, a checkpoint or a Hugging Face folder; or a module that `weft.load_model`
            returned.
        store: one or several token stores: of texts or conversations, for loss and perplexity, or of preferences, for
            the accuracy. Default: the validation data of the run if `tasks` is None, otherwise none.
        tasks: names of tasks, as a list or separated by commas.
        console: prints warnings and progress. Default: no output.
        settings: fields of `weft.evaluation.settings.Settings`: `sequence_length`, `stride`, `documents` ("apart" or
            "joined") and `max_tokens` for stores; `reference` and `per_token` for stores of preferences;
            `include_path`, `num_fewshot`, `limit` and `apply_chat_template` for tasks; `batch_size`, `tokenizer`,
            `device`, `dtype`, `quantize` and `adapter`.

    Raises:
        UserError: the model or a store does not exist, a store or the adapter does not fit the model, a task is
            unknown, or a setting is out of range or has no effect. Stores, tasks and the adapter are checked before the
            model is loaded.
        TypeError: a setting is unknown.
    """
    how = Settings(**settings)
    given = [store] if isinstance(store, str | Path | TokenStore) else list(store or ())
    how.refuse_unused(stores=bool(given) or tasks is None, tasks=tasks is not None, loaded=isinstance(model, nn.Module))
    names = [name.strip() for name in tasks.split(",") if name.strip()] if isinstance(tasks, str) else list(tasks or ())
    manager = find_tasks(names, how.include_path) if tasks is not None else None
    console = console or Console(prints=False)
    checkpoint = checkpoint_of(model) if isinstance(model, nn.Module) else resolve(model)
    named: Sequence[tuple[Any, str | None]] = [(one, None) for one in given]
    if not given and tasks is None:
        named = _held_out_stores(checkpoint, console)
    stores = [(one if isinstance(one, TokenStore) else TokenStore(one), name) for one, name in named]
    how.refuse_unused_on([one.info.kind for one, _ in stores])
    if how.tokenizer is None and checkpoint is not None:
        how = replace(how, tokenizer=tokenizer_folder(checkpoint))
    if how.adapter is not None and checkpoint is not None:
        check_adapter_fits(how.adapter, checkpoint)  # refused before the model is loaded
    if not isinstance(model, nn.Module):
        model = load_model(checkpoint or model, _device(how.device), how.dtype, quantize=how.quantize)
    how = how.with_windows(model, _run_data(checkpoint))
    if stores and how.tokenizer is None:
        _warn_of_missing_tokenizer(checkpoint, console)
    with nullcontext() if how.adapter is None else with_adapter(model, how.adapter):
        found, preferences = _evaluate_stores(model, stores, how, console)
        scores = {} if tasks is None else evaluate_tasks(model, names, manager, how, console)
    windows = {name: getattr(how, name) for name in WINDOWS} if found else {}
    return Evaluation(checkpoint, found, scores, windows, Path(how.adapter) if how.adapter else None, preferences)


def _evaluate_stores(
    model: nn.Module, stores: Sequence[tuple[TokenStore, str | None]], how: Settings, console: Console
) -> tuple[list[StoreResult], list[PreferenceResult]]:
    """Evaluates a model on stores, each with its name for the result or None. Prints warnings on `console`."""
    texts = [one for one in stores if one[0].info.kind != "preferences"]
    pairs = [one for one in stores if one[0].info.kind == "preferences"]
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.warning(str(message))
        found = [evaluate_store(model, store, how, console, name) for store, name in texts]
        reference = None
        if how.reference is not None:
            reference = load_model(how.reference, next(model.parameters()).device, how.dtype)
        preferences = [evaluate_preferences(model, store, how, console, name, reference) for store, name in pairs]
    return found, preferences


def _warn_of_missing_tokenizer(checkpoint: Path | None, console: Console) -> None:
    console.warning(
        f"{'the model' if checkpoint is None else checkpoint} has no tokenizer, so Weft cannot check that the store "
        "was packed with the model's tokenizer; set `tokenizer`"
    )


def _run_data(checkpoint: Path | None) -> dict[str, Any]:
    """Returns the `data` section of a checkpoint's run; {} if the checkpoint is not in a run directory."""
    if checkpoint is None or checkpoint.absolute().parent.name != "checkpoints":
        return {}
    config = checkpoint.absolute().parent.parent / "config.yaml"
    return (read_saved(config).get("data") or {}) if config.is_file() else {}


def _held_out_stores(checkpoint: Path | None, console: Console) -> list[tuple[str, str]]:
    """Returns the paths of the token stores that are the validation data of a checkpoint's run, each with its name.

    The name of a store is the path in `data.validation`, which can be the path of raw data.

    Raises:
        UserError: there is no validation data, it contains something other than token stores, or a store is missing.
    """
    data = _run_data(checkpoint)
    if not data:
        raise UserError("this model has no validation data; set `store` to a token store", checkpoint)
    assert checkpoint is not None
    run, stores = checkpoint.absolute().parent.parent, list(held_out_sets(data.get("validation")).values())
    if not stores:
        raise UserError("this run has no validation data (data.validation); set `store` to a token store", run)
    named = [store for store in stores if isinstance(store, str)]
    if len(named) < len(stores):
        raise UserError("data.validation of this run has a custom dataset; set `store` to a token store", run)
    if any(is_raw(store) for store in named):
        config = RunConfig.load(run / "config.yaml", check_data=False)
        if config.generates:
            raise UserError("data.validation of this run has only prompts; set `store` to a token store", run)
        config = config.model_copy(update={"tokenizer": str(tokenizer_folder(checkpoint) or config.tokenizer)})
        packed = pack_sources(config, console, train=False).data.held_out_stores.values()
        return list(zip(packed, named, strict=True))
    for store in named:
        if not Path(store).exists():
            raise UserError(
                f"the validation data {store} of this run does not exist; change to the folder in which the run was "
                "started, or set `store` to a token store",
                run,
            )
    return list(zip(named, named, strict=True))


def _device(device: str | torch.device | None) -> torch.device:
    """Returns `device` as a `torch.device`. If it is None, returns a GPU if available, otherwise the CPU.

    Raises:
        UserError: the device does not exist.
    """
    if device is None:
        return local_device(Console())
    try:
        torch.empty(1, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
        what = str(error).splitlines()[0]
        raise UserError(f"`device` {device}: {what}; use cpu or an existing device") from None
