"""`extends`: mappings merge, everything else is replaced, the child wins."""

import pytest
from config_cases import SHORT, load, problems, shows, write

BASE = """\
data: {train: store, validation: heldout, sequence_length: 64}
optimizer: {type: adamw, lr: 6e-4, betas: [0.9, 0.95]}
schedule: {type: cosine, warmup_fraction: 0.02}
training: {steps: 10}
log: {trackers: [tensorboard, wandb]}
"""


def test_mappings_merge_lists_are_replaced_and_the_child_wins():
    write(BASE, "base.yaml")
    config = load("extends: base.yaml\nmodel: llama-tiny\noptimizer: {lr: 1e-3}\nlog: {trackers: [mlflow]}\n")
    assert config.optimizer.arguments["lr"] == 1e-3
    assert config.optimizer.arguments["betas"] == (0.9, 0.95)
    assert config.log.trackers == ["mlflow"]
    assert config.data.sequence_length == 64
    assert config.origins["optimizer.lr"] == "run.yaml:3"
    assert config.origins["optimizer.betas"] == "base.yaml:2"


def test_bases_are_relative_to_their_file_and_go_on():
    write("training: {steps: 5}\nrun: {seed: 1}\n", "shared/deep/root.yaml")
    write("extends: deep/root.yaml\nrun: {seed: 2}\ndata: {train: store}\n", "shared/middle.yaml")
    config = load("extends: ../shared/middle.yaml\nmodel: llama-tiny\n", name="mine/run.yaml")
    assert (config.run.seed, config.training.steps) == (2, 5)
    assert config.origins["training.steps"] == "shared/deep/root.yaml:1"


def test_of_several_bases_the_later_wins():
    write("run: {seed: 1}\ntraining: {steps: 5, grad_clip: 2.0}\n", "one.yaml")
    write("run: {seed: 2}\ndata: {train: store}\n", "two.yaml")
    config = load("extends: [one.yaml, two.yaml]\nmodel: llama-tiny\n")
    assert (config.run.seed, config.training.grad_clip) == (2, 2.0)


def test_a_base_that_two_share_is_no_cycle():
    write(SHORT, "root.yaml")
    write("extends: root.yaml\nrun: {seed: 1}\n", "one.yaml")
    write("extends: root.yaml\nvalidation: {every: 3}\n", "two.yaml")
    config = load("extends: [one.yaml, two.yaml]\n")
    assert (config.run.seed, config.validation.every) == (1, 3)


def test_another_type_replaces_the_section_for_its_keys_belong_to_another_class():
    write(BASE, "base.yaml")
    config = load(
        "extends: base.yaml\nmodel: llama-tiny\nschedule: {type: wsd, warmup_steps: 2}\noptimizer: {type: muon}\n"
    )
    assert config.schedule.arguments["warmup_fraction"] is None
    assert config.optimizer.arguments["lr"] == 0.02
    # The default type, written out, is no other.
    write("optimizer: {lr: 0.5}\n" + SHORT, "base.yaml")
    assert load("extends: base.yaml\noptimizer: {type: adamw}\n").optimizer.arguments["lr"] == 0.5


def test_the_childs_preset_replaces_the_bases():
    write("model: {preset: llama-60m, hidden_dropout: 0.1}\ndata: {train: store}\ntraining: {steps: 3}\n", "base.yaml")
    config = load("extends: base.yaml\nmodel: {preset: gpt2}\n")
    assert (config.model.preset, config.model.position, config.model.hidden_dropout) == ("gpt2", "learned", 0.1)
    config = load("extends: base.yaml\nmodel: {num_hidden_layers: 1}\n")
    assert (config.model.hidden_size, config.model.num_hidden_layers, config.model.hidden_dropout) == (512, 1, 0.1)
    # Named alone, a preset is the whole model.
    config = load("extends: base.yaml\nmodel: gpt2\n")
    assert (config.model.preset, config.model.hidden_dropout) == ("gpt2", 0.0)


def test_cycles_are_named():
    write("extends: b.yaml\n", "a.yaml")
    write("run: {seed: 1}\nextends: c.yaml\n", "b.yaml")
    write("extends: a.yaml\n", "c.yaml")
    assert shows(
        problems(name="a.yaml"),
        ["c.yaml:1: extends: files extend each other in a circle: a.yaml -> b.yaml -> c.yaml -> a.yaml; remove"],
    )
    assert shows(
        problems("extends: run.yaml\n"),
        ["run.yaml:1: extends: files extend each other in a circle: run.yaml -> run.yaml; remove one"],
    )
    assert len(problems("extends: ./sub/../run.yaml\n")) == 1


def test_a_missing_base_is_reported_where_it_is_asked_for():
    write(SHORT, "base.yaml")
    assert shows(
        problems("run: {seed: 1}\nextends: bse.yaml\n"),
        ["run.yaml:2: extends: bse.yaml: no such file; did you mean 'base.yaml'?"],
    )


def test_a_missing_base_is_not_said_to_be_the_file_that_asks_for_it():
    asked = "run.yaml:1: extends: nope.yaml: no such file; "
    assert shows(problems("extends: nope.yaml\n"), [f"{asked}check the path"])
    write(SHORT, "other.yaml")
    assert shows(problems("extends: nope.yaml\n"), [f"{asked}use one of other.yaml"])
    assert shows(problems("extends: run.yml\n"), [f"{asked.replace('nope.yaml', 'run.yml')}use one of other.yaml"])


@pytest.mark.parametrize("value", ["3", "{a: 1}", "[[a]]", "null", "''", '"a\\0b"'])
def test_extends_must_name_files(value):
    assert shows(problems(f"extends: {value}\n"), ["run.yaml:1: extends: must be a file name or a list"])


def test_problems_of_a_base_are_reported_in_the_base():
    write("optimizer: {learning_rate: 1}\nrun: {seed: -1}\n" + SHORT, "base.yaml")
    assert shows(
        problems("extends: base.yaml\nrun: {sed: 1}\n"),
        [
            "run.yaml:2: run.sed: unknown key; did you mean 'seed'?",
            "base.yaml:1: optimizer.learning_rate: unknown key; did you mean 'lr'?",
            "base.yaml:2: run.seed: must be at least 0, not -1",
        ],
    )


def test_a_base_with_broken_syntax_is_the_only_news():
    write("a: {\n", "base.yaml")
    (found,) = problems("extends: base.yaml\nmodell: gpt2\n")
    assert shows(found, "base.yaml:2: not valid YAML") or found.startswith("base.yaml:1: not valid YAML")
