"""Writes plans as Python that needs only PyTorch.

`plan.py` has the tables of the plan, with the reason and cost of each line, and a function `apply`. The folder
`plan_runtime` beside it has the functions that carry the tables out. `plan.json` has the same tables with predictions.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.files import replace_file, report_write_errors
from weft.formatting import timing
from weft.planner.parallelize.placements import placement_text

PYTHON_DIGEST = "python_sha256"  # key of plan.json: digest of the plan.py that was written with it
# The files of this package that apply a plan; they import only PyTorch and each other.
RUNTIME = (
    "runtime", "containers", "functions", "operators", "islands", "materialize", "axes", "mesh", "torch_private",
    "stage_table", "stage_follow", "stage_trace", "stage_calls", "stage_run",
)  # fmt: skip
HEAD = '''\
"""How {title} runs on {devices} devices: {mesh}.{cost}

    import {module}
    model = {module}.apply(model)   # under torchrun, in each process; create the optimizer afterwards

Patterns are names with wildcards; the last that matches counts. Edit the tables as you like: they decide speed and
memory, not results. `weft parallelize --verify {file}` checks them. Written by `weft parallelize`; needs only PyTorch.
"""

from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: F401

DP, TP = {dp}, {tp}  # ranks of the data axis, which shards rows, and of the tensor axis
{second}SHARD_PARAMETERS = {shard}  # over dp too: gathered when their module runs
RESHARD_AFTER_FORWARD = {reshard}  # gathered parameters are freed, and gathered again for backward
STRUCTURE = {structure!r}  # digest of the module that this plan is for
'''

SECOND = "TP2 = {tp2}  # ranks of the second tensor axis; a pair of placements is over both\n"
TAIL = '''

def apply(model, mesh=None, inputs="global", loss=None):
    """Makes a module run by this plan, in place, and returns it. It takes the same inputs as before, on every rank.

    With pipeline stages, it returns the loss: its own, or `loss` of its outputs.
    """
    from {runtime}.start import apply_tables

    return apply_tables(model, globals(), mesh, inputs, loss)
'''

STAGED = """
PP = {pp}  # ranks of the pipeline axis
MICRO_BATCHES = {micro_batches}  # of a call; each has as many rows
SCHEDULE = "{schedule}"  # of torch.distributed.pipelining
STAGES = [  # the module with whose call the stage begins, and the modules and parameters that the stage has
{rows}]
"""

START = '''\
"""Carries out the tables of a plan."""

import hashlib
import math

from .mesh import mesh_of, start_processes
from .runtime import Runtime
from .stage_run import StagedRuntime
from .stage_table import stages_of


def structure_of(module):
    """Returns a digest of a module's structure: its classes, and names and shapes of parameters and buffers."""
{structure_body}

def apply_tables(model, tables, mesh=None, inputs="global", loss=None):
    """Makes a module run by the tables of a plan."""
    if inputs not in ("global", "local"):
        raise ValueError(f'inputs={{inputs!r}} is not supported; give "global" or "local"')
    if tables["STRUCTURE"] and tables["STRUCTURE"] != structure_of(model):
        raise ValueError(f"the plan is for another module than this {{type(model).__name__}}; plan again")
    pp, sizes = tables.get("PP", 1), {{"dp": tables["DP"], "tp": tables["TP"], "tp2": tables.get("TP2", 1)}}
    start_processes(pp * math.prod(sizes.values()))
    names = "parameters", "inputs", "outputs", "islands", "recompute", "shard_parameters"
    options = {{name: tables[name.upper()] for name in names}}
    options["local"] = ["inputs"] if inputs == "local" else []
    if tables.get("STAGES"):
        stages = stages_of(pp, tables["STAGES"], tables["SCHEDULE"], tables["MICRO_BATCHES"])
        runtime = StagedRuntime(stages, sizes, mesh, loss, **options)
    else:
        runtime = Runtime(mesh_of(sizes, mesh), **options)
    runtime.reshard_after_forward = tables.get("RESHARD_AFTER_FORWARD", True)
    return runtime.apply(model)
'''

COMMENTS = {
    "parameters": "over {axes}; all other parameters are replicated over {axes}",
    "inputs": "over {axes}, of the first floating-point input of a module",
    "outputs": "over {axes}, of the first floating-point output of a module",
    "islands": "modules that run on plain tensors: with the rank's rows, or with all",
}


def write_plan(plan: Any, path: str | Path, title: str = "a module") -> None:
    """Writes a plan: for `plan.py`, also `plan.json` and the folder `plan_runtime`; for `plan.json`, only this file.

    Raises:
        UserError: the name ends with neither `.py` nor `.json`, or the file exists and is no plan, or an edited one.
    """
    path = Path(path)
    check_out(path)
    content, text = plan.to_json(), python_text(plan, path, title) if path.suffix == ".py" else None
    if text is not None:
        content[PYTHON_DIGEST] = _digest(text.encode())
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path.with_suffix(".json"), json.dumps(content, indent=2) + "\n")
        if text is not None:
            replace_file(path, text)
            _write_runtime(path.with_name(f"{path.stem}_runtime"))


def check_out(path: Path) -> None:
    """Checks that a plan may be written to a path, before the search for it.

    Raises:
        UserError: the name ends with neither `.py` nor `.json`, or the file exists and is no plan, or an edited one.
    """
    if path.suffix not in (".py", ".json"):
        raise UserError(f"{path}: the name of a plan ends with .py or .json")
    if path.suffix == ".py" and not path.stem.isidentifier():
        raise UserError(f"{path}: {path.stem!r} is no name of a Python module; use letters, digits and _")
    twin = path.with_suffix(".json")
    written: Any = None
    with suppress(OSError, ValueError):
        written = json.loads(twin.read_text(encoding="utf-8"))
    if twin.exists() and not (isinstance(written, dict) and "structure" in written):
        raise UserError(f"{twin}: this file exists and is not a plan; choose another name for the plan")
    if path.suffix == ".py" and path.exists():
        digest = written.get(PYTHON_DIGEST) if written else None
        if not path.is_file() or _digest(path.read_bytes()) != digest:
            raise UserError(
                f"{path}: this file was not written by `weft parallelize`, or was edited; choose another name"
            )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def python_text(plan: Any, path: Path, title: str) -> str:
    """Returns the text of `plan.py`."""
    seconds = plan.prediction.get("step_seconds")
    cost = f" Predicted: {timing(seconds)} a step." if seconds else ""
    text = HEAD.format(
        title=title, devices=plan.devices, dp=plan.dp, tp=plan.tp, cost=cost, module=path.stem, file=path.name,
        mesh=plan, second=SECOND.format(tp2=plan.tp2) if plan.tp2 > 1 else "",
        shard=plan.shard_parameters, reshard=plan.reshard_after_forward,
        structure=plan.structure,
    )  # fmt: skip
    text += _stages_text(plan) if plan.stages else ""
    for topic, comment in COMMENTS.items():
        table, comment = getattr(plan, topic), comment.format(axes="tp and tp2" if plan.tp2 > 1 else "tp")
        text += f"\n{topic.upper()} = {{" + (f"  # {comment}\n" if table else "}" + f"  # {comment}\n")
        width = max((len(f"{_quoted(key)}: {_value(value)},") for key, value in table.items()), default=0)
        for key, value in table.items():
            entry = f"{_quoted(key)}: {_value(value)},"
            note = plan.notes.get(f"{topic} {key}", "")
            text += f"    {entry:{width}}" + (f"  # {note}" if note else "") + "\n"
        text += "}\n" if table else ""
    listed = ", ".join(map(_quoted, plan.recompute))
    text += f"\nRECOMPUTE = [{listed}]  # modules whose activations are computed again in backward\n"
    return text + TAIL.format(runtime=f"{path.stem}_runtime")


def _stages_text(plan: Any) -> str:
    rows = ""
    for number, (begin, names) in enumerate(plan.stages):
        note = plan.notes.get(f"stages {number}", "")
        listed = ", ".join(map(_quoted, names)) + ("," if len(names) == 1 else "")
        rows += f"    ({_quoted(begin)}, ({listed}))," + (f"  # {note}" if note else "") + "\n"
    return STAGED.format(pp=plan.pp, micro_batches=plan.micro_batches, schedule=plan.schedule, rows=rows)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _value(value: Any) -> str:
    return _quoted(value) if isinstance(value, str) else placement_text(value)


def _write_runtime(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    here = Path(__file__).parent
    replace_file(folder / "__init__.py", '"""Runs modules by plans of `weft parallelize`; needs only PyTorch."""\n')
    files = {name: here / f"{name}.py" for name in RUNTIME}
    # The decoder's pipelines need it too, and cannot import this package.
    files["pipeline_stage"] = here.parents[1] / "parallel/axes/torch_private.py"
    for name, file in files.items():
        text = file.read_text(encoding="utf-8")
        text = text.replace("from weft.parallel.axes.torch_private import", "from .pipeline_stage import")
        text = re.sub(r"from weft\.planner\.parallelize\.(\w+) import", r"from .\1 import", text)
        text = text.replace("from weft.errors import UserError", "UserError = ValueError")
        assert "weft." not in "".join(
            line for line in text.splitlines() if line.lstrip().startswith(("import", "from"))
        )
        replace_file(folder / f"{name}.py", text)
    source = ast.parse((here / "plan.py").read_text(encoding="utf-8"))
    body = next(node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "structure_of").body
    lines = "\n".join(f"    {line}" for node in body[1:] for line in ast.unparse(node).splitlines())
    replace_file(folder / "start.py", START.format(structure_body=lines + "\n"))
