"""Training only the new rows of the embedding and the head: all other bits stay, on any number of ranks."""

import pytest
import torch
from running import QUIET, losses, metrics, train, weights

from weft.config.run import RunConfig
from weft.errors import ConfigError
from weft.models.build import build_model
from weft.models.initialize import initialize

FIRST = 300
ROWS = ("embed_tokens.weight", "lm_head.weight")


@pytest.fixture
def write(run_yaml):
    """Writes runs of 3 steps that train rows from 300 on; decay and momentum would move the others."""

    def write(name, tied=False, **changes):
        training = {"steps": 3, "batch_tokens": 512, "dtype": "float64", "only_rows_from": FIRST}
        return run_yaml(
            f"{name}.yaml",
            run={"name": name},
            model={"tie_word_embeddings": tied, "embedding_dropout": 0.1} | changes.pop("model", {}),
            data={"validation": None},
            schedule={"type": "constant", "warmup_steps": 0},
            training=training | changes.pop("training", {}),
            log=QUIET,
            **changes,
        )

    return write


def initial(config):
    model = build_model(config.model).to(torch.float64)
    initialize(model, config.run.seed)
    return model.state_dict()


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def assert_only_new_rows_moved(file, run, first=FIRST):
    before, after = initial(RunConfig.load(file)), weights(run)
    assert before.keys() == after.keys()
    for name, value in after.items():
        old = first if name in ROWS else len(value)
        assert torch.equal(bits(value[:old]), bits(before[name][:old])), name
        if name in ROWS:
            assert (value[old:] != before[name][old:]).any(dim=1).all(), name


@pytest.mark.xdist_group("ranks")
def test_nothing_else_moves_alone_and_on_two_ranks(runner, write, tmp_path):
    alone, both = write("alone"), write("both", parallel={"dp_shard": 2})
    runner.pool.run(both, 2, seconds=120)
    assert train(alone) == 0
    for file, run in ((alone, "alone"), (both, "both")):
        assert_only_new_rows_moved(file, tmp_path / "runs" / run)
    for one, other in zip(*(losses(tmp_path / "runs" / run) for run in ("alone", "both")), strict=True):
        assert one == pytest.approx(other, rel=0, abs=1e-9)
    one, other = (weights(tmp_path / "runs" / run) for run in ("alone", "both"))
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-9)


def test_after_a_resume_and_with_another_first_row(write, tmp_path):
    """Of a tied model; the rows between the two first ones have momentum by then: it must not move them."""
    straight, broken = write("straight", tied=True), write("broken", tied=True, training={"steps": 2})
    assert train(straight) == 0
    assert_only_new_rows_moved(straight, tmp_path / "runs" / "straight")
    assert train(broken) == 0
    assert train(broken, "training.steps=3") == 0
    one, other = (weights(tmp_path / "runs" / run) for run in ("straight", "broken"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())

    assert train(broken, "training.steps=5", "training.only_rows_from=400", "--accept-changes") == 0
    for name, value in weights(tmp_path / "runs" / "broken").items():
        old = 400 if name in ROWS else len(value)
        assert torch.equal(bits(value[:old]), bits(other[name][:old])), name
    assert not torch.equal(weights(tmp_path / "runs" / "broken")[ROWS[0]][400:], other[ROWS[0]][400:])


def test_other_optimizers_and_experts_and_blocks_that_are_recomputed(write, tmp_path):
    muon = write("muon", optimizer={"type": "muon", "lr": 0.02, "weight_decay": 0.1, "betas": [0.9, 0.95]})
    assert train(muon) == 0
    assert_only_new_rows_moved(muon, tmp_path / "runs" / "muon")
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "correction_bias": True, "router_aux_loss_coef": 0.01}
    experts = write("experts", model={"moe": moe})  # whose bias on the choice moves without a gradient
    assert train(experts) == 0
    assert any("correction_bias" in name for name in weights(tmp_path / "runs" / "experts"))
    assert_only_new_rows_moved(experts, tmp_path / "runs" / "experts")
    plain, recomputed = write("plain"), write("again", training={"activation_checkpointing": "full"})
    assert train(plain) == train(recomputed) == 0
    assert losses(tmp_path / "runs" / "plain") == losses(tmp_path / "runs" / "again")


def test_the_norm_and_the_update_are_those_of_the_new_rows(write, tmp_path):
    """Against plain PyTorch: the whole gradient, of which all but the new rows is thrown away."""
    file = write("one", training={"steps": 1, "dtype": "float32", "grad_clip": None})
    assert train(file, "model.embedding_dropout=0.0") == 0
    everything = write("all", training={"steps": 1, "dtype": "float32", "grad_clip": None, "only_rows_from": None})
    assert train(everything, "model.embedding_dropout=0.0") == 0
    one, other = (weights(tmp_path / "runs" / run) for run in ("one", "all"))
    for name in ROWS:  # AdamW is elementwise, and nothing was clipped
        torch.testing.assert_close(one[name][FIRST:], other[name][FIRST:], rtol=0, atol=1e-7)
    norms = [metrics(tmp_path / "runs" / run)[0]["grad_norm"] for run in ("one", "all")]
    assert 0 < norms[0] < norms[1]


def test_what_is_refused_before_anything_is_built(write, tmp_path):
    for changes, message in (
        ({"training": {"only_rows_from": 512}}, "training.only_rows_from: 512, .* rows 0 to 511 .*`weft resize`"),
        ({"model": {"type": "mine:Model"}}, "training.only_rows_from: .*built-in"),
    ):
        file = write("bad", **{key: value for key, value in changes.items() if key == "training"})
        if "model" in changes:
            (tmp_path / "mine.py").write_text("class Model:\n    def __init__(self):\n        pass\n")
            lines = [line for line in file.read_text().splitlines() if not line.startswith("model:")]
            file.write_text("\n".join([*lines, 'model: {type: "mine:Model"}', ""]))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            with pytest.raises(ConfigError, match=message):
                RunConfig.load(file)
