"""Private names of torch: all are there, and all are used in one file."""

import ast

from source_trees import nodes, trees

from weft import torch_private

OTHERS = {
    "_from_config",
    "_attn_implementation",
    "_can_set_experts_implementation",
    "_keys_to_ignore_on_load_unexpected",
    "_exit",
    "_actions",
    "_option_string_actions",
    "_mmap",
}  # fmt: skip  (of transformers, os, argparse, numpy)


def test_this_pytorch_has_all_of_them():
    assert torch_private.missing() == []


def test_this_pytorch_has_those_of_other_packages_too(monkeypatch):
    from weft.checkpoint import torch_private as of_checkpoint
    from weft.kernels import torch_private as of_kernels
    from weft.parallel import torch_private as of_parallel
    from weft.parallel.axes import torch_private as of_axes
    from weft.planner import torch_private as of_planner
    from weft.planner.parallelize import torch_private as of_parallelize

    files = (of_parallelize, of_planner, of_kernels, of_checkpoint, of_parallel, of_axes)
    given = {name: reason for file in files for name, reason in file.NAMES.items()}
    names = tuple(torch_private.PrivateName(name, reason, "") for name, reason in given.items())
    monkeypatch.setattr(torch_private, "NAMES", names)
    assert torch_private.missing() == []


def test_one_that_is_gone_is_named_with_what_it_was_for(monkeypatch):
    gone = torch_private.PrivateName("torch.nn:Module._gone", "holds everything", "nothing works")
    monkeypatch.setattr(torch_private, "NAMES", (gone,))
    (message,) = torch_private.missing()
    assert "torch.nn.Module._gone" in message
    assert "holds everything" in message
    assert "nothing works" in message


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def names_of_weft(every):
    """Private names that Weft itself gives: functions, classes, variables, attributes."""
    found = set()
    for tree in every:
        for node in nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def private_names(tree, known):
    """Private names that are imported from torch, or looked up in what may be torch's, with their lines."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            if is_private(node.attr) and node.attr not in known:
                yield node.lineno, node.attr
            continue
        else:
            continue
        for name in named:
            parts = name.split(".")
            if parts[0] == "torch" and any(map(is_private, parts)):
                yield node.lineno, name


def test_no_other_file_uses_one():
    every = {path: tree for path, tree in trees().items() if path.rpartition("/")[2] != "torch_private.py"}
    known = names_of_weft(every.values()) | OTHERS
    found = [f"{path}:{line}: {name}" for path, tree in every.items() for line, name in private_names(tree, known)]
    assert not found, "move to src/weft/torch_private.py:\n" + "\n".join(found)


def test_names_in_many_spellings_are_found():
    text = """
import torch._inductor.config
from torch._C import _current_graph_task_id
from torch.utils import _pytree
def f(module, tensor):
    return module._parameters, tensor.untyped_storage()._cdata, torch.ops.aten._flash.default, self._own
"""
    found = {name for _, name in private_names(ast.parse(text), {"_own"})}
    assert found == {
        "torch._inductor.config", "torch._C._current_graph_task_id", "torch.utils._pytree", "_parameters", "_cdata",
        "_flash",
    }  # fmt: skip
