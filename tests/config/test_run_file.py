"""A run's file is read whole, and every mistake in it is told with its place."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from config_cases import RUN, SHORT, load, problems, shows, write

from weft.config.model import ModelSection
from weft.config.run import RunConfig


def test_the_documented_file_loads():
    config = load(RUN)
    assert config.run.name == "demo"
    assert config.run.seed == 7
    assert isinstance(config.model, ModelSection)
    assert (config.model.num_hidden_layers, config.model.hidden_size) == (2, 64)
    assert (config.model.num_attention_heads, config.model.num_key_value_heads) == (4, 2)
    assert config.optimizer.arguments == {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    assert config.schedule.arguments == {"warmup_steps": 5, "warmup_fraction": None, "final": 0.1}
    assert config.training.steps == 30
    assert config.run_directory == Path("runs/demo")
    assert config.log.trackers == ["tensorboard"]


def test_the_shortest_file_loads_with_defaults():
    config = load(SHORT)
    assert config.run.name == "run"
    assert config.data.sequence_length == 1024
    assert config.optimizer.type == "adamw"
    assert config.training.grad_clip == 1.0


def test_a_float_of_yaml_1_2_is_one():
    config = load(SHORT + "optimizer: {lr: 3e-4, eps: 1e-6, weight_decay: 0}\n")
    assert config.optimizer.arguments["lr"] == 3e-4
    assert config.optimizer.arguments["eps"] == 1e-6
    assert config.optimizer.arguments["weight_decay"] == 0.0
    assert isinstance(config.optimizer.arguments["weight_decay"], float)


@pytest.mark.parametrize(("text", "value"), [("1e6", 10**6), ("1_000_000", 10**6), ("2.5e+3", 2500), ("0x10", 16)])
def test_whole_numbers(text, value):
    assert load(f"model: llama-tiny\ndata: {{train: store}}\ntraining: {{tokens: {text}}}\n").training.tokens == value


def test_a_real_number_is_no_whole_number():
    assert shows(
        problems("model: llama-tiny\ndata: {train: store}\ntraining: {tokens: 1.5e0}\n"),
        ["run.yaml:3: training.tokens: must be an integer, not 1.5e0"],
    )


def test_every_problem_is_reported_in_one_pass_in_order_of_lines():
    found = problems("""\
        run: {name: a/b, seed: -1}
        model:
          preset: llama-tinny
          hidden_sise: 3
        data: {train: store, sequence_length: "64", shuffle: yes}
        optimizer:
          type: adamw
          learning_rate: 3e-4
          betas: [0.9, 1.5]
          weight_decay: null
        schedule: {type: cosin, warmup_steps: 5}
        training: {steps: 30, tokens: 1e6, dtype: bf16, grad_clip: -1}
        lerning_rate: 3
        validation:
        log: {every: 1.5, trackers: tensorboard}
        """)
    begins = [
        "run.yaml:1: run.seed: must be at least 0, not -1",
        "run.yaml:1: run.name: 'a/b' ...",
        "run.yaml:3: model.preset: unknown preset 'llama-tinny'; did you mean 'llama-tiny'?",
        "run.yaml:4: model.hidden_sise: unknown key; did you mean 'hidden_size'?",
        "run.yaml:5: data.sequence_length: must be an integer, not '64'; remove the quotes",
        "run.yaml:5: data.shuffle: must be true or false, not 'yes'; write true",
        "run.yaml:8: optimizer.learning_rate: unknown key; did you mean 'lr'?",
        "run.yaml:9: optimizer.betas[1]: must be less than 1, not 1.5",
        "run.yaml:10: optimizer.weight_decay: must not be null; remove the key to use the default (0.1)",
        "run.yaml:11: schedule.type: unknown schedule 'cosin'; did you mean 'cosine'?",
        "run.yaml:12: training.dtype: must be one of auto, float64, float32, bfloat16, float16, not 'bf16'; did",
        "run.yaml:12: training.grad_clip: must be more than 0, not -1",
        "run.yaml:12: training.steps: steps and tokens each set the length of the run; keep one of these keys, and set",
        "run.yaml:13: lerning_rate: unknown key",
        "run.yaml:14: validation: ... remove the key to use the defaults",
        "run.yaml:15: log.every: must be an integer, not 1.5",
        "run.yaml:15: log.trackers: must be a list, not 'tensorboard'; write [tensorboard]",
    ]
    assert len(found) == len(begins)
    for line, begin in zip(found, begins, strict=True):
        assert shows(line, begin)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("learning_rate: 1e-3", "learning_rate: unknown key; did you mean 'optimizer.lr'?"),
        ("adapter: {rank: 4}", "adapter.rank: unknown key; did you mean 'r'?"),
        ("modle: gpt2", "modle: unknown key; did you mean 'model'?"),
        ("batch_size: 8", "batch_size: unknown key; did you mean 'training.batch_tokens'?"),
        ("seed: 8", "seed: unknown key; did you mean 'run.seed'?"),
        ("lr_scheduler: cosine", "lr_scheduler: unknown key; did you mean 'schedule'?"),
        ("optimizer: {learning_rate: 1}", "optimizer.learning_rate: unknown key; did you mean 'lr'?"),
        ("optimizer: {grad_clip: 1}", "optimizer.grad_clip: unknown key; did you mean 'training.grad_clip'?"),
        ("optimizer: {warmup_steps: 1}", "optimizer.warmup_steps: unknown key; did you mean 'schedule.warmup_steps'?"),
        ("checkpoint: {save_steps: 1}", "checkpoint.save_steps: unknown key; did you mean 'every'?"),
        ("checkpoint: {save_total_limit: 1}", "checkpoint.save_total_limit: unknown key; did you mean 'keep_last'?"),
        ("parallel: {dp_shrad: 1}", "parallel.dp_shrad: unknown key; did you mean 'dp_shard'?"),
        ("run: {zzz: 1}", "run.zzz: unknown key; remove it (known here: directory, name, seed)"),
        ("log: {trackers: [tensorbord]}", "log.trackers[0]: unknown tracker 'tensorbord'; did you mean 'tensorboard'?"),
        ("log: {trackers: [{type: wandb, projet: x}]}", "log.trackers[0].projet: unknown key; did you mean 'project'?"),
        ("1: 2", "1: unknown key"),
        ("? [a, b]\n: 1", "a key must be a plain word"),
    ],
)
def test_unknown_keys_at_any_depth_get_a_suggestion(line, said):
    (found,) = problems(f"{SHORT}{line}\n")
    assert shows(found, f"run.yaml:4: {said}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("optimizer: adamw", "optimizer: must be a mapping, such as optimizer: {type: adamw}, not 'adamw'"),
        ("optimizer:", "optimizer: ... remove the key to use the defaults"),
        ("run: [a]", "run: must be a mapping"),
        ("run: {name: 3}", 'run.name: must be text, not 3; quote it: "3"'),
        ("run: {name: [3]}", "run.name: must be text, not a list"),
        ("run: {seed: true}", "run.seed: must be an integer, not true"),
        ("run: {seed: null}", "run.seed: ... remove the key to use the default (0)"),
        ("optimizer: {lr: nan}", "optimizer.lr: must be a number, not 'nan'; set a finite number"),
        ("optimizer: {lr: '3e-4'}", "optimizer.lr: must be a number, not '3e-4'; remove the quotes"),
        ("optimizer: {lr: .inf}", "optimizer.lr: must be a finite number, not .inf"),
        ("optimizer: {lr: .nan}", "optimizer.lr: must be a finite number, not .nan"),
        ("optimizer: {lr: -1}", "optimizer.lr: must be more than 0, not -1"),
        ("optimizer: {betas: 0.9}", "optimizer.betas: must be a list, not 0.9"),
        ("optimizer: {betas: [0.9]}", "optimizer.betas: must be a list of 2 items, not of 1"),
        ("optimizer: {no_decay: [norms]}", "optimizer.no_decay[0]: must be one of norm, bias, embedding, not 'norms'"),
        ("optimizer: {params: []}", "optimizer.params: ... params to AdamW; remove the key"),
        ("schedule: {type: step}", "schedule.every: required argument of Step; add the key"),
        ("tokenizer: {a: 1}", "tokenizer: must be text, not a mapping"),
        ("samples: {prompts: def}", "samples.prompts: must be a list, not 'def'; write [def]"),
        ("log: {trackers: [3]}", "log.trackers[0]: must be a name or {type: ...}, not 3"),
        ("log: {trackers: [{project: x}]}", "log.trackers[0].type: required"),
        ("run: {name: !secret x}", "run.name: ... !secret ... write a plain value"),
        ("run: {seed: 1, seed: 2}", "run.seed: ... (first on line 4); keep one of them"),
    ],
)
def test_wrong_values(line, said):
    (found,) = problems(f"{SHORT}{line}\n")
    assert shows(found, f"run.yaml:4: {said}")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("compile: max-autotune", "compile: must be true or false or reduce-overhead, not 'max-autotune'"),
        ("compile: reduce_overhead", "compile: ... not 'reduce_overhead'; did you mean 'reduce-overhead'?"),
        ("compile: 1", "compile: must be true or false or reduce-overhead, not 1"),
        ("micro_batch_size: all", "micro_batch_size: must be an integer or auto, not 'all'"),
    ],
)
def test_a_wrong_word_names_all_values(setting, said):
    (found,) = problems(SHORT.replace("{steps: 10}", f"{{steps: 10, {setting}}}"))
    assert shows(found, f"run.yaml:3: training.{said}")


@pytest.mark.parametrize(
    ("line", "section", "key", "value"),
    [
        ("training: {steps: 3, grad_clip: null}", "training", "grad_clip", None),
        ("tokenizer: null", None, "tokenizer", None),
        ("data: {train: store, validation: null}", "data", "validation", None),
        ("run: {name: ~}", "run", "name", "run"),
    ],
)
def test_null_where_it_means_something(line, section, key, value):
    kept = [part for part in SHORT.splitlines() if part.split(":")[0] != line.split(":")[0]]
    config = load("\n".join([*kept, line]))
    assert getattr(config if section is None else getattr(config, section), key) == value


def test_missing_parts():
    assert shows(
        problems("run: {name: x}\n"),
        [
            "run.yaml:1: model: required: the model to train, such as model: llama-60m; add it",
            "run.yaml:1: data.train: required: the token store to train on (`weft data pack` makes one); add it",
            "run.yaml:1: training: ... set one of steps, tokens or epochs",
        ],
    )


# ---- files


def test_missing_file_names_near_ones():
    write(SHORT, "folder/run.yaml")
    assert shows(problems(name="folder/rum.yaml"), ["folder/rum.yaml: no such file; did you mean 'folder/run.yaml'?"])
    assert shows(
        problems(name="elsewhere/run.yaml"),
        ["elsewhere/run.yaml: no such file (the directory elsewhere does not exist either)"],
    )


def test_a_directory_is_no_file():
    write(SHORT, "folder/run.yaml")
    assert shows(problems(name="folder"), ["folder: a directory ... name a YAML file; did you mean 'folder/run.yaml'?"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "run.yaml:1: the file is empty"),
        ("# nothing\n---\n", "run.yaml:1: the file is empty"),
        ("- a\n- b\n", "run.yaml:1: the file is a list; it must be a mapping"),
        ("just words\n", "run.yaml:1: the file is a single value; it must be a mapping"),
        ("model: {a: 1\ndata: 2\n", "run.yaml:2: not valid YAML"),
        ("model: gpt2\n\tdata: 3\n", "run.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: not valid YAML"),
        ("a: *nobody\n", "run.yaml:1: not valid YAML"),
        ("a: &x {b: *x}\n", "run.yaml:1: a.b: the alias contains itself"),
        ("a: 1\nb: \x01\n", "run.yaml:2: not valid YAML: the character U+0001 ... remove it"),
        ("a: 1\nb:\n- x\0y\n", "run.yaml:3: not valid YAML: the character U+0000 ... remove it"),
        ("a: 1\nb: " + "[" * 5000, "run.yaml:2: nested too deeply"),
        ("a: 1\nb: " + "[" * 100 + "]" * 100, "run.yaml:2: nested too deeply"),
        ("a0: &a0 []\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 2000)), "run.yaml:1: nested too"),
    ],
)
def test_what_is_no_yaml_mapping(text, said):
    (found,) = problems(text)
    assert shows(found, said)


def test_a_file_that_is_not_utf_8():
    Path("run.yaml").write_bytes("model: gpt2\nrun: {name: caf\xe9}\n".encode("latin-1"))
    assert shows(problems(), ["run.yaml:2: not UTF-8 text; save the file as UTF-8"])


def test_a_byte_order_mark_and_windows_lines_are_fine():
    Path("run.yaml").write_bytes(b"\xef\xbb\xbf" + SHORT.replace("\n", "\r\n").encode())
    assert load().training.steps == 10


def test_aliases_that_grow_without_end_are_refused():
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    began = time.perf_counter()
    (found,) = problems("\n".join(lines))
    assert shows(found, "the aliases expand without end")
    assert time.perf_counter() - began < 5


def test_anchors_and_merge_keys_work():
    config = load("""\
        data: &data {train: store, sequence_length: 64}
        model: llama-tiny
        training: {steps: 10}
        """)
    assert config.data.sequence_length == 64
    config = load("""\
        model: {<<: {hidden_size: 64, num_hidden_layers: 1}, num_hidden_layers: 2, num_attention_heads: 4}
        data: {train: store}
        training: {steps: 10}
        """)
    assert (config.model.hidden_size, config.model.num_hidden_layers) == (64, 2)


# ---- the command line's values


def test_overrides_win_and_say_so():
    config = load(RUN, "optimizer.lr=1e-4", "training.steps=7", "samples.prompts=[a, b]", "run.name=17")
    assert config.optimizer.arguments["lr"] == 1e-4
    assert config.training.steps == 7
    assert config.samples.prompts == ["a", "b"]
    assert config.run.name == "17"
    assert config.origins["optimizer.lr"] == "command line"
    assert config.origins["optimizer.betas"] == "run.yaml:6"
    assert config.origins["model.num_hidden_layers"] == "preset llama-tiny"
    assert config.origins["training.activation_checkpointing"] == "default"
    assert config.origins["run.name"] == "command line"


def test_overrides_make_what_is_missing_and_the_last_wins():
    config = load(SHORT, "schedule.warmup_steps=3", "schedule.warmup_steps=4", "validation.every=2")
    assert config.schedule.arguments["warmup_steps"] == 4
    assert config.validation.every == 2


def test_a_model_from_the_command_line():
    assert load(SHORT, "model=llama-60m").model.hidden_size == 512
    assert load(RUN, "model.num_hidden_layers=3").model.num_hidden_layers == 3
    assert load(SHORT, "model.num_hidden_layers=3").model.num_hidden_layers == 3
    config = load(SHORT, "model=llama-60m", "model.num_hidden_layers=3")
    assert (config.model.hidden_size, config.model.num_hidden_layers) == (512, 3)


def test_another_type_starts_anew_in_any_order():
    text = SHORT + "optimizer: {type: adamw, lr: 1.0, eps: 1e-3}\n"
    for overrides in (("optimizer.type=muon", "optimizer.lr=0.1"), ("optimizer.lr=0.1", "optimizer.type=muon")):
        config = load(text, *overrides)
        assert config.optimizer.arguments["lr"] == 0.1
        assert config.optimizer.arguments["eps"] == 1e-10
    assert load(text, "optimizer.type=adamw").optimizer.arguments["eps"] == 1e-3


def test_null_unsets_on_the_command_line():
    config = load(RUN, "data.validation=null", "samples.prompts=[]", "log.trackers=[]")
    assert config.data.validation is None
    assert config.log.trackers == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("steps", "command line: 'steps' is not key=value; write it like optimizer.lr=1e-3"),
        ("=3", "command line: '=3' is not key=value"),
        ("a..b=3", "command line: 'a..b=3' is not key=value"),
        ("training.steps=", "command line: training.steps: no value after '='; write null"),
        ("training.steps=ten", "command line: training.steps: must be an integer, not 'ten'"),
        ("model.ffn_size=64", "command line: model.ffn_size: unknown key; did you mean 'intermediate_size'?"),
        ("model.n_inner=64", "command line: model.n_inner: unknown key; did you mean 'intermediate_size'?"),
        ("training.stepps=3", "command line: training.stepps: unknown key; did you mean 'steps'?"),
        ("model.x={", "command line: model.x: not valid YAML"),
        ("extends=base.yaml", "command line: extends: extends cannot be set on the command line"),
        (
            "data.train.0.weight=3",
            "command line: data.train.0.weight: ... write the full list: data.train='[...]'",
        ),
        ("samples.prompts[0]=a", "command line: samples.prompts[0]: ... write the full list: "),
        ("optimizer.betas=0.9", "command line: optimizer.betas: must be a list, not 0.9; write all 2, such as [0.9"),
        ("model=llama-61m", "command line: model.preset: unknown preset 'llama-61m'; did you mean 'llama-60m'?"),
    ],
)
def test_bad_overrides(override, said):
    (found,) = problems(SHORT, override)
    assert shows(found, said)


# ---- speed and lightness


def test_checking_imports_no_torch_and_little_else():
    """Imports take most of the time of a check: 334 modules, half a second."""
    write(RUN)
    program = (
        "import sys; from weft.config.run import RunConfig; RunConfig.load('run.yaml', check_data=False); "
        "print([m for m in ('torch', 'numpy', 'weft.optim.adamw', 'weft.models') if m in sys.modules], "
        "len(sys.modules) < 450)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] True"


def test_loading_leaves_the_process_as_it_was():
    before = list(sys.path), os.getcwd()
    load(RUN)
    assert (list(sys.path), os.getcwd()) == before


def test_it_is_a_frozen_whole():
    config = RunConfig.load(write(RUN), check_data=False)
    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 8
