"""The callbacks of a run: called in the order of the list, on all ranks; their state is part of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.tensors import MODEL_PREFIX, model_tensors
from weft.config.component_sections import CallbackSection
from weft.config.components import load_class
from weft.errors import UserError
from weft.files import read_json
from weft.train.callbacks import Callback, State

PREFIX = "callback/"


class Callbacks:
    """The callbacks of `callbacks:`.

    Args:
        sections: of the run file.
    """

    def __init__(self, sections: Sequence[CallbackSection]):
        types = [section.type for section in sections]
        names = [f"{name}-{types[: n + 1].count(name)}" if name in types[:n] else name for n, name in enumerate(types)]
        self.found = {
            name: load_class(section, "callback")(**section.arguments)
            for name, section in zip(names, sections, strict=True)
        }
        self.filled: dict[str, Tensor] = {}

    def call(self, hook: str, state: State) -> None:
        """Call a hook of all callbacks that have it."""
        for number, callback in enumerate(self.found.values()):
            if (method := _own(callback, hook)) is not None:
                with state.acting(f"callbacks[{number}] ({type(callback).__name__})"):
                    method(state)

    @contextmanager
    def validating(self, state: State) -> Iterator[None]:
        """The contexts in which a validation runs, the first callback's around the others'."""
        with ExitStack() as stack:
            for callback in self.found.values():
                if (method := _own(callback, "validating")) is not None:
                    stack.enter_context(method(state))
            yield

    @property
    def hear_validations(self) -> bool:
        """Whether a callback's state may depend on validations."""
        both = ("validated", "state_dict")
        return any(all(_own(callback, method) for method in both) for callback in self.found.values())

    # ---- checkpoints

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON values by callback, and tensors by `callback/<name>/<path>`."""
        tensors: dict[str, Tensor] = {}
        values = {
            name: _plain(callback.state_dict(), f"{PREFIX}{name}", tensors)
            for name, callback in self.found.items()
            if _own(callback, "state_dict")
        }
        return {name: value for name, value in values.items() if value}, tensors

    def blank_state(self, checkpoint: Path, model: nn.Module) -> dict[str, Tensor]:
        """Tensors to be filled from a checkpoint: as the parameter after which they are named, or plain ones."""
        saved: dict[str, Any] = read_json(checkpoint / files.INDEX)["tensors"]
        parameters = {name: tensor for name, (tensor, _) in model_tensors(model).items()}
        for key, entry in saved.items():
            if not key.startswith(PREFIX) or key.split("/")[1] not in self.found:
                continue
            parameter = parameters.get(key.rpartition("/")[2])
            if parameter is not None and list(parameter.shape) == entry["shape"]:
                self.filled[key] = torch.zeros_like(parameter.detach())
            elif MODEL_PREFIX + key.rpartition("/")[2] not in saved:  # else it is one of another stage's parameters
                self.filled[key] = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        return self.filled

    def restored(self, values: Mapping[str, Any]) -> None:
        """Give callbacks what was saved of them; one that nothing was saved of begins anew."""
        own: dict[str, dict[str, Any]] = {name: dict(values.get(name, {})) for name in self.found}
        for key, tensor in self.filled.items():
            _, name, *path, last = key.split("/")
            tree = own[name]
            for part in path:
                tree = tree.setdefault(part, {})
            tree[last] = tensor
        self.filled = {}
        for name, callback in self.found.items():
            if own[name] and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(own[name])


def _own(callback: Any, name: str) -> Any:
    """A method that a callback has itself, not from `Callback`; None if it has none."""
    method = getattr(callback, name, None)
    return None if getattr(method, "__func__", None) is getattr(Callback, name) else method


def _plain(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A state without its tensors, which are put into `tensors` under their paths."""
    if isinstance(value, list | tuple):
        return [_plain(item, path, tensors) for item in value]
    if not isinstance(value, Mapping):
        if value is not None and not isinstance(value, bool | int | float | str):
            what = f"a {type(value).__name__} here cannot be saved"
            raise UserError(f"{path}: {what}; keep numbers and texts in dicts and lists, tensors in dicts")
        return value
    plain = {}
    for key, item in value.items():
        if isinstance(item, Tensor):
            tensors[f"{path}/{key}"] = item
        else:
            plain[str(key)] = _plain(item, f"{path}/{key}", tensors)
    return plain
