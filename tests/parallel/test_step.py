"""`Trainer.step` makes the steps of `fit`, bit for bit, on every mesh; ranks that disagree are told so."""

import pytest
from compare import Run, compare
from matrix import FEWER_STEPS, Case, ranks_of, write_run
from step_parts import several

DIFFERENT = "the ranks passed different batches, but with batches='global' all must pass the same one"


def train(runner, case, sequences):
    """The runs of a case by `fit` and by `step`, and what each rank returned."""
    size = {"batch_tokens": 32 * sequences}
    files = {"fit": write_run(runner.folder, case, steps=FEWER_STEPS, name="step-fit", training=size)}
    for name in ("global", "local"):
        files[name] = write_run(
            runner.folder, case, steps=FEWER_STEPS, name=f"step-{name}", data={"train": None}, training=size
        )
    no_end = {"training": {**size, "steps": None}, "checkpoint": {"every": None}}
    files["refused"] = write_run(runner.folder, case, name="step-refused", data={"train": None}, **no_end)
    found = runner.pool.call(several, ranks_of(case.mesh), files, sequences, seconds=120)
    return {name: Run(runner.folder / f"step-{name}") for name in files}, found


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2},
        pytest.param({"pp": 2}, marks=pytest.mark.matrix),
        pytest.param({"dp_shard": 2, "tp": 2}, marks=pytest.mark.matrix),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, marks=pytest.mark.matrix),
        pytest.param({"pp": 2, "dp_replicate": 2, "tp": 2, "pp_schedule": "1f1b"}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_steps_are_those_of_fit_and_mistakes_are_reported_on_all_ranks(runner, mesh):
    runs, found = train(runner, Case("dense", "dropout", mesh, layers=2 if "pp" in mesh else 1), 4)
    for form in ("global", "local"):
        difference = compare(runs["fit"], runs[form])
        assert difference.largest == 0, difference.wrong()
        assert all(rank[form] == found[0][form] for rank in found)  # metrics, also those of time
    assert [line["step"] for line in found[0]["global"]] == [*range(1, FEWER_STEPS + 1)]
    assert [line["step"] for line in found[0]["local"]] == [FEWER_STEPS]  # resumed
    interrupted, terminated = [False, "KeyboardInterrupt", 1], [False, True, "SystemExit", 2]
    ends = [*interrupted, "step-00000001", *terminated, "step-00000002"]
    assert all(rank["ends"] == ends for rank in found), found[0]["ends"]
    for rank in found:
        said = rank["refused"]
        for form in ("global", "local"):
            assert "rank 1: the batch is not valid: -300 is neither a token id" in said[f"{form}, one rank"]
            if "tp" in mesh or "cp" in mesh:
                axis = "tp 2" if "tp" in mesh else "cp 2"
                assert f"sequences of 31 tokens, which {axis} cannot split; pad" in said[f"{form}, length"]
        assert DIFFERENT in said["global, another"]
        assert DIFFERENT in said["global, positions"]
        if ranks_of(mesh) > 2 or "pp" in mesh:
            assert "choose the sequences by trainer.mesh.dp_rank" in said["local, another"]
        if "pp" not in mesh:  # there, the schedule supports neither size
            assert DIFFERENT in said["global, sizes"]
            assert "2 on data parallel rank 0, 4 on data parallel rank 1" in said["local, sizes"]
