"""Defines `Callbacks`, which calls the callbacks of a run and saves their state in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.tensors import MODEL_PREFIX, model_tensors
from weft.config.components import make_component
from weft.config.run import CallbackSection
from weft.errors import UserError
from weft.files import read_json
from weft.train.callbacks import Callback, State

PREFIX = "callback/"


class Callbacks:
    """The callbacks of a run. All ranks call the callbacks in the order of the config.

    Args:
        sections: the entries of `callbacks` in the config.
        metrics: the callback that logs `log.metrics`. It has no saved state, and is called before the other callbacks.

    Attributes:
        found: name of a callback in checkpoints -> callback.
    """

    def __init__(self, sections: Sequence[CallbackSection] = (), metrics: Callback | None = None):
        types = [section.type for section in sections]
        names = [f"{name}-{types[: n + 1].count(name)}" if name in types[:n] else name for n, name in enumerate(types)]
        self.found = {name: make_component(section, "callback") for name, section in zip(names, sections, strict=True)}
        labels = (f"callbacks[{n}] ({type(callback).__name__})" for n, callback in enumerate(self.found.values()))
        self.labelled = [("log.metrics", metrics), *zip(labels, self.found.values(), strict=True)]
        self.loading: dict[str, Tensor] = {}

    def add(self, name: str, callback: Callback) -> None:
        """Adds a callback that the config does not list. `name` is its name in checkpoints."""
        self.found[name] = callback
        self.labelled.append((name, callback))

    def call(self, hook: str, state: State) -> None:
        """Calls the method `hook` of every callback that defines this method."""
        for label, callback in self.labelled:
            if (method := _overridden(callback, hook)) is not None:
                with state.acting(label):
                    method(state)

    @contextmanager
    def validating(self, state: State) -> Iterator[None]:
        """Enters the callbacks' contexts for a validation. The first callback's context is the outermost."""
        with ExitStack() as stack:
            for callback in self.found.values():
                if (method := _overridden(callback, "validating")) is not None:
                    stack.enter_context(method(state))
            yield

    @property
    def depend_on_validations(self) -> bool:
        """Whether a callback has both `validated` and `state_dict`, so that its state can depend on validations."""
        both = ("validated", "state_dict")
        return any(all(_overridden(callback, method) for method in both) for callback in self.found.values())

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the callbacks' state: (callback name -> JSON values, `callback/<name>/<path>` -> tensor)."""
        tensors: dict[str, Tensor] = {}
        values = {
            name: _without_tensors(callback.state_dict(), f"{PREFIX}{name}", tensors)
            for name, callback in self.found.items()
            if _overridden(callback, "state_dict")
        }
        return {name: value for name, value in values.items() if value}, tensors

    def empty_tensors(self, checkpoint: Path, model: nn.Module) -> dict[str, Tensor]:
        """Returns saved name -> zero tensor. The caller loads the callbacks' state from a checkpoint into these
        tensors.

        A tensor with the name and shape of a parameter is sharded like the parameter. Other tensors are not sharded.
        """
        saved: dict[str, Any] = read_json(checkpoint / files.INDEX)["tensors"]
        parameters = {name: tensor for name, (tensor, _) in model_tensors(model).items()}
        for key, entry in saved.items():
            if not key.startswith(PREFIX) or key.split("/")[1] not in self.found:
                continue
            name = key.rpartition("/")[2]
            parameter = parameters.get(name)
            if parameter is not None and list(parameter.shape) == entry["shape"]:
                self.loading[key] = torch.zeros_like(parameter.detach())
            elif MODEL_PREFIX + name not in saved:  # else it belongs to a parameter of another stage
                self.loading[key] = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        return self.loading

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Passes the saved JSON values and the loaded tensors to the callbacks that have saved state."""
        states: dict[str, dict[str, Any]] = {name: dict(values.get(name, {})) for name in self.found}
        for key, tensor in self.loading.items():
            _, name, *path, last = key.split("/")
            tree = states[name]
            for part in path:
                tree = tree.setdefault(part, {})
            tree[last] = tensor
        self.loading = {}
        for name, callback in self.found.items():
            if states[name] and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(states[name])


def _overridden(callback: Any, name: str) -> Any:
    """Returns a method if the callback's class defines it; None if it is missing or inherited from `Callback`."""
    method = getattr(callback, name, None)
    return None if getattr(method, "__func__", None) is getattr(Callback, name) else method


def _without_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Returns a callback's state without the tensors in it, and adds these tensors to `tensors` by path.

    Raises:
        UserError: a value is neither a tensor in a dict nor a JSON value, or a key on a tensor's path contains "/".
    """
    remedy = "keep numbers and strings in dicts and lists, and tensors in dicts"
    if isinstance(value, list | tuple):
        below: dict[str, Tensor] = {}
        plain = [_without_tensors(item, path, below) for item in value]
        if below:
            raise UserError(f"{path}: a tensor in a list cannot be saved as state of a callback; {remedy}")
        return plain
    if not isinstance(value, Mapping):
        if value is not None and not isinstance(value, bool | int | float | str):
            what = f"a {type(value).__name__} cannot be saved as state of a callback"
            raise UserError(f"{path}: {what}; {remedy}")
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        found = {f"{path}/{key}": item} if isinstance(item, Tensor) else {}
        if not found:
            kept[str(key)] = _without_tensors(item, f"{path}/{key}", found)
        if found and "/" in str(key):
            raise UserError(f"{path}: the key {key!r} of a tensor contains '/'; rename the key")
        tensors |= found
    return kept
