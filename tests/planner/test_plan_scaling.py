"""benchmarks/plan_scaling.py: predictions of tables, fits, and what is wrong with a table."""

import csv
import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_scaling.py"
COLUMNS = ["cluster", "params_b", "gpus", "samples_per_s", "grad_accum", "micro_batch", "seq_len", "sharding"]
COLUMNS += ["activation_checkpointing"]
ROWS = [
    ["a100-leonardo", "2.7", "8", "18", "1", "2", "4096", "FULL_SHARD", "False"],
    ["a100-leonardo", "2.7", "64", "120", "2", "2", "4096", "HYBRID_SHARD", "False"],
    ["leonardo-a100-64gb", "6.7", "16", "12", "1", "1", "4096", "FULL_SHARD", "True"],
]


@pytest.fixture
def table(tmp_path):
    """Returns a function that writes rows, with a factor on the measured throughput, and returns the path."""

    def write(rows=ROWS, factor: float = 1.0, name: str = "table.csv") -> str:
        path = tmp_path / name
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows([*row[:3], str(float(row[3]) * factor), *row[4:]] for row in rows)
        return str(path)

    return write


@pytest.fixture
def script(monkeypatch, capsys):
    """Returns a function that runs the script with arguments, and returns its exit code and both outputs."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        code = 0
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def errors_of(done: tuple[int, str, str]) -> tuple[list[float], float]:
    """Returns the printed error of each row, and the mean, in percent."""
    rows = [float(found) for found in re.findall(r"([+-][\d.]+)%$", done[1], re.M)]
    return rows, float(re.fullmatch(r"MAPE ([\d.]+)%", done[1].splitlines()[-1])[1])


def test_the_mean_is_that_of_the_rows_and_scales_with_the_table(table, script):
    rows, mean = errors_of(script(table()))
    assert len(rows) == len(ROWS)
    assert mean == pytest.approx(sum(map(abs, rows)) / len(rows), abs=0.11)
    doubled, _ = errors_of(script(table(factor=2)))
    assert doubled == pytest.approx([(100 + error) / 2 - 100 for error in rows], abs=0.11)


def test_a_fit_follows_a_machine_that_is_slower(table, script):
    slow = table(factor=0.7, name="slow.csv")
    _, before = errors_of(script(slow))
    _, after = errors_of(script(slow, "--fit", slow))
    assert after < before / 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"cluster": "leonardo"}, r"no hardware file 'leonardo'.*h100-mn5"),
        ({"params_b": "13"}, r"table.csv:2: params_b 13 is no known size"),
        ({"gpus": "-8"}, r"table.csv:2: gpus -8 is not a positive number"),
        ({"sharding": "SHARD"}, r"table.csv:2: sharding 'SHARD' is neither"),
        ({"micro_batch": ""}, r"table.csv:2: no micro_batch; each row needs"),
    ],
)
def test_what_is_wrong_with_a_table_has_a_line(table, script, row, message):
    changed = [row.get(name, value) for name, value in zip(COLUMNS, ROWS[0], strict=True)]
    path = table()
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, changed])
    code, _, error = script(path)
    assert code == 2
    assert re.search(message, error)
    assert error.count("\n") == 1
