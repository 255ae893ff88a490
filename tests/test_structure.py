"""The shape of the sources: who imports whom, and how long files and functions are."""

import ast
import graphlib
import re
import tomllib
from functools import cache

import grimp
import pytest
from source_trees import ROOT, dotted, nodes, sources, trees

# Modules that may import by name -> what they import in this way.
BY_NAME = {
    "__init__.py": "the public names, each when it is first asked for",
    "plugins.py": "built-ins of a package by name, and what users and installed packages name",
    "config/components.py": "the class that `type:` names",
    "data/stores/operations/filter.py": "the user's function",
    "families/__init__.py": "the families, which are the files of the folder",
}
LINES = 350
PARAMETERS, BODY = 8, 60
# Functions with more parameters or lines, and why.
LARGE_FUNCTIONS = {
    "generation/engine.py: __init__": "public: the options of the engine",
    "generation/text.py: generate": "public: the options of `weft generate`",
    "data/packing/pack.py: pack": "public: the options of `weft data pack`",
    "kernels/masks.py: attention_mask": "each is a fact about layers that chooses the form of their mask",
    "models/decoder.py: forward": "each is an input of an objective or of generation",
    "objectives/distill.py: __init__": "each is a key of `objective:`",
    "objectives/grpo.py: __init__": "each is a key of `objective:`",
    "objectives/online_dpo.py: __init__": "each is a key of `objective:`",
    "optim/muon.py: __init__": "each is a key of `optimizer:`",
}


@cache
def imports() -> dict[str, set[str]]:
    """Each module, and those that it imports: at its top or within a function, but not for type checkers alone."""
    graph = grimp.build_graph("weft", cache_dir=None, exclude_type_checking_imports=True)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


@pytest.mark.parametrize("depth", [2, 3, None], ids=["packages", "packages of packages", "modules"])
def test_imports_go_round_in_no_circle(depth):
    graph: dict[str, set[str]] = {}
    for module, imported in imports().items():
        here, *there = (".".join(name.split(".")[:depth]) for name in (module, *imported))
        graph.setdefault(here, set()).update(set(there) - {here})
    # It names the public classes, which are imported when they are first used.
    graph["weft"] = set()
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_modules_are_imported_by_name_only_where_the_name_is_given_at_run_time():
    found = {
        name
        for name, tree in trees().items()
        for node in nodes(tree)
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__")
    }
    assert found == set(BY_NAME)


def test_files_are_short():
    assert not {name for name, text in sources().items() if text.count("\n") > LINES}


def test_functions_are_short_and_take_few_parameters():
    found = set()
    for name, tree in trees().items():
        for node in nodes(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            taken = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            parameters = len(taken) - (taken[:1] in (["self"], ["cls"]))
            if parameters > PARAMETERS or (node.end_lineno or 0) - node.lineno + 1 > BODY:
                found.add(f"{name}: {node.name}")
    assert found == set(LARGE_FUNCTIONS)


def test_the_architecture_page_names_every_package_and_the_order_of_imports():
    top = ROOT.parent.parent
    page = (top / "docs" / "architecture.md").read_text("utf-8")
    layout = page.partition("```\nsrc/weft/\n")[2].partition("```")[0]
    entries = {path.name for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    named = [name for name in entries if re.search(rf"(^| ){name}[/, \n]", layout, re.M)]
    assert {name for name in entries if not name.startswith("__")} == set(named)
    linter = tomllib.loads((top / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    levels = [level.split("|") for level in linter["contracts"][0]["layers"]]
    checked = [sorted(name.strip() for name in level if "(" not in name) for level in levels]
    stated = page.partition("in `make lint`): `")[2].partition("`")[0]
    assert [sorted(name.strip() for name in level.split(",")) for level in stated.split("->")] == checked
