"""Parts of the user's own, by `type: module:Class` from the working directory."""

import contextlib
import os
import re
from pathlib import Path

import pytest
import torch
from running import QUIET, assert_same_weights, losses, metrics, replaced, train
from torch.nn import functional as F

import weft
from weft.observe.logs import open_log

PARTS = '''
import numpy as np
import torch
from torch import nn


class Fixed:
    """The same few sequences for ever; `weight` of every token."""

    def __init__(self, *, sequences: int = 8, weight: float = 1.0):
        generator = np.random.default_rng(3)
        self.tokens = generator.integers(0, 512, (sequences, 64))
        self.weight = weight

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        item = {"tokens": self.tokens[i]}
        if self.weight != 1.0:
            item["weight"] = np.full(64, self.weight, dtype=np.float32)
        return item


class Bigram(nn.Module):
    """Tokens to logits, and nothing else."""

    def __init__(self, *, width: int = 8):
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.head = nn.Linear(width, 512)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class Halving:
    def __init__(self, total_steps: int, *, warmup_steps: int = 0):
        self.total_steps = total_steps

    def __call__(self, step):
        return 0.5**step


class Boom(torch.optim.SGD):
    def __init__(self, params, *, lr: float = 0.1, at: int = 0):
        super().__init__(params, lr)
        self.at = at
        if at == 0:
            raise ValueError("boom,\\nand more")

    def step(self):
        if self.at == 1:
            torch.zeros(2) + torch.zeros(3)
        super().step()


class NoRate(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, 0.1)
        del self.defaults["lr"]  # which the loop reads in its first step, when everything is open


class Tracks:
    def __init__(self, run):
        self.path = run.path

    def log(self, step, metrics): ...

    def text(self, step, name, text): ...

    def close(self):
        (self.path / "closed").touch()


class Bad:
    """Next-token prediction until `at` batches were seen; then no number."""

    def __init__(self, *, at: int = 3):
        self.at, self.seen = at, 0

    def inputs(self, batch):
        return {"tokens": batch.tokens, "labels": batch.labels}

    def weight(self, batch):
        return batch.weight.sum()

    def loss(self, outputs, batch):
        self.seen += 1
        factor = float("nan") if self.seen >= self.at else 1.0
        return -(outputs * batch.weight).sum() * factor
'''


@pytest.fixture
def parts(run_yaml, tmp_path, monkeypatch):
    """Writes a run of a few steps, over one fixed batch, with parts of the user's own."""
    (tmp_path / "my_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)

    def write(name, *, data=None, optimizer=None, **changes):
        fixed = {"train": {"type": "my_parts:Fixed"} | (data or {}), "validation": None, "shuffle": False}
        training = {"steps": 3, "batch_tokens": 512, "micro_batch_size": 4} | changes.pop("training", {})
        schedule = {"type": "constant", "warmup_steps": 0} | changes.pop("schedule", {})
        file = run_yaml(
            f"{name}.yaml",
            run={"name": name},
            data=fixed,
            training=training,
            schedule=schedule,
            optimizer=None if optimizer else {},
            log=QUIET,
            **changes,
        )
        return (replaced(file, optimizer=optimizer) if optimizer else file), tmp_path / "runs" / name

    return write


def fixed_batch():
    import numpy as np

    tokens = torch.from_numpy(np.random.default_rng(3).integers(0, 512, (8, 64)))
    return tokens[:, :-1], tokens[:, 1:]


def test_a_step_of_sgd_is_what_plain_torch_makes_of_it(parts):
    file, run = parts(
        "sgd",
        optimizer={"type": "torch.optim:SGD", "lr": 0.1},
        schedule={"type": "my_parts:Halving"},
        training={"dtype": "float64", "grad_clip": None},
        checkpoint={"every": 1, "keep_last": 3},
    )
    assert train(file) == 0
    assert [line["lr"] for line in metrics(run)] == [0.1, 0.05, 0.025]
    model = weft.load_model(run / "checkpoints" / "step-00000001")
    after = weft.load_model(run / "checkpoints" / "step-00000002").state_dict()
    tokens, labels = fixed_batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    _, seen, norm = losses(run)[1]
    assert seen == pytest.approx(loss.item(), abs=1e-10)
    assert norm == pytest.approx(torch.cat([g.flatten() for g in gradients.values()]).norm().item(), abs=1e-10)
    for name, p in model.named_parameters():
        torch.testing.assert_close(after[name], (p - 0.05 * gradients[name]).detach(), rtol=0, atol=1e-10)


def test_a_model_of_the_users_own_learns_and_loads(parts):
    file, run = parts("own", training={"steps": 30})
    file.write_text("".join(line for line in file.open() if not line.startswith(("model:", "tokenizer:"))))
    replaced(file, model={"type": "my_parts:Bigram", "width": 16})
    assert train(file, "optimizer.lr=0.1") == 0
    model = weft.load_model(run)
    tokens, labels = fixed_batch()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).item()
    assert loss < losses(run)[-1][1] < losses(run)[0][1] - 1


def test_a_loss_that_is_no_number_ends_the_run_with_its_last_good_weights(parts, capsys):
    file, run = parts("bad", objective={"type": "my_parts:Bad", "at": 4}, training={"micro_batch_size": 8})
    assert train(file, "training.steps=10", "checkpoint.every=10") == 1
    said = capsys.readouterr().err
    for words in ("step 4", "not finite", "nan", "samples of this batch: 24 to 31"):
        assert words in said
    assert [step for step, *_ in losses(run)] == [1, 2, 3]
    assert [c.name for c in (run / "checkpoints").glob("step-*")] == ["step-00000003"]
    assert all(w.isfinite().all() for w in weft.load_model(run).state_dict().values())


def test_trackers_and_files_are_closed_however_a_session_ends(parts):
    def still_open(run):
        links = []
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # earlier tests' garbage, and that of this listing
                links.append(os.readlink(link))
        return [link for link in links if link.startswith(str(run))]

    file, run = parts("closes")
    trackers = "log.trackers=[{type: 'my_parts:Tracks'}]"
    assert train(file, trackers, "training.steps=1") == 0
    assert (run / "closed").exists()
    assert not still_open(run)
    assert open_log() is None

    file, run = parts("broken", optimizer={"type": "my_parts:NoRate"})
    with pytest.raises(KeyError):
        train(file, trackers)
    assert (run / "closed").exists()
    assert {Path(link).parent.name for link in still_open(run)} == {"logs"}  # which has the traceback


def test_a_batch_in_which_every_token_is_masked_counts_as_nothing(parts, capsys):
    file, run = parts("masked", data={"weight": 0.0})
    assert train(file) == 0
    assert [(loss, norm) for _, loss, norm in losses(run)] == [(0, 0)] * 3
    assert "all tokens of the batch are masked" in capsys.readouterr().err
    assert all(w.isfinite().all() for w in weft.load_model(run).state_dict().values())


def test_a_new_run_from_a_checkpoint_goes_on_where_that_one_stood(parts):
    straight, straight_run = parts("straight", training={"steps": 6}, checkpoint={"every": 3})
    assert train(straight) == 0
    from_third = {"from": str(straight_run / "checkpoints" / "step-00000003")}

    def started(name, **model):
        file, run = parts(name)
        file.write_text("".join(line for line in file.open() if not line.startswith("model:")))
        assert train(replaced(file, model=from_third | model)) == 0
        return [(loss, norm) for _, loss, norm in losses(run)], run

    expected = [(loss, norm) for _, loss, norm in losses(straight_run)[3:]]
    with_state, with_run = started("with_state", load_optimizer=True)
    assert with_state == expected
    assert_same_weights(with_run, straight_run)
    without, _ = started("without")
    assert without[0] == expected[0]
    assert without[2] != expected[2]


@pytest.mark.parametrize(
    ("at", "said"),
    [(0, r"ValueError: boom, and more \(in my_parts:Boom, optimizer\)"), (1, r"RuntimeError: The size .*")],
)
def test_an_exception_in_the_users_code_is_a_line_and_the_way_there(parts, capsys, at, said):
    file, _ = parts("boom", optimizer={"type": "my_parts:Boom", "at": at})
    assert train(file) == 2
    lines = capsys.readouterr().err.splitlines()
    line, *way = lines[next(i for i, line in enumerate(lines) if re.match(r"\S*my_parts.py:\d", line)) :]
    assert re.fullmatch(rf"\S*my_parts\.py:\d+: {said}", line)
    assert way[0] == "Traceback (most recent call last):"
    files = [Path(step.split('"')[1]).name for step in way if step.startswith("  File ")]
    assert files[0] == "my_parts.py"
    assert "trainer.py" not in files
