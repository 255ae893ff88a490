"""A user's own loop: `Trainer.step` on one process, its batches, its ends, and what is said of wrong ones."""

import json
import os
import signal

import forked
import numpy as np
import pytest
import torch

import weft
from weft.checkpoint.load import resolve
from weft.data.batches.batch import Batch
from weft.data.batches.loader import BatchSource
from weft.data.sequences.windows import StoreDataset
from weft.data.stores.store import TokenStore
from weft.errors import UserError

KEYS = ("tokens", "labels", "weight", "positions")
OWN = {"data": {"train": None, "validation": None}, "training": {"steps": None, "batch_tokens": None}}
OWN |= {"schedule": {"type": "constant"}, "checkpoint": {"every": None}, "log": {"trackers": []}}


@pytest.fixture
def own(run_yaml):
    """A config without training data, and without a length."""
    return lambda **changes: weft.RunConfig.load(run_yaml(**{**OWN, **changes}))


def tokens(seed=0, sequences=8, length=16):
    return torch.randint(512, (sequences, length), generator=torch.Generator().manual_seed(seed))


def state(run):
    """Every weight and every tensor of the optimizer, in the last checkpoint."""
    from safetensors.torch import load_file

    files = sorted(resolve(run).glob("*.safetensors"))
    assert files
    return {(file.name, name): tensor for file in files for name, tensor in load_file(file).items()}


def lines(run):
    timed = ("tokens_per_second", "mfu", "step_seconds", "data_seconds", "memory_bytes", "warmup_seconds")
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timed} for line in read]


def test_the_steps_are_those_of_fit_also_resumed(run_yaml, tiny_store, tmp_path):
    """With dropout, validation, a callback with state, a metric and samples of text: all that a step of fit does."""
    text = {
        "model": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
        "training": {"steps": 6, "batch_tokens": 7 * 64, "micro_batch_size": 2},
        "validation": {"every": 2, "tokens": 256},
        "checkpoint": {"every": 4},
        "callbacks": [{"type": "ema", "decay": 0.5, "validate": True}],
        "samples": {"prompts": ["Ka"], "max_new_tokens": 4},
        "log": {"trackers": []},
    }
    assert weft.Trainer(weft.RunConfig.load(run_yaml("fit.yaml", run={"name": "fit"}, **text))).fit().step == 6
    source = BatchSource(StoreDataset(TokenStore(tiny_store), 64), batch_size=7, seed=7)
    config = weft.RunConfig.load(run_yaml("step.yaml", run={"name": "step"}, **text), ["data.train=null"])
    validated = []
    for until in (3, 6):
        with weft.Trainer(config, batches="global") as trainer:
            for step in range(trainer.resume(), until):
                batch = source.batch(step)
                given = {key: getattr(batch, key) for key in KEYS} if step % 2 else batch
                validated.append("validation_loss" in trainer.step(given))
    assert validated == [False, True] * 3
    fit, own = tmp_path / "runs" / "fit", tmp_path / "runs" / "step"
    assert lines(fit) == lines(own)
    assert (fit / "samples.jsonl").read_text() == (own / "samples.jsonl").read_text()
    left, right = state(fit), state(own)
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())
    assert json.loads((own / "manifest.json").read_text())["sessions"][0]["status"] == "stopped"
    assert "6 steps" in (own / "report.html").read_text()


def test_micro_batches_and_lengths_that_differ_change_nothing_but_the_counts(own, tmp_path):
    found = []
    for micro in (None, 1, 3):
        config = own(training=OWN["training"] | {"dtype": "float64", "micro_batch_size": micro})
        with weft.Trainer(config, batches="global", fresh=True) as trainer:
            steps = [trainer.step({"tokens": tokens(n, 5 + n, 12 + n)}) for n in range(3)]
            weights = torch.cat([p.detach().full_tensor().flatten() for p in trainer.model.parameters()])
        found.append((weights, [(step["loss"], step["grad_norm"]) for step in steps]))
        assert [step["tokens"] for step in steps] == [60, 60 + 78, 60 + 78 + 98]
    for weights, numbers in found[1:]:
        assert torch.allclose(weights, found[0][0], rtol=0, atol=1e-9)
        assert np.allclose(numbers, found[0][1], rtol=0, atol=1e-12)


def test_the_loss_is_that_of_transformers_on_padded_batches(run_yaml, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=64, **small)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "hf")
    training = OWN["training"] | {"dtype": "float64", "micro_batch_size": 2}
    file = run_yaml(**OWN | {"model": None, "optimizer": {"type": "adamw", "lr": 1e-12}, "training": training})
    file.write_text(file.read_text() + f"model: {{from: {tmp_path / 'hf'}}}\n")
    config = weft.RunConfig.load(file)
    ids, mask = tokens(3, 5, 12), torch.ones(5, 12, dtype=torch.int64)
    for row, padded in enumerate((0, 3, 5, 11, 0)):
        mask[row, 12 - padded :] = 0
    with weft.Trainer(config, batches="local") as trainer:
        for side in ("right", "left"):
            attention = mask if side == "right" else mask.flip(1)
            labels = ids.masked_fill((attention == 0) | (torch.arange(12) % 5 == 2), -100)
            labels[attention.cumsum(1) == 1] = -100  # theirs would predict the first token from the padding before it
            positions = (attention.cumsum(1) - 1).clamp(min=0)
            theirs = model(input_ids=ids, attention_mask=attention, labels=labels, position_ids=positions).loss
            ours = trainer.step({"input_ids": ids, "attention_mask": attention, "labels": labels})
            assert ours["loss"] == pytest.approx(theirs.item(), abs=1e-6), side  # theirs is in float32
            alone = [(i[a == 1][None], n[a == 1][None]) for i, a, n in zip(ids, attention, labels, strict=True)]
            sums = [model(input_ids=i, labels=n).loss * (n[0, 1:] != -100).sum() for i, n in alone if i.shape[1] > 1]
            assert ours["loss"] == pytest.approx(sum(sums).item() / ours["learned_tokens"], abs=1e-6)


T = tokens(0, 4, 6)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({}, "the batch is a dict without tokens or input_ids; pass a dict of CPU tensors, or define batch(records)"),
        ([1, 2], "the batch is a list without tokens or input_ids"),
        ({"tokens": T, "input_ids": T}, "both tokens and input_ids; pass one of the two"),
        ({"tokens": T, "mask": T}, "the unknown key 'mask'"),
        ({"tokens": T[0]}, "tokens must be integers of shape [batch, seq], but its shape is (6,)"),
        ({"tokens": T.float()}, "tokens must be integers"),
        ({"tokens": T.to(torch.bfloat16)}, "tokens cannot be converted to an array"),
        ({"tokens": T[:0]}, "its shape is (0, 6)"),
        ({"tokens": T + 512}, "; ids must be 0 to 511 (model.vocab_size is 512)"),
        ({"tokens": T, "labels": T - 600}, "is neither a token id nor -100"),
        ({"tokens": T, "labels": T[:, :5]}, "labels has shape (4, 5), but tokens has (4, 6)"),
        ({"tokens": T, "weight": -torch.ones(4, 6)}, "every weight must be 0 or more"),
        ({"tokens": T, "attention_mask": T}, "attention_mask must be 1 for tokens and 0 for padding"),
        (
            {"tokens": T, "attention_mask": torch.tensor([[1, 1, 0, 0, 1, 1]] * 4)},
            "sequence 0 has padding between tokens",
        ),
        ({"tokens": T, "labels": T}, "rename tokens to input_ids, whose labels are shifted as in Transformers"),
        ({"input_ids": T, "labels": T.roll(-1, 1)}, "the labels are the next tokens already"),
        ({"tokens": tokens(0, 2, 4096)}, "sequences of 4,096 tokens, but the model has"),
        ({"tokens": T.to("meta")}, "tokens is on meta; pass CPU tensors"),
    ],
    ids=str,
)
def test_what_is_said_of_a_batch(opened, batch, said):
    with pytest.raises(UserError) as told:
        opened.step(batch)
    assert said in str(told.value)
    assert "\n" not in str(told.value)
    number = opened.step_number
    assert opened.step({"tokens": T})["step"] == opened.step_number == number + 1


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """One trainer for all wrong batches, each of which leaves it as it was."""
    folder = tmp_path_factory.mktemp("opened")
    (folder / "run.yaml").write_text(
        f"run: {{directory: {folder}}}\nmodel: {{preset: llama-tiny, vocab_size: 512}}\n"
        "schedule: {type: constant}\ntraining: {dtype: float32}\nlog: {trackers: []}\n"
    )
    with weft.Trainer(weft.RunConfig.load(folder / "run.yaml"), batches="global") as trainer:
        yield trainer


def test_documents_and_masks_of_a_batch():
    from weft.data.batches.given import batch_from
    from weft.data.batches.layout import Field, Layout

    ids, segments = torch.tensor([[5, 6, 7, 8, 9]]), [[0, 0, 1, 1, 1]]
    batch = batch_from({"tokens": ids, "segments": segments}, Layout())
    assert batch.weight.tolist() == [[1, 0, 1, 1, 0]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2]]
    batch = batch_from({"input_ids": ids, "attention_mask": [[0, 0, 1, 1, 1]], "weight": [[2.0] * 5]}, Layout())
    assert (batch.segments.tolist(), batch.positions.tolist()) == ([[0, 0, 1, 1, 1]], [[0, 1, 0, 1, 2]])
    assert batch.weight.tolist() == [[0, 0, 2, 2, 0]]
    assert batch.labels[0, 2:4].tolist() == [8, 9]
    pairs = Layout({"margin": Field()}, sequences=2)
    one, two = (batch_from({"tokens": t, "margin": m}, pairs) for t, m in (
        (tokens(1, 4), torch.arange(4)), (tokens(1, 4).view(2, 2, -1), torch.arange(4).view(2, 2)))
    )  # fmt: skip
    assert torch.equal(one.tokens, two.tokens)
    assert one.extra["margin"].tolist() == two.extra["margin"].tolist() == [0, 1, 2, 3]
    assert one.samples.tolist() == [0, 0, 1, 1]
    for tokens_, said in (
        (tokens(1, 3), "a sample of the objective has 2 sequences"),
        (tokens(1, 4)[None], "2 sequences"),
    ):
        with pytest.raises(UserError, match=said):
            batch_from({"tokens": tokens_, "margin": [1.0] * len(tokens_)}, pairs)
    empty = batch_from({"tokens": tokens(1, 2)}, Layout()).of_rank(3, 4)
    assert (empty.weight.sum(), empty.samples.tolist()) == (0, [-1])
    assert isinstance(empty, Batch)


def test_labels_without_loss_in_a_batch_object_are_those_of_a_dict():
    from weft.data.batches.given import batch_from
    from weft.data.batches.layout import Layout

    labels = T.roll(-1, 1)
    labels[:, 2] = labels[:, -1] = -100
    expected = batch_from({"tokens": T, "labels": labels}, Layout())
    given = Batch(T, labels.clone(), torch.ones(4, 6), expected.positions, None, torch.arange(4))
    found = batch_from(given, Layout())
    assert torch.equal(found.weight, expected.weight)
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(given.labels, labels)  # the user's tensors are unchanged
    assert given.weight.all()
    with pytest.raises(UserError, match="the id -7 in its labels, sequence 1"):
        batch_from(Batch(T, labels.where(T[1, 0] != T, -7), *[torch.ones(4, 6)] * 2, None, torch.arange(4)), Layout())


def test_the_checksum_that_ranks_compare_covers_all_tensors_of_a_batch():
    from weft.data.batches.given import batch_from
    from weft.data.batches.layout import Field, Layout
    from weft.train.given_batches import checksum

    layout = Layout({"reward": Field(), "action": Field(seq_dim=0, dtype="int64")})
    given = {"tokens": T, "segments": torch.zeros_like(T), "reward": torch.arange(4.0), "action": T.clone()}
    first = checksum(batch_from(given, layout))
    assert checksum(batch_from({key: value.clone() for key, value in given.items()}, layout)) == first
    for key, value in given.items():
        changed = value.clone()
        changed[1] += 1
        if key == "segments":  # only where documents begin matters
            changed[1, 3:] += 1
        assert checksum(batch_from({**given, key: changed}, layout)) != first, key
    assert checksum(batch_from({**given, "segments": None}, layout)) != first


def test_what_is_said_of_a_config(own, run_yaml, tmp_path):
    config = own()
    for wrong, said in (
        (
            {"schedule": {"type": "cosine"}},
            "schedule: the schedule cosine depends on the length of the run; set training.steps",
        ),
        (
            {"schedule": {"type": "constant", "warmup_steps": None, "warmup_fraction": 0.1}},
            "schedule: warmup_fraction depends",
        ),
        ({"training": {"steps": None, "tokens": 9999}}, "training.tokens: the sizes of batches"),
        ({"data": {"train": None}}, "validation.every: cannot be derived"),
    ):
        with pytest.raises(UserError) as told:
            weft.Trainer(own(**wrong), batches="global").step({"tokens": tokens()})
        assert said in str(told.value)
        assert not list((tmp_path / "runs").glob("demo/*.jsonl"))
    with pytest.raises(UserError, match=r"data\.train: required: the token store.*\n.*the run has no length"):
        weft.Trainer(config).fit()
    with pytest.raises(UserError, match="batches is 'global'; call step, or omit batches"):
        weft.Trainer(config, batches="global").fit()
    with pytest.raises(UserError, match="this needs batches='global' or batches='local'"):
        weft.Trainer(config).step({})
    with pytest.raises(UserError, match="batches is 'all'; pass 'global' or 'local'"):
        weft.Trainer(config, batches="all")


def test_ends_of_a_session(own, tmp_path, capsys):
    """A bad loss, the length of the run, what a callback asks for, signals, and errors in the loop."""
    config = own(training=OWN["training"] | {"steps": 9}, checkpoint={"every": 100, "keep_last": 2})
    run, handler = tmp_path / "runs" / "demo", signal.getsignal(signal.SIGTERM)
    with weft.Trainer(config, batches="global") as trainer:
        trainer.log("loss", trainer.step({"tokens": tokens()})["loss"])
        with torch.no_grad():
            before = trainer.model.norm.weight.clone()
            trainer.model.norm.weight.fill_(torch.nan)
        with pytest.raises(
            UserError, match=r"step 2: the loss .nan. .*The update was not made; lower .*or skip this batch"
        ):
            trainer.step({"tokens": tokens()})
        with torch.no_grad():
            trainer.model.norm.weight.copy_(before)
        assert trainer.step({"tokens": tokens()})["step"] == 2
        for _ in range(3):
            trainer.step({"tokens": tokens()})
            path = trainer.save()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not trainer.stopping
        assert trainer.step({"tokens": tokens()})["step"] == 6
        assert trainer.stopping
        with pytest.raises(SystemExit) as ended:
            trainer.step({"tokens": tokens()})
        assert ended.value.code == 143
    assert path.name == "step-00000005"
    assert [one.name for one in sorted((run / "checkpoints").iterdir())] == ["step-00000005", "step-00000006"]
    assert "loss 6." in capsys.readouterr().err
    with pytest.raises(UserError, match="this trainer is closed"):
        trainer.step({"tokens": tokens()})

    trainer = weft.Trainer(config, batches="global")
    with pytest.raises(KeyboardInterrupt), trainer:  # noqa: PT012
        assert trainer.resume() == 6
        trainer.optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
        trainer.step({"tokens": tokens()})
    assert trainer.step_number == 7  # the update was finished, and saved
    assert resolve(run).name == "step-00000007"

    with pytest.raises(ZeroDivisionError), weft.Trainer(config, batches="global") as trainer:  # noqa: PT012
        trainer.step({"tokens": tokens()})
        raise ZeroDivisionError
    assert resolve(run).name == "step-00000007"
    with weft.Trainer(config, batches="global") as trainer:
        trainer.step({"tokens": tokens()})
        trainer.step({"tokens": tokens()})
        with pytest.raises(UserError, match=r"the run has made all of its 9 steps; raise training\.steps"):
            trainer.step({"tokens": tokens()})
    assert json.loads((run / "manifest.json").read_text())["sessions"][-1]["status"] == "finished"
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_callback_ends_the_loop_where_fit_would_end(own, tiny_heldout):
    config = own(
        data={"train": None, "validation": str(tiny_heldout)},
        validation={"every": 1, "tokens": 64},
        optimizer={"type": "adamw", "lr": 1e-9},
        callbacks=[{"type": "early_stopping", "patience": 2, "min_delta": 0.1}],
    )
    with weft.Trainer(config, batches="global") as trainer:
        while not trainer.stopping:
            trainer.step({"tokens": tokens()})
        outcome = trainer.close()
    assert (outcome.status, outcome.step) == ("stopped-early", 3)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_does_not_count_in_the_size_of_the_noise(own, side):
    mask = torch.arange(16) < torch.tensor([[4], [16]])
    mask = mask if side == "right" else mask.flip(1)
    with weft.Trainer(own(objective={"type": "sft", "neftune": 3.0}), batches="global") as trainer:
        torch.nn.init.zeros_(trainer.model.embed_tokens.weight)
        seen = []
        trainer.model.embed_tokens.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
        trainer.step({"tokens": tokens(0, 2), "attention_mask": mask})
    for row, noise in enumerate(torch.cat(seen)):
        inside = noise[mask[row]].abs()
        most = 3.0 / inside.numel() ** 0.5
        assert 0.95 * most < inside.max() <= most * 1.001


@pytest.mark.parametrize("side", ["right", "left"])
def test_experts_do_not_count_padding(own, side):
    moe = {"num_experts": 4, "num_experts_per_tok": 2}
    text, filler = tokens(0, 2, 9), torch.full((2, 7), 3)
    padded = torch.cat((text, filler) if side == "right" else (filler, text), 1)
    mask = torch.arange(16) < 9 if side == "right" else torch.arange(16) >= 7
    batches = {"tokens": text}, {"tokens": padded, "attention_mask": mask.expand(2, -1)}
    optimizer = {"type": "adamw", "lr": 1e-30}
    with weft.Trainer(own(model={"moe": moe}, optimizer=optimizer), batches="global") as trainer:
        loads = [trainer.step(batch)["expert_load"] for batch in batches]
    assert loads[0] == loads[1] > 1


def test_freed_memory_is_kept_once_the_optimizer_has_its_state(own, monkeypatch):
    """Its state would otherwise lie where the activations of the first step were, and the largest needed new memory."""
    sizes = []
    with weft.Trainer(own(), batches="global") as trainer:
        monkeypatch.setattr("weft.train.recorder.keep_freed_memory", lambda: sizes.append(len(trainer.optimizer.state)))
        monkeypatch.setattr("weft.train.auto_settings.keep_freed_memory", lambda: pytest.fail("too early"))
        trainer.step({"tokens": tokens()})
        assert sizes == [len(list(trainer.model.parameters()))]


def test_to_close_an_unused_trainer_does_nothing(own, tmp_path):
    trainer = weft.Trainer(own(), batches="global")
    assert trainer.close() is None
    assert not (tmp_path / "runs").exists()
    trainer.step({"tokens": tokens()})
    assert trainer.close().step == 1
    with pytest.raises(UserError, match="this trainer is closed"):
        trainer.close()


def test_a_program_that_closes_nothing_leaves_a_report(own, tmp_path):
    own()
    (tmp_path / "loop.py").write_text(
        "import torch, weft\n"
        "trainer = weft.Trainer(weft.RunConfig.load('run.yaml'), batches='global')\n"
        "for batch in torch.randint(512, (2, 8, 16)):\n"
        "    trainer.step({'tokens': batch})\n"
        "trainer.save()\n"
        "import atexit; atexit._run_exitfuncs()\n"  # as an interpreter does when it ends, and a fork does not
    )
    done = forked.run(program="import runpy; runpy.run_path('loop.py')", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    run = tmp_path / "runs" / "demo"
    assert resolve(run).name == "step-00000002"
    assert "finished: 2 steps" in (run / "report.html").read_text()
