"""`weft.evaluate`: a model measured on token stores and on tasks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.load import resolve, tokenizer_folder
from weft.checkpoint.load_model import checkpoint_of, load_model
from weft.config.data import held_out_sets
from weft.config.dump import read_saved
from weft.data.stores.store import TokenStore
from weft.errors import UserError
from weft.evaluation.perplexity import Measure, default_length, measure, together
from weft.evaluation.settings import Settings
from weft.evaluation.tasks import find_tasks, on_tasks
from weft.observe.console import Console
from weft.parallel.world import local_device


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        model: the checkpoint; None of a module that was not loaded from one.
        stores: of each token store.
        tasks: for each task `questions`, `shots`, `version` and `scores`.
        windows: sequence_length, stride and documents, as they were taken.
    """

    model: Path | None
    stores: list[Measure] = field(default_factory=list)
    tasks: dict[str, Any] = field(default_factory=dict)
    windows: dict[str, Any] = field(default_factory=dict)

    @property
    def all(self) -> Measure:
        """All stores together."""
        return together(self.stores)

    @property
    def loss(self) -> float:
        """Nats per token of all stores."""
        return self.all.loss

    @property
    def perplexity(self) -> float:
        """e to the power of the loss."""
        return self.all.perplexity

    @property
    def bits_per_byte(self) -> float | None:
        """None if the bytes of a store are not known."""
        return self.all.bits_per_byte

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {"model": None if self.model is None else str(self.model)} | self.windows
        if self.stores:
            found |= {"stores": [one.as_dict() for one in self.stores], "all": self.all.as_dict()}
        return found | ({"tasks": self.tasks} if self.tasks else {})


def evaluate(
    model: nn.Module | str | Path,
    store: str | Path | TokenStore | Sequence[str | Path | TokenStore] | None = None,
    tasks: str | Sequence[str] | None = None,
    *,
    console: Console | None = None,
    **settings: Any,
) -> Evaluation:
    """Measure a model on token stores, on tasks of EleutherAI's lm-evaluation-harness, or on both.

    >>> found = weft.evaluate("runs/run", store="heldout", max_tokens=1000)
    >>> found.stores[0].tokens
    1000
    >>> bool(0 < found.bits_per_byte < found.loss)
    True

    Args:
        model: a run directory, a checkpoint or a Hugging Face folder; or a module as `weft.load_model` gives it.
        store: one or several; default, without tasks: the validation data of the run.
        tasks: names; several in a list, or with commas between them.
        console: where to warn and show progress; default: nowhere.
        settings: fields of `weft.evaluation.settings.Settings`: `sequence_length`, `stride`, `documents` ("apart" or
            "joined") and `max_tokens` on stores; `include_path`, `num_fewshot`, `limit` and `apply_chat_template` on
            tasks; `batch_size`, `tokenizer`, `device` and `dtype`.

    Raises:
        UserError: no model or store there, a store that does not fit the model, an unknown task, a setting out of range
            or without effect. Mistakes in stores and tasks are found before the model is loaded.
        TypeError: a setting that there is not.
    """
    unknown = settings.keys() - {one.name for one in fields(Settings)}
    if unknown:
        raise TypeError(f"evaluate() has no setting {sorted(unknown)[0]!r}")
    how = Settings(**settings)
    given = [store] if isinstance(store, str | Path | TokenStore) else list(store or ())
    how.refuse_idle(stores=bool(given) or tasks is None, tasks=tasks is not None, loaded=isinstance(model, nn.Module))
    names = [name.strip() for name in tasks.split(",") if name.strip()] if isinstance(tasks, str) else list(tasks or ())
    manager = find_tasks(names, how.include_path) if tasks is not None else None
    console = console or Console(speaks=False)
    checkpoint = checkpoint_of(model) if isinstance(model, nn.Module) else resolve(model)
    if not given and tasks is None:
        given = list(_held_out_stores(checkpoint))
    stores = [one if isinstance(one, TokenStore) else TokenStore(one) for one in given]
    tokenizer = how.tokenizer or (tokenizer_folder(checkpoint) if checkpoint is not None else None)
    if not isinstance(model, nn.Module):
        model = load_model(checkpoint or model, _device(how.device), how.dtype)
    windows = _windows(model, _run_data(checkpoint), how) if stores else {}
    if stores and tokenizer is None:
        what = "the model" if checkpoint is None else checkpoint
        console.warning(f"{what} has no tokenizer with it: nobody can tell whether a store's ids are its own")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: console.warning(str(message))
        found = [measure(model, one, **windows, settings=how, tokenizer=tokenizer, console=console) for one in stores]
    scores = {} if tasks is None else on_tasks(model, tokenizer, names, manager, settings=how, console=console)
    return Evaluation(checkpoint, found, scores, windows)


def _windows(model: nn.Module, trained: dict[str, Any], how: Settings) -> dict[str, Any]:
    """How stores are read: as stated, else as the model was trained."""
    stated = trained.get("sequence_length")
    length = how.sequence_length
    if length is None:
        length = stated if isinstance(stated, int) else default_length(model)
    apart = not trained or trained.get("packing") == "best_fit" or trained.get("document_attention") is True
    return {
        "sequence_length": length,
        "stride": length if how.stride is None else how.stride,
        "documents": how.documents or ("apart" if apart else "joined"),
    }


def _run_data(checkpoint: Path | None) -> dict[str, Any]:
    """The `data` section of the run that a checkpoint is of; {} if it lies in no run directory."""
    if checkpoint is None or checkpoint.absolute().parent.name != "checkpoints":
        return {}
    config = checkpoint.absolute().parent.parent / "config.yaml"
    return (read_saved(config).get("data") or {}) if config.is_file() else {}


def _held_out_stores(checkpoint: Path | None) -> list[str]:
    """The token stores on which a run was validated. Raises UserError: none, or one is not there any more."""
    data = _run_data(checkpoint)
    if not data:
        raise UserError("this model has no validation data of its own; name a token store with `store`", checkpoint)
    assert checkpoint is not None
    run, stores = checkpoint.absolute().parent.parent, list(held_out_sets(data.get("validation")).values())
    named = [store for store in stores if isinstance(store, str)]
    if not named or len(named) < len(stores):
        raise UserError("this run was validated on no token store; name one with `store`", run)
    for store in named:
        if not Path(store).exists():
            raise UserError(
                f"its validation data {store} is not there; go to the folder in which it was trained, or name a token "
                "store with `store`",
                run,
            )
    return named


def _device(stated: str | torch.device | None) -> torch.device:
    """Raises UserError for one that is not there."""
    if stated is None:
        return local_device(Console())
    try:
        device = torch.device(stated)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # what a build without CUDA says
        raise UserError(
            f"`device` {stated}: {str(error).splitlines()[0]}; name cpu or a device that there is"
        ) from None
    return device
