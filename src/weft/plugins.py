"""Plugins: what installed packages add to Weft, by entry points of the group `weft.plugins` (docs/plugins.md).

    [project.entry-points."weft.plugins"]
    "verb.publish" = "my_package.publish"             # weft publish
    "export.mine" = "my_package.mine"                 # weft export --to mine
    "optimizer.lion" = "my_package.lion:Lion"         # optimizer: {type: lion}

The name is `KIND.NAME`, the value a module or `module:Name`. A built-in of the same name comes first. Plugins are found
without importing them.
"""

from __future__ import annotations

import difflib
import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from keyword import iskeyword
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple

from weft.errors import UserError

GROUP = "weft.plugins"
# From `optimizer` on: what a run's file gives by a short name or as module:Class (weft.config.components).
KINDS = (
    "verb", "source", "export", "optimizer", "schedule", "objective", "tracker", "callback", "metric", "dataset",
    "model", "attention_pattern",
)  # fmt: skip


class Plugin(NamedTuple):
    """One entry point.

    Attributes:
        reference: `module` or `module:Name`.
        package: the installed package that states it, with its version.
    """

    kind: str
    name: str
    reference: str
    package: str

    def load(self) -> Any:
        """Import it. Raises UserError that names the package if that fails."""
        try:
            return load_reference(self.reference)
        except Exception as error:
            what = f"the plugin {self.kind}.{self.name} of {self.package} cannot be imported"
            raise UserError(f"{what}: {type(error).__name__}: {error}; update or uninstall the package") from error


@cache
def _installed() -> tuple[Plugin, ...]:
    from importlib.metadata import entry_points  # 25 ms: only where a name is no built-in's

    found = []
    for point in entry_points(group=GROUP):
        kind, _, name = point.name.partition(".")
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unnamed package"
        found.append(Plugin(kind, name, point.value.replace(" ", ""), package))
    return tuple(found)


def plugins(kind: str) -> dict[str, Plugin]:
    """The plugins of one kind ("verb", "export", "source", "optimizer", ...), by name; nothing is imported.

    Raises:
        UserError: two packages provide the same name.
    """
    found: dict[str, Plugin] = {}
    for plugin in _installed():
        if plugin.kind != kind:
            continue
        other = found.setdefault(plugin.name, plugin)
        if other.reference != plugin.reference:
            what = f"{other.package} and {plugin.package} both provide the plugin {kind}.{plugin.name}"
            raise UserError(f"{what}; uninstall one of them")
    return found


def of_no_kind(name: str) -> str:
    """For the message that nothing has this name: the entry point that has it, if its kind is none ("family.mine")."""
    for plugin in _installed():
        if plugin.name == name and plugin.kind not in KINDS:
            return f"; {plugin.package} states {plugin.kind}.{name}, but a plugin's kind is one of {', '.join(KINDS)}"
    return ""


def load_reference(reference: str) -> Any:
    """Import a `module`, or what `module:Name` names in it. The working directory is on the import path.

    Raises:
        UserError: there is no such module or name. What the module itself raises is not caught.
    """
    module, _, name = reference.partition(":")
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{reference!r}: no module {error.name!r}; install it, or put its folder on PYTHONPATH"
        ) from error
    for part in name.split(".") if name else ():
        if not hasattr(found, part):
            raise UserError(f"{reference!r}: the module {module!r} has no {name!r}; check the name")
        found = getattr(found, part)
    return found


def built_in(package: ModuleType, name: str, defines: str) -> ModuleType | None:
    """The module of `package` that is a built-in of this name; None if there is none.

    Args:
        name: the file's, with `-` for `_`, and without the `_` that follows a word of Python's (`import_.py`).
        defines: what a built-in's module defines; modules without it are helpers.
    """
    stem = name.replace("-", "_") + "_" * iskeyword(name)
    if not stem.isidentifier() or find_spec(f"{package.__name__}.{stem}") is None:
        return None
    module = import_module(f"{package.__name__}.{stem}")
    return module if hasattr(module, defines) else None


def built_ins(package: ModuleType, defines: str) -> dict[str, ModuleType]:
    """All built-ins of a package by name, imported."""
    names = (stem.removesuffix("_").replace("_", "-") for _, stem, _ in iter_modules(package.__path__))
    found = {name: built_in(package, name, defines) for name in names}
    return {name: module for name, module in found.items() if module is not None}


def find(kind: str, name: str, package: ModuleType, defines: str) -> Any:
    """What a name stands for: a built-in, which is a module of `package`; a plugin of this kind; `module:Name` itself.

    Raises:
        UserError: nothing has this name (the message lists what there is), or it cannot be imported.
    """
    if ":" in name:
        return load_reference(name)
    module = built_in(package, name, defines)
    if module is not None:
        return module
    if name in plugins(kind):
        return plugins(kind)[name].load()
    known = [*built_ins(package, defines), *plugins(kind)]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}; one of your own is module:Name"
    raise UserError(f"there is no {kind} {name!r}; {hint}{of_no_kind(name)}")
