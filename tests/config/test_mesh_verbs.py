"""What verbs say of meshes on the command line."""

import os

import pytest
from config_cases import DENSE, make_store, problems, write

from weft.cli.main import main


def test_check_tells_what_the_axes_do(capsys):
    write(DENSE.replace("dp_shard: -1", "tp: 2\n  cp: 2\n  pp: 2\n  dp_replicate: 2"))
    assert main(["config", "check", "run.yaml", "--no-data"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index("mesh 16 ranks, or a multiple: dp_shard fills")
    axes = [" ".join(line.split()[:2]) for line in lines[start + 1 : start + 5]]
    assert axes == ["pp 2", "dp_replicate 2", "cp 2", "tp 2"]
    assert "4, 4 layers" in lines[start + 1]
    assert "1f1b" in lines[start + 1]
    assert "32 sequences = 2 ranks x 8 micro-batches of up to 2" in "\n".join(lines)
    write(DENSE)
    assert main(["config", "check", "run.yaml", "--no-data"]) == 0
    assert "mesh" not in capsys.readouterr().out


def test_check_on_a_number_of_devices(capsys, monkeypatch):
    write(DENSE.replace("dp_shard: -1", "tp: 2"))
    monkeypatch.setenv("WORLD_SIZE", "16")  # what is asked for wins
    assert main(["config", "check", "run.yaml", "--no-data", "--devices", "8"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index("mesh 8 ranks")
    assert lines[start + 1].startswith("dp_shard 4 ")
    assert lines[start + 2].startswith("tp 2 ")
    assert "32 sequences = 4 ranks x 4 micro-batches of up to 2" in "\n".join(lines)
    assert main(["config", "check", "run.yaml", "--no-data", "--devices", "3"]) == 2
    assert "parallel: tp 2 does not divide the 3 ranks" in capsys.readouterr().err
    write(DENSE)
    assert main(["config", "check", "run.yaml", "--no-data", "--devices", "1"]) == 0
    assert "mesh        1 rank\n" in capsys.readouterr().out
    assert main(["config", "check", "run.yaml", "--no-data", "--devices", "0"]) == 2
    assert "--devices 0: use at least 1" in capsys.readouterr().err


def test_training_is_refused_before_it_starts(capsys):
    make_store("store", 10_000)
    write(DENSE.replace("dp_shard: -1", "dp_shard: 2"))
    assert main(["config", "check", "run.yaml"]) == 0
    capsys.readouterr()
    assert main(["train", "run.yaml", "--nproc", "3"]) == 2
    assert capsys.readouterr().err.startswith(
        "run.yaml:6: parallel: dp_replicate 1 x dp_shard 2 = 2, but the run has 3 ranks; set dp_shard: -1 to use all "
        "of them, or start 2 ranks (--nproc 2); nearest legal: parallel: {dp_shard: 3}"
    )
    assert main(["train", "run.yaml"]) == 2


def test_what_is_near_has_as_many_ranks_as_are_started(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    make_store("store", 10_000)
    write(DENSE)
    assert main(["train", "run.yaml", "--nproc", "3", "parallel.tp=3"]) == 2
    assert capsys.readouterr().err.endswith("nearest legal: parallel: {dp_shard: 3}\n")
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("parallel.tp=100000000000000000000", "parallel.tp: must be at most 1048576"),
        ("parallel.stage_layers=[2,2]", "parallel.stage_layers: [2, 2], but there is no pipeline"),
        ("parallel.stages_per_rank=2", "parallel.stages_per_rank: 2, but "),
        ("parallel.async_tp=true", "parallel.async_tp: there is no tensor parallelism"),
    ],
)
def test_sizes_without_end_and_settings_without_use(capsys, change, said):
    make_store("store", 10_000)
    write(DENSE)
    assert main(["config", "check", "run.yaml", change]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tensor_model_parallel_size: 2", "parallel.tp"),
        ("parallel: {tensor_parallel_degree: 2}", "tp"),
        ("parallel: {pipeline_parallel_degree: 2}", "pp"),
        ("parallel: {context_parallel_degree: 2}", "cp"),
        ("parallel: {expert_model_parallel_size: 2}", "ep"),
        ("parallel: {data_parallel_shard_degree: 2}", "dp_shard"),
        ("parallel: {data_parallel_replicate_degree: 2}", "dp_replicate"),
        ("zero_optimization: {stage: 2}", "parallel.zero_stage"),
        ("parallel: {sequence_parallel: true}", "tp"),
        ("parallel: {fsdp_auto_wrap_policy: x}", "layers_per_fsdp_unit"),
        ("parallel: {virtual_pipeline_model_parallel_size: 2}", "stages_per_rank"),
    ],
)
def test_names_of_elsewhere(written, meant):
    (line,) = problems(f"{DENSE.partition('parallel:')[0]}{written}\n")
    assert f"unknown key; did you mean {meant!r}?" in line


@pytest.mark.parametrize(
    ("written", "old", "new"),
    [
        ("schedule: gpipe, pp: 2", "schedule", "pp_schedule"),
        ("context: ring, cp: 2", "context", "cp_method"),
        ("layers_per_unit: 2", "layers_per_unit", "layers_per_fsdp_unit"),
    ],
)
def test_a_renamed_key_is_reported_with_its_new_name(written, old, new):
    before, _, _ = DENSE.partition("parallel:")
    (line,) = problems(f"{before}parallel: {{{written}}}\n")
    assert line.startswith(f"run.yaml:{before.count(chr(10)) + 1}: parallel.{old}: ")
    assert repr(new) in line
