"""Defines `Plan`: how a module runs on several devices, as tables of placements by patterns of names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import UserError
from weft.planner.parallelize.axes import OverTensor
from weft.planner.parallelize.explain import explain
from weft.planner.parallelize.mesh import mesh_of, mesh_text, start_processes
from weft.planner.parallelize.placements import PLACEMENTS, placement_of, placement_text
from weft.planner.parallelize.runtime import Runtime, matches
from weft.planner.parallelize.stage_run import StagedRuntime
from weft.planner.parallelize.stage_table import stages_of
from weft.planner.parallelize.write import PYTHON_DIGEST, write_plan

Table = Mapping[str, OverTensor]
OTHERS = ("islands", "recompute", "shard_parameters")  # tables of `Runtime`


@dataclass(frozen=True)
class Plan:
    """How a module runs on a mesh with the axes `dp`, `tp` and `tp2`.

    Each key of a table is a pattern of names with wildcards that match no dots: `layers.*.mlp.up.weight`. The last
    pattern that matches a name counts. All tensors of the module become DTensors on the mesh, so a plan decides speed
    and memory, not results.

    Attributes:
        dp: number of ranks of the data axis. Rows of inputs are sharded over `dp`.
        tp: number of ranks of the tensor axis.
        parameters: names of parameters -> placement over the tensor axes: one over `tp`, or a pair over `tp` and `tp2`;
            the others are replicated over them.
        inputs: names of modules -> likewise, of the first floating-point input of the module.
        outputs: names of modules -> likewise, of the first floating-point output of the module.
        islands: names of modules -> `rows` or `whole`. These modules run on plain tensors: on the rows of the rank's
            data shard (only right if no row depends on another), or on all rows.
        recompute: patterns of names of modules whose activations are recomputed in backward.
        shard_parameters: whether parameters are sharded over `dp` too (FSDP); otherwise, they are replicated.
        reshard_after_forward: whether gathered parameters are freed after forward, and gathered again for backward.
            Without effect with stages, where parameters are gathered once in a call.
        structure: digest of the module that the plan is for; an empty text fits any module.
        notes: pattern or topic -> reason and cost, for people.
        prediction: name -> predicted number, such as seconds of a step.
        tp2: number of ranks of the second tensor axis, whose ranks are neighbors.
        pp: number of ranks of the pipeline axis.
        stages: pipeline stages; for each, the name of the module with whose call the stage begins ("" for the first),
            and names of the modules and parameters whose parameters the stage has (`h.0..3` for `h.0` to `h.3`).
        schedule: name of a schedule of `torch.distributed.pipelining`.
        micro_batches: number of micro-batches of a call, with stages; a training run has its own number.
        loss: outputs -> loss, with stages; None if the module returns its loss. No file has it.
    """

    dp: int = 1
    tp: int = 1
    parameters: Table = field(default_factory=dict)
    inputs: Table = field(default_factory=dict)
    outputs: Table = field(default_factory=dict)
    islands: Mapping[str, str] = field(default_factory=dict)
    recompute: tuple[str, ...] = ()
    shard_parameters: bool = True
    reshard_after_forward: bool = True
    structure: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)
    prediction: Mapping[str, float] = field(default_factory=dict)
    tp2: int = 1
    pp: int = 1
    stages: tuple[tuple[str, tuple[str, ...]], ...] = ()
    schedule: str = "1F1B"
    micro_batches: int = 1
    loss: Callable[..., torch.Tensor] | None = field(default=None, compare=False, repr=False)

    @property
    def devices(self) -> int:
        """Number of ranks of the mesh."""
        return self.pp * self.dp * self.tp * self.tp2

    @property
    def sizes(self) -> dict[str, int]:
        """Name of each axis of a stage's mesh -> its number of ranks."""
        return {"dp": self.dp, "tp": self.tp, "tp2": self.tp2}

    def __str__(self) -> str:
        return mesh_text({"pp": self.pp, **self.sizes})

    def apply(
        self,
        module: nn.Module | Callable[[], nn.Module],
        mesh: DeviceMesh | None = None,
        *,
        inputs: str = "global",
        outputs: str = "global",
        dtype: torch.dtype | None = None,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        without_data: bool = False,
        loss: Callable[..., torch.Tensor] | None = None,
    ) -> nn.Module:
        """Makes a module run on the mesh, in place, and returns it. All ranks call `apply`.

        Parameters become DTensors; their names, the buffers and the module's class stay. The module then takes the
        inputs that it takes on one device, the same on all ranks, and returns full outputs as plain tensors. After
        `loss.backward()`, the gradient of each parameter is that of the module on one device. Create the optimizer
        after `apply`. Random numbers, such as dropout on CPUs, are those of one device if all ranks have the same seed.

        Parameters must be equal on all ranks. Parameters on the meta device are created in shards: from `state_dict`,
        or by each module's `reset_parameters()` (for modules of Transformers, `_init_weights`).

        With pipeline stages, a call returns the loss: that of the module, or `loss` of its outputs. It runs the
        schedule, forward and backward, on equal micro-batches, and returns the mean of their losses. Without gradients
        (`torch.no_grad()`), it only runs forward. A parameter of other stages than those of this rank has no data here.

        Args:
            module: the module, or a function without arguments that returns it.
            mesh: the devices; by default, all ranks. A process group is started from the environment of torchrun if
                there is none. Without this environment, a group of one rank is started.
            inputs: `global`: each rank passes all rows. `local`: each rank passes the rows of its data rank (ranks that
                differ only in `tp` pass the same rows).
            outputs: `global`: outputs have all rows. `local`: each rank gets the rows of its data rank, and computes
                the loss of these rows; gradients are those of the sum of the losses of all data ranks.
            dtype: dtype of the computation, such as bfloat16, to which parameters are cast before they are gathered.
                Parameters and gradients keep their own dtype.
            state_dict: parameters and buffers by name, full tensors, that replace those of the module.
            without_data: leaves tensors on the meta device where they are, to run the module without data.
            loss: outputs -> scalar loss, the mean over rows; only with stages. Default: the `loss` of the plan.

        Raises:
            UserError: the plan is for another module or another number of ranks, or a pattern matches no name.
        """
        for name, value in (("inputs", inputs), ("outputs", outputs)):
            if value not in ("global", "local"):
                raise UserError(f'{name}={value!r} is not supported; give "global" or "local"')
        model = module if isinstance(module, nn.Module) else module()
        self.check(model)
        start_processes(self.devices)
        runtime = self.runtime(mesh, inputs=inputs, outputs=outputs, loss=loss)
        return runtime.apply(model, state_dict, without_data, dtype)

    def runtime(
        self,
        mesh: DeviceMesh | None,
        *,
        inputs: str,
        outputs: str,
        loss: Callable[..., torch.Tensor] | None = None,
    ) -> Runtime:
        """Returns what makes a checked module run on the mesh; for the arguments see `apply`."""
        tables = {name: getattr(self, name) for name in (*PLACEMENTS, *OTHERS)}
        tables["local"] = [name for name, value in (("inputs", inputs), ("outputs", outputs)) if value == "local"]
        if self.stages:
            stages = stages_of(self.pp, self.stages, self.schedule, self.micro_batches)
            runtime = StagedRuntime(stages, self.sizes, mesh, loss or self.loss, **tables)
        else:
            runtime = Runtime(mesh_of(self.sizes, mesh), **tables)
        runtime.reshard_after_forward = self.reshard_after_forward
        return runtime

    def check(self, module: nn.Module) -> None:
        """Raises UserError if the plan is for another module, or if a pattern matches no name of the module."""
        if self.structure and self.structure != structure_of(module):
            raise UserError(
                f"the plan is for a module of the structure {self.structure}, and this {type(module).__name__} has "
                f"{structure_of(module)}; call weft.parallelize again"
            )
        if self.stages:
            stages_of(self.pp, self.stages, self.schedule, self.micro_batches).check(module, self.recompute)
        parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        modules = [name for name, _ in module.named_modules(remove_duplicate=False)]
        for topic, patterns, names in (
            ("parameters", self.parameters, parameters),
            ("inputs", self.inputs, modules),
            ("outputs", self.outputs, modules),
            ("islands", self.islands, modules),
            ("recompute", self.recompute, modules),
        ):
            for pattern in patterns:
                if not any(matches(name, pattern) for name in names):
                    kind = "parameter" if topic == "parameters" else "module"
                    raise UserError(
                        f"plan: {topic}: {pattern!r} matches no {kind} of {type(module).__name__}; remove it"
                    )

    def write(self, path: str | Path) -> None:
        """Writes the plan: `plan.py`, which needs only PyTorch, with `plan.json` beside it; or only `plan.json`."""
        write_plan(self, path)

    def explain(self) -> str:
        """Returns mesh, predictions and tables of the plan, one line for each pattern, with reasons and costs."""
        return explain(self)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as values of JSON."""
        found = asdict(replace(self, loss=None, **{name: {} for name in PLACEMENTS}))
        del found["loss"]
        for name in PLACEMENTS:
            found[name] = {pattern: placement_text(value) for pattern, value in getattr(self, name).items()}
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Plan:
        """Returns the plan that `to_json` returned the values of."""
        found: dict[str, Any] = dict(values) | {"recompute": tuple(values.get("recompute", ()))}
        found.pop(PYTHON_DIGEST, None)
        found["stages"] = tuple((begin, tuple(names)) for begin, names in values.get("stages", ()))
        for name in PLACEMENTS:
            found[name] = {pattern: placement_of(text) for pattern, text in values.get(name, {}).items()}
        return cls(**found)


def structure_of(module: nn.Module) -> str:
    """Returns a digest of a module's structure: its classes, and names and shapes of parameters and buffers."""
    digest = hashlib.sha256()
    for name, one in module.named_modules(remove_duplicate=False):
        digest.update(f"{name}:{type(one).__qualname__}\n".encode())
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        digest.update(f"{name}:{tuple(tensor.shape)}\n".encode())
    return digest.hexdigest()[:16]
