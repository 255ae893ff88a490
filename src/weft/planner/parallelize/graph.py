"""Defines `Graph`: the operations of a module, converted from an exported program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx, nn

from weft.errors import UserError
from weft.planner.parallelize.custom_operations import NODE, operation_of
from weft.torch_private import tree_leaves


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Number of bytes of the tensor."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Ref:
    """A tensor of the graph: the output `index` of the node `node`."""

    node: int
    index: int = 0


@dataclass
class Node:
    """A node of the graph.

    Attributes:
        name: the name of the node; for a parameter, its name in the module.
        kind: `parameter`, `buffer`, `input`, `op` or `output`.
        target: the operator of an `op`.
        args: positional arguments of an operator; a tensor is a `Ref`.
        kwargs: keyword arguments, likewise.
        outputs: the tensors that the node returns; None for a result that is no tensor.
        modules: names of the modules whose forward calls the operator, from outer to inner.
        source: file and line of the call.
        times: how often the node runs.
        trained: for each output, whether it has a gradient.
    """

    name: str
    kind: str
    target: Any = None
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Meta | None, ...] = ()
    modules: tuple[str, ...] = ()
    source: str = ""
    times: int = 1
    trained: tuple[bool, ...] = ()

    @property
    def inputs(self) -> list[Ref]:
        """The tensors that the operator takes, in order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)]


@dataclass(frozen=True)
class Repeat:
    """Blocks of the same structure.

    Attributes:
        paths: names of the blocks; the graph has the operations of the first.
        entry: what the first block takes in place of the result of a block before; None if blocks are not chained.
        result: what the first block passes to the next block.
    """

    paths: tuple[str, ...]
    entry: Ref | None
    result: Ref | None


@dataclass
class Graph:
    """The operations of a module, in the order in which they run.

    Attributes:
        nodes: the nodes.
        repeats: the blocks that repeat.
        tied: other names of a parameter -> the name of its node.
        islands: names of modules whose operations depend on values of tensors -> where and why.
    """

    nodes: list[Node]
    repeats: list[Repeat]
    tied: dict[str, str]
    islands: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The size of the first dimension of the inputs: the rows of a batch."""
        sizes = [
            node.outputs[0].shape[0]
            for node in self.nodes
            if node.kind == "input" and node.outputs[0] and node.outputs[0].shape
        ]
        return Counter(sizes).most_common(1)[0][0] if sizes else 1

    def node(self, ref: Ref) -> Meta:
        """Returns shape and dtype of a tensor of the graph."""
        found = self.nodes[ref.node].outputs[ref.index]
        assert found is not None
        return found


class DataDependentError(UserError):
    """A module's operations depend on values of tensors.

    Attributes:
        module: the innermost module whose forward was running.
    """

    module: nn.Module | None = None


def depends_on_values(where: str, inner: nn.Module) -> DataDependentError:
    """Returns the error for a module whose operations depend on values of tensors.

    Args:
        where: file and line.
    """
    found = DataDependentError(
        f"{where}: {type(inner).__name__} depends on values of tensors (they decide shapes or branches); write it with "
        "torch.where or masks, or put it into a module of its own, which then runs on plain tensors"
    )
    found.module = inner
    return found


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')


def _source(trace: str | None) -> str:
    frames = [m for m in _FRAME.finditer(trace or "") if "/torch/" not in m["file"]]
    return f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""


IGNORED = ("_assert_tensor_metadata", "_assert_async", "sym_constrain_range", "_assert_scalar", "sym_size")
REGION = "wrap_with_"  # operators that call a part of the program, such as that within `torch.no_grad()`
GRADIENTS = "wrap_with_set_grad_enabled"  # (enabled, part, tensors...)


def convert(
    program: torch.export.ExportedProgram,
    module: nn.Module,
    groups: list[tuple[str, ...]],
    chained: Collection[tuple[str, ...]],
) -> Graph:
    """Converts an exported program to a graph.

    Args:
        groups: names of repeated blocks, of which the program has the first.
        chained: the groups in which each block takes the result of the block before.

    Raises:
        DataDependentError: the shape of a result depends on values of tensors.
    """
    found = _Conversion(program, module, groups)
    for one in program.graph.nodes:
        if one.op == "placeholder":
            found.placeholder(one)
    used = tuple(ref for ref in found.walk(program.graph_module) if ref is not None)
    found.nodes.append(Node("output", "output", args=used))
    graph = Graph(found.nodes, [], found.tied)
    graph.repeats = [_repeat(graph, group, group in chained) for group in groups]
    return graph


class _Conversion:
    """The nodes of a graph while a program is converted."""

    def __init__(self, program: torch.export.ExportedProgram, module: nn.Module, groups: list[tuple[str, ...]]):
        self.signature, self.module = program.graph_signature, module
        self.nodes: list[Node] = []
        self.refs: dict[fx.Node, Ref] = {}
        self.repeated = {group[0]: len(group) for group in groups}
        self.placed: dict[str, Ref] = {}
        self.regions: dict[fx.Node, list[Ref | None]] = {}  # calls of parts of the program -> results
        self.graded = True  # whether gradients are on
        names: dict[int, str] = {}
        self.tied: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if names.setdefault(id(parameter), name) != name:
                self.tied[name] = names[id(parameter)]

    def add(self, one: fx.Node, node: Node) -> None:
        """Adds the node of a node of the program."""
        self.refs[one] = Ref(len(self.nodes))
        self.nodes.append(node)

    def times(self, path: str) -> int:
        """Returns how often a module runs: the product of the numbers of the repeated blocks around it."""
        inside = [n for first, n in self.repeated.items() if path == first or path.startswith(f"{first}.")]
        return prod(inside)

    def placeholder(self, one: fx.Node) -> None:
        """Adds a parameter, a buffer or an input."""
        node = _placeholder(one, self.signature, self.module, self.tied)
        if node is None:
            return
        if node.kind == "parameter" and node.name in self.placed:
            self.refs[one] = self.placed[node.name]
            return
        node.times = self.times(node.name) if node.kind != "input" else 1
        self.add(one, node)
        if node.kind == "parameter":
            self.placed[node.name] = self.refs[one]

    def walk(self, region: fx.GraphModule) -> list[Ref | None]:
        """Adds the operations of a program, or of a part of it. Returns the references of its results."""
        for one in region.graph.nodes:
            if one.op == "call_function":
                self.call(one)
            elif one.op == "output":
                leaves = tree_leaves(one.args[0])
                return [self.refs.get(leaf) if isinstance(leaf, fx.Node) else None for leaf in leaves]
            elif one.op == "get_attr" and isinstance(value := getattr(region, str(one.target), None), torch.Tensor):
                self.add(one, Node(str(one.target), "buffer", outputs=(_meta(value),), trained=(False,)))
        return []

    def enter(self, one: fx.Node) -> None:
        """Adds the operations of a part of the program that an operator calls, in the place of the operator."""
        place = next(at for at, arg in enumerate(one.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
        region: Any = getattr(one.graph.owning_module, str(getattr(one.args[place], "target", "")))
        given = [node for node in region.graph.nodes if node.op == "placeholder"]
        pairs = zip(given, one.args[place + 1 :], strict=True)
        self.refs |= {inner: self.refs[arg] for inner, arg in pairs if isinstance(arg, fx.Node) and arg in self.refs}
        before = self.graded
        self.graded = bool(one.args[0]) if GRADIENTS in str(one.target) else before
        self.regions[one] = self.walk(region)
        self.graded = before

    def call(self, one: fx.Node) -> None:
        """Adds an operation; a choice among the results of another one becomes a reference."""
        if any(word in str(one.target) for word in IGNORED):
            return
        if REGION in str(one.target):
            self.enter(one)
            return
        if getattr(one.target, "__name__", "") == "getitem":
            source, index = one.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            ref = self.regions[source][index] if source in self.regions else Ref(self.refs[source].node, index)
            if ref is not None:
                self.refs[one] = ref
            return
        _refuse_symbols(one, self.module)
        node = _operation(one, self.refs)
        node.times = self.times(node.modules[-1]) if node.modules else 1
        node.trained = _trained(node, self.nodes) if self.graded else tuple(False for _ in node.outputs)
        self.add(one, node)


def _repeat(graph: Graph, group: tuple[str, ...], chained: bool) -> Repeat:
    """Returns a group of blocks; for chained ones, with what the first block takes and returns."""
    within = {place for place, node in enumerate(graph.nodes) if group[0] in node.modules}
    uses = [ref for place, node in enumerate(graph.nodes) if place not in within for ref in node.inputs]
    results = [ref for ref in uses if ref.node in within]
    if not chained or not results:
        return Repeat(group, None, None)
    like = graph.node(results[-1])
    entries = [ref for place in sorted(within) for ref in graph.nodes[place].inputs if ref.node not in within]
    streams = [r for r in entries if graph.nodes[r.node].kind in ("op", "input") and graph.node(r) == like]
    return Repeat(group, streams[0], results[-1]) if streams else Repeat(group, None, None)


def _meta(value: Any) -> Meta | None:
    return Meta(tuple(map(int, value.shape)), value.dtype) if isinstance(value, torch.Tensor) else None


def _placeholder(one: fx.Node, signature: Any, module: nn.Module, tied: Mapping[str, str]) -> Node | None:
    outputs = (_meta(one.meta.get("val")),)
    if outputs[0] is None:
        return None
    name = one.name
    if name in signature.inputs_to_parameters:
        full = signature.inputs_to_parameters[name]
        owner = full.rpartition(".")[0]
        trained = module.get_parameter(full).requires_grad
        modules = _path(owner)
        return Node(tied.get(full, full), "parameter", outputs=outputs, modules=modules, trained=(trained,))
    if name in signature.inputs_to_buffers:
        full = signature.inputs_to_buffers[name]
        return Node(full, "buffer", outputs=outputs, modules=_path(full.rpartition(".")[0]), trained=(False,))
    kind = "buffer" if name in signature.inputs_to_lifted_tensor_constants else "input"
    return Node(name, kind, outputs=outputs, trained=(False,))


def _refuse_symbols(one: fx.Node, module: nn.Module) -> None:
    """Raises DataDependentError for an operation whose result has a shape that depends on values."""
    leaves = tree_leaves(one.meta.get("val"))
    sizes = [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape]
    if all(isinstance(size, int) for size in sizes) and not any(isinstance(leaf, torch.SymInt) for leaf in leaves):
        return
    paths = [path for path, _ in (one.meta.get("nn_module_stack") or {}).values() if path]
    inner = module.get_submodule(paths[-1].partition("@")[0]) if paths else module
    raise depends_on_values(_source(one.stack_trace) or "the module", inner)


def _path(name: str) -> tuple[str, ...]:
    words = name.split(".") if name else []
    return tuple(".".join(words[: place + 1]) for place in range(len(words)))


def _operation(one: fx.Node, refs: Mapping[fx.Node, Any]) -> Node:
    def convert(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return refs.get(value)
        if isinstance(value, tuple | list):
            return type(value)(map(convert, value))
        return value

    value = one.meta.get("val")
    outputs = tuple(map(_meta, value)) if isinstance(value, tuple | list) else (_meta(value),)
    # The key of a call is the module's path; later calls of the same module have a suffix.
    modules = [path for path, _ in (one.meta.get("nn_module_stack") or {}).values() if path]
    kwargs = {key: convert(item) for key, item in one.kwargs.items()}
    target, args = one.target, tuple(map(convert, one.args))
    if str(target) == NODE:
        target, args, kwargs = operation_of(args[1], args[0])
    return Node(
        one.name, "op", target, args, kwargs, outputs,
        tuple(path.partition("@")[0] for path in modules), _source(one.stack_trace),
    )  # fmt: skip


def _trained(node: Node, nodes: Sequence[Node]) -> tuple[bool, ...]:
    some = any(nodes[ref.node].trained[ref.index] for ref in node.inputs)
    return tuple(some and one is not None and one.dtype.is_floating_point for one in node.outputs)
