"""Predicted and measured throughput of published scaling tables, and their mean absolute percentage error.

    python benchmarks/plan_scaling.py CSV [--fit CSV] [--leave-one-out]

The columns are those of `shared/data/scaling_calibration.csv`: `samples_per_s` is predicted from `cluster`, `params_b`,
`gpus`, `grad_accum`, `micro_batch`, `seq_len`, `sharding` (FULL_SHARD, or HYBRID_SHARD within a node) and
`activation_checkpointing`. Without `--fit`, the numbers are those of the hardware files. With `--fit`, the numbers that
a hardware file lists under `fitted` are fitted to the rows of that file, from their values before fitting; the numbers
of a cluster without rows change by the mean factors of the other clusters.

The models are GPT-like. The shape of the 28B model is not published: 52 layers of width 6656 agree with the table's
column `mfu`, which counts 6 x 12 x layers x width^2 + 12 x layers x width x seq_len FLOPs per token.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from weft.config.run import RunConfig
from weft.errors import UserError
from weft.planner.hardware import Hardware, load_hardware
from weft.planner.step import Prediction, predict
from weft.planner.work import Stack

SHAPES = {2.7: (32, 2560, 32), 6.7: (32, 4096, 32), 28.0: (52, 6656, 52)}  # billions: layers, width, heads
COLUMNS = (
    "cluster", "params_b", "gpus", "samples_per_s", "grad_accum", "micro_batch", "seq_len", "sharding",
    "activation_checkpointing",
)  # fmt: skip
# The tables' framework keeps the residual stream in bfloat16 and the logits for backward.
STACK = Stack(residual_bytes=2, keeps_logits=True)
# Standard deviation of the logarithm of a number before it is fitted. Rates of devices are known within a quarter. What
# a shared network loses to other jobs is not known: these are the root mean squares of the changes of both fits.
SPREADS = {"congestion": 1.0, "latency_us": 1.4}
SPREAD = 0.25
ERROR = 0.03  # standard deviation of the logarithm of a measured throughput


@dataclass(frozen=True)
class Row:
    """One measured run."""

    cluster: str
    billions: float
    devices: int
    measured: float
    accumulation: int
    micro: int
    length: int
    hybrid: bool
    checkpointing: bool

    @property
    def label(self) -> str:
        sharding = "hybrid" if self.hybrid else "full"
        more = " ckpt" if self.checkpointing else ""
        batch = f"{self.micro:2} x {self.accumulation}"
        return f"{self.cluster:24} {self.billions:5g}B {self.devices:5} {batch} {sharding:6}{more:5}"


def read_rows(path: Path) -> list[Row]:
    """Reads a table.

    Raises:
        UserError: the file cannot be read, or a column or value is missing or wrong.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}; check the path", path) from error
    rows = []
    for number, line in enumerate(lines, 2):
        missing = [name for name in COLUMNS if not line.get(name)]
        if missing:
            raise UserError(f"no {', '.join(missing)}; each row needs {', '.join(COLUMNS)}", path, number)
        try:
            rows.append(_row(line))
        except (ValueError, KeyError) as error:
            raise UserError(f"{error}; correct the row", path, number) from error
    if not rows:
        raise UserError("no rows; add a header and one line per measured run", path)
    return rows


def _row(line: dict[str, str]) -> Row:
    sharding, checkpointing = line["sharding"].upper(), line["activation_checkpointing"].lower()
    if sharding not in ("FULL_SHARD", "HYBRID_SHARD"):
        raise ValueError(f"sharding {line['sharding']!r} is neither FULL_SHARD nor HYBRID_SHARD")
    if checkpointing not in ("true", "false"):
        raise ValueError(f"activation_checkpointing {line['activation_checkpointing']!r} is neither True nor False")
    numbers = {name: float(line[name]) for name in COLUMNS[1:7]}
    wrong = [name for name, value in numbers.items() if not (value > 0 and math.isfinite(value))]
    if wrong:
        raise ValueError(f"{wrong[0]} {line[wrong[0]]} is not a positive number")
    _shape(numbers["params_b"])
    return Row(
        line["cluster"], numbers["params_b"], int(numbers["gpus"]), numbers["samples_per_s"],
        int(numbers["grad_accum"]), int(numbers["micro_batch"]), int(numbers["seq_len"]),
        sharding == "HYBRID_SHARD", checkpointing == "true",
    )  # fmt: skip


def _shape(billions: float) -> tuple[int, int, int]:
    """Returns the shape of the published size that is nearest, which may differ by 5%."""
    nearest = min(SHAPES, key=lambda size: abs(math.log(size / billions)))
    if abs(math.log(nearest / billions)) > 0.05:
        known = ", ".join(f"{size:g}" for size in SHAPES)
        raise ValueError(f"params_b {billions:g} is no known size ({known})")
    return SHAPES[nearest]


@cache
def config_of(row: Row, node: int) -> RunConfig:
    """Returns the run of a row as a config."""
    layers, width, heads = _shape(row.billions)
    shard = min(node, row.devices) if row.hybrid else row.devices
    text = f"""
model: {{vocab_size: 50304, hidden_size: {width}, num_hidden_layers: {layers}, num_attention_heads: {heads}, mlp: plain,
        hidden_act: gelu, norm: layernorm, position: learned, max_position_embeddings: {row.length}}}
data: {{sequence_length: {row.length}}}
parallel: {{dp_replicate: {row.devices // shard}, dp_shard: {shard}, reduce_gradients: every}}
training: {{steps: 1, batch_tokens: {row.devices * row.micro * row.accumulation * row.length}, dtype: bfloat16,
           micro_batch_size: {row.micro}, reduce_dtype: bfloat16,
           activation_checkpointing: {"full" if row.checkpointing else "none"}}}
"""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.yaml"
        path.write_text(text)
        return RunConfig.load(path, check_data=False, ranks=row.devices)


def predicted(row: Row, hardware: Hardware) -> Prediction:
    """Returns the prediction of a row."""
    return predict(config_of(row, hardware.node), row.devices, hardware, stack=STACK)


# ---- fitting


def get(hardware: Hardware, key: str) -> float:
    """Returns the number of a dotted key, such as `levels[1].efficiency`."""
    value: Any = hardware.model_dump()
    for part in key.replace("[", ".").replace("]", "").split("."):
        value = value[int(part)] if part.isdecimal() else value[part]
    return float(value)


def replaced(hardware: Hardware, numbers: dict[str, float]) -> Hardware:
    """Returns the hardware with other numbers, unchecked: a fit may pass a bound."""
    tree: Any = hardware
    for key, value in numbers.items():
        tree = _with(tree, key.replace("[", ".").replace("]", "").split("."), value)
    return tree


def _with(node: Any, parts: Sequence[str], value: float) -> Any:
    if not parts:
        return value
    head, *rest = parts
    if isinstance(node, list):
        return [_with(item, rest, value) if str(place) == head else item for place, item in enumerate(node)]
    return node.model_copy(update={head: _with(getattr(node, head), rest, value)})


def fit(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Fits the numbers of each cluster to its rows. Returns the logarithm of each number's change, by hardware file.

    Minimizes the squared errors of the logarithm of throughput, and the squared changes of the numbers in units of
    their spread, by Gauss-Newton steps.
    """
    clusters = {row.cluster for row in rows}
    return {name: _fit_one([row for row in rows if row.cluster == name], load_hardware(name)) for name in clusters}


def changed(hardware: Hardware, logs: np.ndarray) -> Hardware:
    """Returns the hardware with its fitted numbers at exp(logs) times their values before fitting."""
    before = hardware.fitted
    return replaced(
        hardware, {key: value * math.exp(log) for (key, value), log in zip(before.items(), logs, strict=True)}
    )


def _fit_one(rows: Sequence[Row], hardware: Hardware) -> np.ndarray:
    size = len(hardware.fitted)
    spread = np.array([SPREADS.get(key.rpartition(".")[2], SPREAD) for key in hardware.fitted])

    def residuals(logs: np.ndarray) -> np.ndarray:
        machine = changed(hardware, logs)
        errors = [math.log(predicted(row, machine).samples_per_second / row.measured) / ERROR for row in rows]
        return np.array([*errors, *(logs / spread)])

    best = np.zeros(size)
    cost = float(np.sum(residuals(best) ** 2))
    damping = 1.0
    for _ in range(60):
        here = residuals(best)
        step = 1e-3
        jacobian = np.stack([(residuals(best + step * unit) - here) / step for unit in np.eye(size)], 1)
        move = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(size), -jacobian.T @ here)
        tried = best + move
        new = float(np.sum(residuals(tried) ** 2))
        if new < cost:
            done = cost - new < 1e-6 * cost
            best, cost, damping = tried, new, damping / 3
            if done:
                break
        else:
            damping *= 4
    return best


def machines(rows: Sequence[Row], fitted: Sequence[Row] | None) -> dict[str, Hardware]:
    """Returns the hardware of each cluster in `rows`.

    Args:
        fitted: the rows to fit on; None: the hardware files as they are.
    """
    names = dict.fromkeys(row.cluster for row in rows)
    if fitted is None:
        return {name: load_hardware(name) for name in names}
    logs: dict[str, Any] = fit(fitted)
    mean: np.ndarray = np.mean(np.stack(list(logs.values())), axis=0)
    return {name: changed(load_hardware(name), logs.get(name, mean)) for name in names}


# ---- reports


def report(rows: Sequence[Row], predictions: Sequence[Prediction]) -> float:
    """Prints a line for each row, and returns the mean absolute percentage error."""
    print(f"{'cluster':24} {'size':>6} {'GPUs':>5} micro sharding {'measured':>13} {'predicted':>9} {'error':>7}")
    errors = []
    for row, one in zip(rows, predictions, strict=True):
        error = one.samples_per_second / row.measured - 1
        errors.append(100 * abs(error))
        print(f"{row.label} {row.measured:9.2f} {one.samples_per_second:9.2f} {error:+7.1%}")
    return fmean(errors)


def leave_one_out(rows: Sequence[Row]) -> list[Prediction]:
    """Returns the prediction of each row by a fit to all other rows."""
    found = []
    for number, row in enumerate(rows):
        others = [*rows[:number], *rows[number + 1 :]]
        found.append(predicted(row, machines([row], others)[row.cluster]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, help="table of measured runs")
    parser.add_argument("--fit", type=Path, metavar="CSV", help="table of the runs to fit the hardware's numbers to")
    parser.add_argument("--leave-one-out", action="store_true", help="predict each row by a fit to the other rows")
    chosen = parser.parse_args()
    try:
        rows = read_rows(chosen.csv)
        if chosen.leave_one_out:
            predictions = leave_one_out(rows)
        else:
            found = machines(rows, read_rows(chosen.fit) if chosen.fit else None)
            for name, hardware in found.items():
                numbers = ", ".join(f"{key} {get(hardware, key):.4g}" for key in hardware.fitted)
                print(f"{name}: {numbers or 'no fitted number'}")
            predictions = [predicted(row, found[row.cluster]) for row in rows]
    except UserError as error:
        parser.exit(2, f"{error}\n")
    print(f"MAPE {report(rows, predictions):.1f}%")


if __name__ == "__main__":
    main()
