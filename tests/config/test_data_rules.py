"""Mistakes in `data:` that mixes, packs and warms up: each one line, with its place and what to do."""

import pytest
from config_cases import check_without_torch_and_numpy, load, make_store, problems, shows, write

from weft.config.dump import dump_yaml

MIX = """\
model: {preset: llama-tiny, vocab_size: 512}
data:
  train:
  - {store: a, weight: 0.7}
  - {store: b,
     weight: 0.3, max_epochs: 2}
  sequence_length: 64
training: {steps: 10, batch_tokens: 1024}
"""


def changed(old: str, new: str) -> str:
    assert old in MIX
    return MIX.replace(old, new)


def one(text: str, *overrides: str, data: bool = False) -> str:
    (found,) = problems(text, *overrides, data=data)
    assert ";" in found  # what to do
    return found


WITHOUT = MIX.replace(", weight: 0.7", "").replace("weight: 0.3, ", "")
CURRICULUM = """\
  curriculum:
  - {tokens: 4000, weights: {a: 0.9, b: 0.1}}
  - {weights: {a: 1,
               c: 1}}
"""


def staged(*changes: tuple[str, str]) -> str:
    """The mixture with a curriculum, right but for the changes."""
    text = CURRICULUM.replace("c:", "b:")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return WITHOUT.replace("  sequence", text + "  sequence")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (changed("weight: 0.7", "weight: -1"), "run.yaml:4: data.train[0].weight: must be at least 0, not -1"),
        (changed("0.7", "0").replace("0.3", "0"), "run.yaml:4: data.train[0].weight: all weights are 0"),
        (changed(", weight: 0.7", ""), "run.yaml:4: data.train[0]: a has no weight ... set all weights, or none"),
        (
            changed("weight: 0.3", "weights: 0.3"),
            "run.yaml:6: data.train[1].weights: unknown key; did you mean",
        ),
        (changed("store: a", "store: b"), "run.yaml:5: data.train[1]: ... the name 'b' ... set a different name"),
        (changed("store: a", "name: a"), "run.yaml:4: data.train[0].store: required: the token store; add it"),
        (changed("max_epochs: 2", "max_epochs: 0"), "run.yaml:6: data.train[1].max_epochs: must be more than 0"),
        (
            changed("weight: 0.3", "weight: 1e-6"),
            "run.yaml:6: data.train[1].weight: b has a share of 1.4e-06",
        ),
        (
            changed("  sequence", "  temperature: 2\n  sequence"),
            "run.yaml:4: data.train[0].weight: data.temperature",
        ),
        (
            changed("  sequence", CURRICULUM.replace("c:", "b:") + "  sequence"),
            "run.yaml:4: data.train[0].weight: data.c",
        ),
        (WITHOUT, None),
        (staged(), None),
        (
            staged((" b: 1", " c: 1")),
            "run.yaml:10: data.curriculum[1].weights.c: no source has this name (use one of a, b)",
        ),
        (
            staged(("tokens: 4000, ", "")),
            "run.yaml:8: data.curriculum[0]: ... set tokens",
        ),
        (
            staged(("4000", "1e9")),
            "run.yaml:9: data.curriculum[1]: ... 1,000,000,000 tokens, ... the run has 10,240",
        ),
        (
            staged(("{a: 0.9, b: 0.1}", "{a: 0}")),
            "run.yaml:8: data.curriculum[0].weights: all weights are 0",
        ),
        (
            staged(("0.1", "-0.1")),
            "run.yaml:8: data.curriculum[0].weights.b: must be at least 0, not -0.1",
        ),
        (
            changed("steps: 10,", "epochs: 1,"),
            "run.yaml:8: training.epochs: ... set training.tokens or steps",
        ),
        (changed("  - {store: a, weight: 0.7}", "  - 3"), "run.yaml:4: data.train[0]: must be a mapping, not 3"),
    ],
)
def test_mistakes_in_a_mixture(text, said):
    if said is None:
        load(text)
    else:
        found = problems(text)
        assert len(found) == 1, found
        assert shows(found[0], said)


def test_a_near_name_is_suggested():
    text = WITHOUT.replace("{store: a}", "{store: data/wikipedia}").replace(
        "  sequence", "  curriculum:\n  - {weights: {wikipdia: 1, wikipedia: 1, b: 1}}\n  sequence"
    )
    assert "no source has this name; did you mean 'wikipedia'?" in one(text)


def test_a_source_without_any_stage_is_reported():
    text = WITHOUT.replace("  sequence", "  curriculum:\n  - {weights: {a: 1}}\n  sequence")
    assert shows(one(text), "run.yaml:5: data.train[1]: no stage of the curriculum has a weight for b")


SINGLE = "model: llama-tiny\ndata: {train: a, sequence_length: 64}\ntraining: {steps: 10}\n"


@pytest.mark.parametrize("key", ["temperature=2", "mixture_block=10", "curriculum=[{weights: {a: 1}}]"])
def test_one_source_has_nothing_to_mix(key):
    assert "a single source, not a mixture; remove the key" in one(SINGLE, f"data.{key}")


def test_a_block_of_a_mixture_without_weights_says_nothing():
    sources = SINGLE.replace("train: a", "train: [a, b]")
    assert shows(one(sources, "data.mixture_block=3"), "command line: data.mixture_block: the sources have no wei")
    load(sources, "data.mixture_block=3", "data.temperature=1")
    load(sources.replace("[a, b]", "[a, {store: b, max_epochs: 2}]"), "data.mixture_block=3")


@pytest.mark.parametrize(
    ("start", "said"),
    [(48, "set 32 or 16 or 8 or 4"), (64, "set 32"), (10, "set 32"), (0, "must be at least 1")],
)
def test_length_warm_up_halves_the_sequence(start, said):
    found = problems(SINGLE, f"data.length_warmup={{start: {start}, steps: 5}}")
    assert len(found) == 1
    assert shows(found[0], said)
    assert load(SINGLE, "data.length_warmup={start: 16, steps: 5}").data.length_warmup.start == 16


def test_length_warm_up_is_whole_and_no_longer_than_the_run():
    assert shows(problems(SINGLE, "data.length_warmup={start: 8}")[0], "data.length_warmup.steps: required")
    assert shows(problems(SINGLE, "data.length_warmup=8")[0], "must be a mapping")
    assert "11 steps of warm-up, but the run has 10" in one(SINGLE, "data.length_warmup={start: 8, steps: 11}")


def test_best_fit_keeps_documents_apart_and_is_for_stores():
    assert load(SINGLE, "data.packing=best_fit").data.document_attention is True
    assert load(SINGLE).data.document_attention is False
    found = one(SINGLE, "data.packing=best_fit", "data.document_attention=false")
    assert shows(found, "data.document_attention: ... best_fit ... set true, or remove the key")
    write("class Rows:\n    __len__ = __getitem__ = None\n    def __init__(self): ...\n", "mine.py")
    own = SINGLE.replace("train: a", "train: {type: 'mine:Rows'}")
    assert "data.train has none" in one(own, "data.packing=best_fit")
    assert "have the dataset return segments" in one(own, "data.document_attention=true")
    assert shows(problems(SINGLE, "data.packing=bestfit")[0], "did you mean 'best_fit'")


def test_a_model_that_cannot_keep_documents_apart_is_reported():
    write("class Net:\n    def __init__(self): ...\n    def forward(self, tokens, positions): ...\n", "net.py")
    text = SINGLE.replace("llama-tiny", "{type: 'net:Net'}")
    assert "Net.forward has no argument segments" in one(text, "data.document_attention=true")
    load(text)


def test_datasets_of_the_users_own_join_a_mixture():
    write("class Rows:\n    __len__ = __getitem__ = None\n    def __init__(self, *, rows: int = 3): ...\n", "mine.py")
    text = changed("{store: a, weight: 0.7}", "{type: 'mine:Rows', weight: 0.7, rows: 4}")
    source = load(text).data.train[0]
    assert (source.label, source.weight, source.arguments) == ("Rows", 0.7, {"rows": 4})
    assert shows(problems(text.replace("rows: 4", "rows: x"))[0], "data.train[0].rows: must be an integer")


def test_texts_are_stores():
    config = load(SINGLE.replace("train: a", "train: [a, /data/b]"))
    assert [source.label for source in config.data.train] == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        MIX,
        staged(),
        SINGLE.replace("train: a", "train: [a, b]").replace("sequence", "temperature: 2, sequence"),
        SINGLE.replace("sequence_", "packing: best_fit, length_warmup: {start: 8, steps: 3}, sequence_"),
    ],
)
def test_what_is_written_reads_back_to_the_same(text):
    config = load(text)
    write(dump_yaml(config, origins=True), "again.yaml")
    assert load(name="again.yaml") == config


# ---- headers


def test_every_store_of_a_mixture_is_opened():
    make_store("a", 5000)
    (found,) = problems(MIX, data=True)
    assert shows(found, "run.yaml:5: data.train[1].store: b: no such token store")
    make_store("b", 60)
    assert shows(one(MIX, data=True), "run.yaml:5: data.train[1].store: b has 60 tokens, but one sequence needs 65")


def test_stores_of_different_tokenizers_do_not_mix():
    make_store("a", 5000)
    make_store("b", 5000, digest="two")
    assert shows(
        one(MIX, data=True), "run.yaml:5: data.train[1].store: b was packed with a different tokenizer than a; "
    )


def test_pairs_of_answers_are_not_learned_as_text():
    make_store("a", 5000)
    make_store("b", 5000, kind="preferences")
    assert shows(
        one(MIX, data=True),
        "run.yaml:5: data.train[1].store: b is a store of preference pairs, but the objective pretrain ",
    )
    single = SINGLE.replace("train: a", "train: a, validation: b")
    assert shows(one(single, data=True), "run.yaml:2: data.validation: b is a store of preference pairs")
    write("class Pairs:\n    data = 'preferences'\n    weight = inputs = loss = None\n", "mine.py")
    mine = "objective: {type: 'mine:Pairs'}\n"
    said = "run.yaml:4: data.train[0].store: a is a store of texts, but the objective mine:Pairs learns from preference"
    assert shows(one(MIX + mine, data=True), said)
    make_store("p", 5000, kind="preferences")
    load(SINGLE.replace("train: a", "train: b, validation: p") + mine, data=True)
    make_store("c", 5000, kind="conversations")
    load(SINGLE.replace("train: a", "train: c"), data=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"vocabulary": 301}, "vocab_size 301 ... a has 300"), ({"eod_id": 7}, "eod_id 7 ... a has 0")],
)
@pytest.mark.parametrize("first", ["one", None])
def test_stores_of_unknown_tokenizers_are_compared_as_far_as_they_can_be(changes, said, first):
    make_store("a", 5000, digest=first)
    make_store("b", 5000, digest=None, **changes)
    assert shows(
        one(MIX, data=True), f"run.yaml:5: data.train[1].store: b has {said} ... convert b again with --tokenizer"
    )


def test_the_largest_vocabulary_counts():
    make_store("a", 5000)
    make_store("b", 5000, vocabulary=400)
    config = load(MIX.replace(", vocab_size: 512", ""), data=True)
    assert config.model.vocab_size == 400
    assert config.origins["model.vocab_size"] == "from the tokenizer of b"


def test_limits_that_the_run_passes_are_reported():
    make_store("a", 64 * 50 + 1)
    make_store("b", 64 * 50 + 1)
    text = MIX.replace("weight: 0.7", "weight: 0.7, max_epochs: 1").replace("steps: 10", "steps: 9")
    load(text, data=True)  # 9 x 16 = 144 of 50 + 100
    found = one(text, "training.steps=10", data=True)
    assert shows(found, "run.yaml:4: data.train[0].max_epochs: ... 10,240 tokens ... max_epochs ... raise max_epochs")
    assert shows(found, "9,600 tokens; raise max_epochs")


def test_a_list_without_weights_has_epochs():
    make_store("a", 64 * 40 + 1)
    make_store("b", 64 * 40 + 1)
    text = SINGLE.replace("train: a", "train: [a, b]").replace("steps: 10", "epochs: 2").replace("10", "2")
    from weft.cli.config.check import facts

    config = load(text, data=True)
    told = facts(config, open_data=True)
    assert told["length"].startswith("5 steps")  # of 32 sequences, for 160
    assert "2 epochs of 2,560" in told["data"]


def test_what_is_known_of_a_mixture_with_a_dataset_of_the_users_own_is_shown():
    from weft.cli.config.check import facts

    make_store("a", 64 * 40 + 1)
    write("class Rows:\n    __len__ = __getitem__ = None\n    def __init__(self): ...\n", "mine.py")
    text = SINGLE.replace("train: a", "train: [{store: a, weight: 3}, {type: 'mine:Rows', weight: 1, max_epochs: 2}]")
    told = facts(load(text, data=True), open_data=True)["data"].splitlines()
    assert "2 sources in sequences of 64" in told[0]
    assert "known when the run starts" in told[0]
    assert told[1].split() == ["a", "75.00%", "a,", "2,561", "tokens"]
    assert told[2].split() == ["Rows", "25.00%", "mine:Rows,", "at", "most", "2", "epochs"]
    text = SINGLE.replace("train: a", "train: [a, {type: 'mine:Rows'}]").replace("64}", "64, temperature: 2}")
    told = facts(load(text, data=True), open_data=True)["data"].splitlines()
    assert told[1].split() == ["a", "by", "size", "a,", "2,561", "tokens"]
    text = SINGLE.replace("train: a", "train: {type: 'mine:Rows'}").replace("llama-tiny", MIX[7 : MIX.index("\n")])
    assert facts(load(text, data=True), open_data=True)["data"].startswith("mine:Rows, in sequences of 64")


def test_a_store_of_an_unknown_tokenizer_beside_others_is_a_warning(capsys):
    from weft.cli.main import main

    make_store("a", 5000)
    make_store("b", 5000, digest=None)
    write(MIX)
    assert main(["config", "check", "run.yaml"]) == 0
    said = capsys.readouterr().err
    assert "the tokenizer of b is not known" in said
    write(SINGLE.replace("train: a", "train: b"))
    assert main(["config", "check", "run.yaml"]) == 0  # nothing beside it
    assert "not known" not in capsys.readouterr().err


def test_the_plan_is_shown_without_torch_and_numpy():
    make_store("a", 64 * 50 + 1)
    make_store("b", 64 * 50 + 1)
    write(MIX)
    said = check_without_torch_and_numpy()
    assert "2 sources in sequences of 64 tokens, shares exact over every 10,000 sequences" in said
    assert "70.00%            7,168 tokens, 2.24 epochs of 3,200" in said
