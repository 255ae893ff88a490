"""`training.micro_batch_size: auto`: real trials of sizes, and a run that is the same as with the number."""

import json
from pathlib import Path

import pytest
from forked import run, weft_with_one_trial
from ruamel.yaml import YAML
from running import QUIET

from weft.cli.main import main
from weft.config.mesh import ParallelSection
from weft.config.run import RunConfig
from weft.planner.memory import memory_of
from weft.train.micro_batch import candidates, powers

# Its second rank has no memory for more than two sequences.
OBJECTIVE = """
import os
import sys
import torch
from weft.parallel.gradients import reduction
from weft.objectives.pretrain import Pretrain

# In a trial, gradients are reduced with every micro-batch.
if sys.argv[0].endswith("trial.py"):
    reduction.device_memory = lambda device: 1 << 20


class Hungry(Pretrain):
    def loss(self, outputs, batch):
        if len(batch.tokens) > 2 and os.environ.get("RANK") == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.")
        return super().loss(outputs, batch)
"""


def losses(folder: Path) -> list[tuple[float, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["grad_norm"]) for line in lines]


def weights(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("checkpoints/step-*2/*.safetensors"))]


def test_a_size_fits_on_all_ranks_and_changes_nothing_else(tmp_path, run_yaml, ranks):
    from pool import weft_command

    (tmp_path / "hungry.py").write_text(OBJECTIVE)
    changes = {
        "objective": {"type": "hungry:Hungry"},
        "schedule": {"type": "constant", "warmup_steps": 0},
        "log": {"every": 1} | QUIET,
        "checkpoint": {"every": 2},
        "model": {"num_hidden_layers": 1},
        "data": {"validation": None},
    }
    training = {"steps": 2}
    run_yaml(training=training | {"micro_batch_size": "auto"}, **changes)
    said = ranks.call(weft_with_one_trial, 2, tmp_path, ["train", "run.yaml"], seconds=200)
    assert [code for code, _ in said] == [0, 0], said
    run = tmp_path / "runs" / "demo"
    found = json.loads((run / "manifest.json").read_text())["micro_batch_trials"]
    assert [one["size"] for one in found["tried"]] == [1, 2]  # 8 sequences on each rank, of which 4 do not fit
    assert found["no_memory"] == 4
    chosen = found["chosen"]
    assert chosen in (1, 2)
    assert f"micro_batch_size: {chosen} (auto; " in said[0][1]
    assert "4 does not fit" in said[0][1]
    assert YAML().load(run / "config.yaml")["training"]["micro_batch_size"] == chosen
    # The prediction is for the reductions of the trial, whose gradients are sharded.
    predicted = {}
    for how in ("every", "last"):
        words = [f"parallel.reduce_gradients={how}", f"training.micro_batch_size={chosen}", "objective.type=pretrain"]
        config = RunConfig.load(tmp_path / "run.yaml", words, ranks=2)
        predicted[how] = round(max(one.total for one in memory_of(config, 2, dtype=config.training.dtype, cpu=True)))
    assert predicted["every"] < predicted["last"]
    assert found["predicted_bytes"] == predicted["every"]

    training |= {"micro_batch_size": chosen}
    number = run_yaml("number.yaml", run={"name": "number"}, training=training, **changes)
    again = ranks.call(weft_command, 2, tmp_path, ["train", number.name])
    assert [code for code, _ in again] == [0, 0], again
    assert losses(run) == losses(tmp_path / "runs" / "number")
    assert weights(run) == weights(tmp_path / "runs" / "number") != []

    # Resumed: the size is reused, and no trial runs.
    longer = ["train", "run.yaml", "training.steps=3"]
    resumed = ranks.call(weft_command, 2, tmp_path, longer)
    assert f"micro_batch_size: {chosen} (auto; tried in an earlier session)" in resumed[0][1]
    assert YAML().load(run / "config.yaml")["training"]["micro_batch_size"] == chosen


def test_candidates_divide_the_share_of_a_rank():
    assert candidates(12, 1, ParallelSection()) == [1, 2, 3, 4, 6, 12]
    assert powers(candidates(60, 1, ParallelSection())) == [1, 2, 4, 6, 15, 30, 60]
    # 1F1B over 4 ranks needs at least 4 micro-batches.
    assert candidates(12, 4, ParallelSection(pp=4)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"micro_batch_size": "most"}}, "training.micro_batch_size: must be"),
        ({"training": {"micro_batch_size": 0}}, "training.micro_batch_size: must be"),
    ],
)
def test_other_words_are_refused(run_yaml, capsys, changes, message):
    assert main(["config", "check", str(run_yaml(**changes))]) == 2
    assert message in capsys.readouterr().err


PROGRAM = """
import sys, torch
from weft.errors import is_out_of_memory
from weft.train.trial import limit_memory

limit_memory(200 << 20)
torch.ones(100 << 18)  # 100 MiB fit
try:
    torch.ones(400 << 18)
except RuntimeError as error:
    sys.exit(0 if is_out_of_memory(error) else repr(error))
sys.exit("400 MiB fit")
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_cpu_has_no_more_memory_than_its_limit(tmp_path):
    done = run(program=PROGRAM, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
