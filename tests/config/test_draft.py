"""A mistake is told once, without what would follow from it."""

import pytest
from config_cases import SHORT, problems, shows

TRAINING = "training: {steps: 10, batch_tokens: 1024, micro_batch_size: 4}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # a section that is not there, or is no section
        (f"model: llama-tiny\n{TRAINING}", "run.yaml:1: data.train: required: the token store"),
        (f"model: llama-tiny\ndata: 3\n{TRAINING}", "run.yaml:2: data: must be a mapping"),
        ("model: llama-tiny\ndata: {train: store}\ntraining: 3\n", "run.yaml:3: training: must be a mapping"),
        # a misspelt key: it is not missed, and has no default
        (f"modle: llama-tiny\ndata: {{train: store}}\n{TRAINING}", "run.yaml:1: modle: unknown key; did you mean"),
        (f"model: llama-tiny\ndaat: {{train: store}}\n{TRAINING}", "run.yaml:2: daat: unknown key; did you mean"),
        (
            f"model: llama-tiny\ndata: {{trian: store, sequence_length: 64}}\n{TRAINING}",
            "run.yaml:2: data.trian: unknown key; did you",
        ),
        (
            f"model: llama-tiny\ndata: {{train: store, seq_len: 64}}\n{TRAINING}",
            "run.yaml:2: data.seq_len: unknown key; did you mean 'sequence_length'?",
        ),
        (
            "model: llama-tiny\ndata: {train: store}\ntraining: {stepps: 10}\n",
            "run.yaml:3: training.stepps: unknown key; did you mean 'steps'?",
        ),
        (
            "model: llama-tiny\ndata: {train: store}\nmax_steps: 10\n",
            "run.yaml:3: max_steps: unknown key; did you mean 'training.steps'?",
        ),
        (
            f"{SHORT}schedule: {{type: step, evry: 3}}\n",
            "run.yaml:4: schedule.evry: unknown key; did you mean 'every'?",
        ),
        (f"{SHORT}optimizer: {{typ: muon, momentum: 0.9}}\n", "run.yaml:4: optimizer.typ: unknown key; did you mean"),
        (
            SHORT.replace("train: store", "train: [a, {store:/x.jsonl}]"),
            "run.yaml:2: data.train[1].store:/x.jsonl: unknown key; did you mean 'store'? ... store: /x.jsonl",
        ),
        (f"{SHORT}run: {{'a.b': 3}}\n", "run.yaml:4: run.a.b: unknown key"),
        (f"{SHORT}'a.b': 3\n", "run.yaml:4: a.b: unknown key"),
        # what stands for many keys
        (
            "model: {presett: llama-tiny}\ndata: {train: store, sequence_length: 4096}\ntraining: {steps: 3}",
            "run.yaml:1: model.presett: unknown key; did you mean 'preset'?",
        ),
        (
            "model: {preset: llama-tinny}\ndata: {train: store, sequence_length: 4096}\ntraining: {steps: 3}\n",
            "run.yaml:1: model.preset: unknown preset 'llama-tinny'; did you mean 'llama-tiny'?",
        ),
        (f"model: {{preset: 3}}\ndata: {{train: store}}\n{TRAINING}", "run.yaml:1: model.preset: must be text, not 3"),
        (f"model: {{form: runs/a}}\ndata: {{train: store}}\n{TRAINING}", "run.yaml:1: model.form: unknown key; did"),
        (
            "model: {typ: 'own:Net'}\ndata: {train: store}\ntraining: {steps: 3}\n",
            "run.yaml:1: model.typ: unknown key; did you mean 'type'?",
        ),
        ("extend: base.yaml\n", "run.yaml:1: extend: unknown key; did you mean 'extends'?"),
        ("base: base.yaml\nrun: {name: x}\n", "run.yaml:1: base: unknown key; did you mean 'extends'? (a file, or"),
    ],
)
def test_what_follows_from_a_mistake_is_not_reported(text, said):
    found = problems(text)
    assert len(found) == 1, found
    assert shows(found[0], said)


def test_other_mistakes_are_still_reported():
    assert shows(
        problems("extend: base.yaml\nrun: {sed: 1}\ntraining: {steps: no}\n"),
        [
            "run.yaml:1: extend: unknown key; did you mean 'extends'?",
            "run.yaml:2: run.sed: unknown key; did you mean 'seed'?",
            "run.yaml:3: training.steps: must be an integer, not 'no'",
        ],
    )
    assert len(problems(f"model: {{presett: llama-tiny, hidden_size: x}}\ndata: {{train: store}}\n{TRAINING}")) == 2


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (f"model: !!python/object/apply:os.system ['echo hi']\n{SHORT.partition(chr(10))[2]}", "model"),
        (f"{SHORT}run: !!set {{name}}\n", "run"),
        (f"{SHORT}samples: {{prompts: !!omap []}}\n", "samples.prompts"),
        (f"{SHORT}run: {{name: !!binary aGk=}}\n", "run.name"),
    ],
)
def test_tags_are_refused(text, key):
    found = problems(text)
    assert any(f": {key}: the tag !!" in line for line in found), found


def test_yamls_own_kinds_may_be_named():
    from config_cases import load

    assert load(f"{SHORT}run: !!map {{name: !!str 3, seed: !!int 4}}\n").run.name == "3"
