"""A config is written as YAML that reads back to the same."""

from pathlib import Path

import pytest
from config_cases import RUN, SHORT, load, problems, shows, write

from weft.config.dump import dump_yaml, read_saved
from weft.config.run import RunConfig
from weft.config.tree import parse

REPOSITORY = Path(__file__).resolve().parents[2]
REST = "data: {train: s}\ntraining: {steps: 1}\n"
TEXTS = {
    "documented": RUN,
    "short": SHORT,
    "nulls": SHORT + "optimizer: {lr: 1e-6}\n",
    "muon": SHORT + "optimizer: {type: muon}\nschedule: {type: wsd, warmup_fraction: 0.1}\n",
    "odd texts": SHORT
    + r"""
validation: {every: 2}
samples: {prompts: ["def ", "yes", "3", "a: b # c", "caf\u00e9 \U0001f600", "tab\t\nend", "'q'", "\"", "\x85\u2028"]}
run: {name: "null", directory: "~/a b"}
log: {trackers: [tensorboard, {type: wandb, tags: [a, b], project: "1e5"}]}
tokenizer: "true"
""",
    "null over a preset": "model: {preset: llama-tiny, num_key_value_heads: null}\n" + REST,
    "gpt2": "model: gpt2\ndata: {train: store}\ntraining: {epochs: 1.5, grad_clip: null}\n",
    "sizes": "model: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}\n" + REST,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_written_reads_back_to_the_same(text):
    config = load(text)
    for origins in (False, True):
        write(dump_yaml(config, origins=origins), "again.yaml")
        again = load(name="again.yaml")
        assert again == config
        assert again.as_dict() == config.as_dict()
        assert dump_yaml(again) == dump_yaml(config)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_saved_data_differ_from_a_config_only_in_what_is_not_set(text):
    config = load(text)
    write(dump_yaml(config), "again.yaml")
    saved = read_saved("again.yaml")
    for section, content in config.as_dict().items():
        if not isinstance(content, dict):
            assert saved.get(section) == content
            continue
        for key, value in content.items():
            assert saved[section].get(key) == value


def test_own_parts_read_back():
    write(
        "class Net:\n    __len__ = __getitem__ = None\n"
        "    def __init__(self, width: int, pair: tuple[int, int] = (1, 2), other=None): ...\n",
        "own.py",
    )
    config = load(
        "model: {type: 'own:Net', width: 3}\ndata: {train: {type: 'own:Net', width: 4}}\ntraining: {steps: 1}\n"
    )
    write(dump_yaml(config), "again.yaml")
    assert load(name="again.yaml") == config


def test_floats_are_floats_for_older_readers_too():
    import re

    text = dump_yaml(load(SHORT + "optimizer: {lr: 1e-6, eps: 1.5e-12}\n"))
    assert "lr: 1.0e-06" in text
    assert "eps: 1.5e-12" in text
    assert not re.search(r": \d+e", text)


@pytest.mark.parametrize("file", sorted(REPOSITORY.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_right(file):
    if file.name == "base.yaml":
        assert shows(problems(name=str(file)), [f"{file}:2: model: required: the model to train, such as"])
        return
    if "model.from=" in file.read_text():  # needs a model; test_tuning_page.py trains with it
        return
    config = RunConfig.load(file, check_data=False)
    write(dump_yaml(config), "again.yaml")
    assert load(name="again.yaml") == config
    assert file.read_text().count("\n") <= 30


def test_origins_are_comments():
    lines = dump_yaml(load(RUN, "training.steps=9"), origins=True).splitlines()
    said = {line.split("#")[0].strip(): line.split("# ")[1] for line in lines if "#" in line}
    assert said["steps: 9"] == "command line"
    assert said["hidden_size: 64"] == "preset llama-tiny"
    assert said["lr: 0.003"] == "run.yaml:6"
    assert said["eps: 1.0e-08"] == "default"
    assert said["tokenizer: tok"] == "run.yaml:3"


def test_a_saved_file_of_an_earlier_version_has_its_keys_under_their_new_names():
    write("parallel: {dp_shard: 2, schedule: gpipe, context: ring, layers_per_unit: 2}\n", "config.yaml")
    new = {"dp_shard": 2, "pp_schedule": "gpipe", "cp_method": "ring", "layers_per_fsdp_unit": 2}
    assert read_saved("config.yaml") == {"parallel": new}


def test_a_broken_saved_file_is_reported():
    write("a: [", "config.yaml")
    with pytest.raises(Exception, match=r"config.yaml:1: not valid YAML"):
        read_saved("config.yaml")


def test_the_parser_keeps_scalars_exactly():
    node = parse("a: 0o17\nb: -0x1F\nc: -.inf\nd: +1e3\ne: 012\nf: 2024-01-01\ng: 1:30\nh: 'x'\n", "f", [])
    assert node.plain() == {
        "a": 15, "b": -31, "c": float("-inf"), "d": 1000.0, "e": 12, "f": "2024-01-01", "g": "1:30", "h": "x",
    }  # fmt: skip
