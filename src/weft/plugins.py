"""Finds and loads plugins: components, subcommands and formats of installed packages (docs/plugins.md).

A package declares its plugins as entry points of the group `weft.plugins`:

    [project.entry-points."weft.plugins"]
    "verb.publish" = "my_package.publish"             # weft publish
    "export.mine" = "my_package.mine"                 # weft export --to mine
    "optimizer.lion" = "my_package.lion:Lion"         # optimizer: {type: lion}

The name of an entry point is `KIND.NAME`, and its value is `module` or `module:Name`. Built-in components take
precedence over plugins. Plugins are found without importing them.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, NamedTuple

from weft.errors import UserError, describe_exception, describe_user_exception

GROUP = "weft.plugins"
# The kinds from `optimizer` on are components. A config gives a name or module:Class (weft.config.components).
KINDS = (
    "verb", "source", "export", "optimizer", "schedule", "objective", "tracker", "callback", "metric", "dataset",
    "model", "attention_pattern",
)  # fmt: skip


class Plugin(NamedTuple):
    """A plugin: one entry point of an installed package.

    Attributes:
        kind: one of `KINDS`.
        name: the name of the plugin within its kind.
        reference: the object to import: `module` or `module:Name`.
        package: name and version of the installed package.
    """

    kind: str
    name: str
    reference: str
    package: str

    def load(self) -> Any:
        """Imports and returns the plugin's module or object.

        Raises:
            UserError: the import fails. The message names the package.
        """
        try:
            return load_reference(self.reference)
        except Exception as error:
            what = f"the plugin {self.kind}.{self.name} of {self.package} cannot be imported"
            if isinstance(error, UserError):
                raise UserError(f"{what}: {error}") from error
            machinery = ("<", str(Path(__file__).parent), str(Path(importlib.__file__).parent))
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
            own = [file for file in files if not file.startswith(machinery)]
            description = describe_user_exception(error, own[-1]) if own else describe_exception(error)
            raise UserError(f"{what}: {description}; update or uninstall the package") from error


@cache
def _installed() -> tuple[Plugin, ...]:
    from importlib.metadata import entry_points  # takes 25 ms, so only for names that are not built in

    found = []
    for point in entry_points(group=GROUP):
        kind, _, name = point.name.partition(".")
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unnamed package"
        found.append(Plugin(kind, name, point.value.replace(" ", ""), package))
    return tuple(found)


def plugins(kind: str) -> dict[str, Plugin]:
    """Returns the plugins of one kind ("verb", "export", "source", "optimizer", ...) by name, without importing them.

    Raises:
        UserError: two packages provide different plugins of the same name.
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


def unknown_kind_hint(name: str) -> str:
    """Returns a hint if a package declares a plugin `name` whose kind is not in `KINDS`; otherwise ""."""
    for plugin in _installed():
        if plugin.name == name and plugin.kind not in KINDS:
            return f"; {plugin.package} declares {plugin.kind}.{name}, but the kinds of plugins are {', '.join(KINDS)}"
    return ""


def load_reference(reference: str) -> Any:
    """Imports `module` or `module:Name`, and returns the module or object.

    Adds the working directory to the import path.

    Raises:
        UserError: the module or the name does not exist. Other exceptions of the module are not caught.
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
            raise UserError(f"{reference!r}: the module {module!r} has no {name!r}; check the spelling")
        found = getattr(found, part)
    return found


def built_in(package: ModuleType, name: str, defines: str) -> ModuleType | None:
    """Imports and returns the module of the built-in `name` in `package`; None if there is no such built-in.

    Args:
        name: name of the built-in. It is the module's name with `-` in place of `_`, and without the final `_` of
            modules such as `import_`.
        defines: a name that every built-in's module defines. Modules without this name are helpers.
    """
    stem = name.replace("-", "_") + "_" * iskeyword(name)
    if not stem.isidentifier() or find_spec(f"{package.__name__}.{stem}") is None:
        return None
    module = import_module(f"{package.__name__}.{stem}")
    return module if hasattr(module, defines) else None


def built_ins(package: ModuleType, defines: str) -> dict[str, ModuleType]:
    """Imports and returns the modules of all built-ins of a package, by name. `defines`: see `built_in`."""
    names = (stem.removesuffix("_").replace("_", "-") for _, stem, _ in iter_modules(package.__path__))
    found = {name: built_in(package, name, defines) for name in names}
    return {name: module for name, module in found.items() if module is not None}


def find(kind: str, name: str, package: ModuleType, defines: str) -> Any:
    """Returns the module or object that a name refers to.

    Args:
        kind: the kind of plugin, one of `KINDS`.
        name: name of a built-in or of a plugin, or `module:Name`.
        package: the package whose modules are the built-ins.
        defines: see `built_in`.

    Raises:
        UserError: the name is unknown (the message lists the known names), or its module cannot be imported.
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
    hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}, or give module:Name"
    raise UserError(f"there is no {kind} {name!r}; {hint}{unknown_kind_hint(name)}")
