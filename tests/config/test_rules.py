"""What must hold between keys, and between the keys and the data's headers."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
from config_cases import RUN, SHORT, check_without_torch_and_numpy, load, problems, shows, write

from weft.config.dump import dump_yaml
from weft.config.run import RunConfig
from weft.errors import UserError

SIZES = "data: {train: store, sequence_length: 64}\ntraining: {steps: 3}\n"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "hidden_size: 66, num_attention_heads: 4",
            "model.num_attention_heads: 4 heads ... hidden_size 66; choose 3 heads, or set head_dim",
        ),
        (
            "hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 3",
            "model.num_key_value_heads: 3 ... 4 attention heads; choose 2",
        ),
        ("hidden_size: 12, num_attention_heads: 4", "model.head_dim: rotary ... 3; set an even head_dim"),
        ("hidden_size: 64, num_attention_heads: 4, head_dim: 7", "model.head_dim: rotary ... set an even head_dim"),
    ],
)
def test_heads(model, said):
    (found,) = problems(f"model: {{num_hidden_layers: 1, {model}}}\n{SIZES}")
    assert shows(found, f"run.yaml:1: {said}")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            "moe: {num_experts: 4, num_experts_per_tok: 5}",
            "model.moe.num_experts_per_tok: 5, but the model has 4 experts; set at most 4",
        ),
        (
            "moe: {num_experts: 8, num_experts_per_tok: 2, n_group: 3}",
            "model.moe.n_group: 3 groups ... 8 experts; change n_group or",
        ),
        (
            "moe: {num_experts: 8, num_experts_per_tok: 2, n_group: 4, topk_group: 5}",
            "model.moe.topk_group: 5, but the model has 4 groups of experts; set at most 4",
        ),
        (
            "moe: {num_experts: 8, num_experts_per_tok: 3, n_group: 4, topk_group: 1}",
            "model.moe.topk_group: 1 groups of 2 experts ... 3 ... raise topk_group",
        ),
        (
            "mlp: plain, moe: {num_experts: 8, num_experts_per_tok: 3}",
            "model.mlp: ... remove the key, or remove model.moe",
        ),
        (
            "moe: {num_experts: 4, num_experts_per_tok: 2, mlp_only_layers: [0, 7]}",
            "model.moe.mlp_only_layers: 7 is not a layer of the model; ... from 0 to 0",
        ),
        (
            "moe: {num_experts: 4, num_experts_per_tok: 2, first_k_dense_replace: 1}",
            "model.moe.first_k_dense_replace: 1 of 1 layers have an MLP, so no layer has experts; lower the number",
        ),
        ("moe: {num_experts: 4, num_expert_per_tok: 5}", "model.moe.num_expert_per_tok: unknown key; did you mean"),
        (
            "qk_norm: true, mla: {kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8}",
            "model.qk_norm: latent attention (model.mla) ... remove the key",
        ),
    ],
)
def test_experts_and_latent_attention(part, said):
    text = f"model: {{num_hidden_layers: 1, hidden_size: 66, num_attention_heads: 4, head_dim: 16, {part}}}\n{SIZES}"
    found = problems(text if "mla" not in part else text.replace("head_dim: 16, ", ""))
    assert shows(found[0], f"run.yaml:1: {said}")


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ("rope_type: dynamic", "dynamic ... original_max_position_embeddings ... set it"),
        (
            "rope_type: longrope, original_max_position_embeddings: 8, short_factor: [1, 2], long_factor: [1]",
            "long_factor has 1 numbers; ... 2, all above 0; set it",
        ),
        (
            "rope_type: longrope, original_max_position_embeddings: 8, short_factor: [1, -2], long_factor: [1, 2]",
            "short_factor has 2 numbers; ... 2, all above 0; set it",
        ),
    ],
)
def test_rotations(scaling, said):
    text = (
        "model: {num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 4, partial_rotary_factor: 0.5, "
        f"rope_scaling: {{factor: 2, {scaling}}}}}\n{SIZES}"
    )
    (found,) = problems(text)
    assert shows(found, f"run.yaml:1: model.rope_scaling: {said}")
    right = "rope_type: longrope, original_max_position_embeddings: 8, short_factor: [1, 2], long_factor: [1.5, 2]"
    assert load(text.replace(scaling, right)).model.rope_scaling.long_factor == [1.5, 2.0]


def test_a_family_that_there_is_not_names_the_nearest():
    (found,) = problems(f"model: {{preset: llama-tiny, family: lama}}\n{SIZES}")
    assert shows(found, "model.family: unknown family 'lama'; did you mean 'llama'")


def test_a_head_size_of_its_own_need_not_divide_the_width():
    model = load(
        f"model: {{num_hidden_layers: 1, hidden_size: 66, num_attention_heads: 4, head_dim: 16}}\n{SIZES}"
    ).model
    # q, k, v and o of 4 heads of 16; the MLP's three matrices of 8/3 of the width; the head.
    assert model.size(512).matmul == 4 * 66 * (4 * 16) + 3 * 66 * 176 + 66 * 512


def test_an_odd_head_size_needs_positions_that_do_not_rotate():
    sizes = "num_hidden_layers: 1, hidden_size: 12, num_attention_heads: 4"
    assert load(f"model: {{{sizes}, position: learned}}\n{SIZES}").model.qk_head_dim == 3
    (found,) = problems(f"model: {{{sizes}}}\n{SIZES}")
    assert shows(found, "run.yaml:1: model.head_dim: rotary ... 3; set an even head_dim")


def test_a_value_of_a_preset_is_reported_at_the_key_that_broke_it():
    assert shows(problems(RUN, "model.hidden_size=66")[0], "command line: model.num_attention_heads: 4 heads do not")


def test_the_runs_length_is_said_once():
    begin = "model: llama-tiny\ndata: {train: store}\n"
    assert shows(problems(begin + "training: {}\n"), ["run.yaml:3: training: ... set one of steps, tokens or epochs"])
    assert shows(
        problems(begin + "training: {dtype: float32,\n  steps: 3, tokens: 4, epochs: 2}\n"),
        ["run.yaml:4: training.steps: steps and tokens and epochs ... keep one of these keys"],
    )
    assert load(begin + "training: {steps: null, epochs: 0.5}\n").training.epochs == 0.5
    # One that is wrong is not also missing.
    assert len(problems(begin + "training: {steps: 0}\n")) == 1


@pytest.mark.parametrize(("preset", "table"), [("llama-tiny", ""), ("gpt2", " (a learned table)")])
def test_sequences_longer_than_the_model_takes(preset, table):
    text = f"model: {preset}\ndata: {{train: store, sequence_length: 5000}}\ntraining: {{steps: 3}}\n"
    (found,) = problems(text)
    assert shows(found, "run.yaml:2: data.sequence_length: 5000 ...")
    assert shows(found, f"positions{table}; shorten it, or set model.max_position_embeddings: 5000")
    assert load(text, "model.max_position_embeddings=5000").data.sequence_length == 5000


def test_the_default_sequence_length():
    assert load(SHORT).data.sequence_length == 1024
    assert load(SHORT, "model.max_position_embeddings=300").data.sequence_length == 300


def test_a_batch_is_whole_sequences():
    assert shows(
        problems(RUN, "training.batch_tokens=1000"),
        ["command line: training.batch_tokens: 1000 ... 64; set 960 or 1024"],
    )
    assert shows(problems(RUN, "training.batch_tokens=32")[0], "set 64")
    assert shows(
        problems(RUN, "data.sequence_length=100"), ["run.yaml:8: training.batch_tokens: 1024 ... 100; set 1000 or 1100"]
    )


def test_a_micro_batch_is_no_more_than_the_batch():
    (found,) = problems(RUN, "training.micro_batch_size=17")
    assert shows(
        found,
        "command line: training.micro_batch_size: 17 sequences ... set at most 16, or raise training.batch_tokens",
    )
    load(RUN, "training.micro_batch_size=16")
    assert shows(problems(SHORT, "training.micro_batch_size=33")[0], "set at most 32")


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a\\b", "''", "' '", '"a\\nb"'])
def test_names_that_are_no_folders(name):
    (found,) = problems(f"{SHORT}run: {{name: {name}}}\n")
    assert shows(found, "... run.directory")


def test_the_default_name_is_the_files():
    assert load(SHORT, name="deep/my.tiny.yaml").run.name == "my.tiny"


def test_warm_up():
    assert shows(
        problems(RUN, "schedule.warmup_steps=31")[0],
        "command line: schedule.warmup_steps: 31 steps of warm-up, but the run has 30",
    )
    assert shows(
        problems(RUN, "schedule.warmup_fraction=0.1")[0],
        "run.yaml:7: schedule.warmup_steps: warmup_fraction ... remove one",
    )
    (found,) = problems(RUN, "training.steps=null", "training.tokens=4000")
    assert shows(found, "5 steps of warm-up, but the run has 4")
    load(RUN, "training.steps=null", "training.epochs=0.001")  # the data's size is not known here


def test_the_mesh(monkeypatch):
    assert shows(problems(RUN, "parallel.dp_replicate=-1")[0], "command line: parallel: only one of")
    assert shows(problems(RUN, "parallel.dp_replicate=0")[0], "command line: parallel.dp_replicate: 0 ranks")
    load(RUN, "parallel.dp_replicate=3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert shows(
        problems(RUN, "parallel.dp_replicate=3")[0],
        "command line: parallel: dp_replicate 3 does not divide the 4 ranks",
    )
    load(RUN, "parallel.dp_replicate=2")


def test_prompts_need_a_tokenizer():
    (found,) = problems(SHORT, "samples.prompts=[a]")
    assert shows(found, "command line: samples.prompts: ... set tokenizer, or remove the prompts")
    load(SHORT, "samples.prompts=[a]", "tokenizer=tok")


# ---- headers


@pytest.fixture
def data(monkeypatch):
    """Headers as the readers would return them; tests change them."""
    tokenizers = {"tok": SimpleNamespace(vocab_size=512, eod_id=0, digest="one")}
    stores = {
        name: SimpleNamespace(
            num_tokens=1000,
            num_documents=3,
            vocab_size=512,
            tokenizer_digest="one",
            eod_id=0,
            bytes=9,
            kind="text",
            fields=(),
        )
        for name in ("store", "heldout")
    }

    def reader(known, kind):
        def read(path):
            if str(path) not in known:
                raise UserError(f"there is no {kind} here; make one", path)
            return known[str(path)]

        return read

    monkeypatch.setattr("weft.config.header_rules.read_tokenizer_header", reader(tokenizers, "tokenizer"))
    monkeypatch.setattr("weft.config.header_rules.read_store_header", reader(stores, "token store"))
    return SimpleNamespace(tokenizers=tokenizers, stores=stores)


def test_good_data(data):
    assert load(RUN, data=True).model.vocab_size == 512


def test_the_vocabulary_comes_from_the_tokenizer_or_the_store(data):
    config = load(SHORT, "tokenizer=tok", "data.sequence_length=64", data=True)
    assert config.model.vocab_size == 512
    assert config.origins["model.vocab_size"] == "from the tokenizer tok"
    config = load(SHORT, "data.sequence_length=64", data=True)
    assert config.model.vocab_size == 512
    assert load(RUN, "model.vocab_size=1024", data=True).model.vocab_size == 1024
    config = load(SHORT, "tokenizer=tok", "data.sequence_length=64", "model.pad_vocab_to_multiple=100", data=True)
    assert config.model.vocab_size == 600
    assert config.origins["model.vocab_size"] == "from the tokenizer tok, up to a multiple of 100"
    (found,) = problems(RUN, "model.vocab_size=1024", "model.pad_vocab_to_multiple=100", data=True)
    assert shows(found, "command line: model.pad_vocab_to_multiple: no effect, because vocab_size ... 1024; remove")


def test_a_vocabulary_smaller_than_the_tokenizers(data):
    assert shows(
        problems(RUN, "model.vocab_size=511", data=True),
        ["command line: model.vocab_size: 511 ... 512 tokens of the tokenizer tok; set 512 or remove the key"],
    )


def test_all_that_is_missing_is_reported(data):
    found = problems(RUN, "tokenizer=a", "data.train=b", "data.validation=c", data=True)
    assert shows(
        found,
        [
            "command line: tokenizer: a: there is no tokenizer here; make one",
            "command line: data.train: b: there is no token store here; make one",
            "command line: data.validation: c: there is no token store here; make one",
        ],
    )


def test_stores_shorter_than_one_sequence(data):
    data.stores["heldout"].num_tokens = 64
    (found,) = problems(RUN, data=True)
    assert shows(
        found, "run.yaml:4: data.validation: heldout has 64 tokens, ... shorten data.sequence_length or pack more text"
    )
    data.stores["heldout"].num_tokens = 65
    load(RUN, data=True)
    data.stores["store"].num_tokens = 3
    assert shows(problems(RUN, data=True)[0], "run.yaml:4: data.train: store has 3 tokens")


SEVERAL = RUN.replace("validation: heldout", "validation: {code: heldout, prose: store}")


def test_several_validation_stores_by_name(data):
    config = load(SEVERAL, data=True)
    assert config.data.held_out == {"code": "heldout", "prose": "store"}
    assert RunConfig.load(write(dump_yaml(config))).data == config.data
    assert load(RUN, data=True).data.held_out == {"": "heldout"}
    assert load(RUN, "data.validation=null").data.held_out == {}
    data.stores["heldout"].num_tokens = 64
    (found,) = problems(SEVERAL, data=True)
    assert shows(found, "run.yaml:4: data.validation.code: heldout has 64 tokens, ... shorten data.sequence_length")
    assert shows(
        problems(SEVERAL, "data.validation.code=c", "data.validation.prose=[3]", "data.validation.x={}"),
        [
            "command line: data.validation.prose: must be a folder or {type: ...}, not a list",
            "command line: data.validation.x.type: required: ... module:Class`; add it",
        ],
    )
    (found,) = problems(SEVERAL, "data.validation.a/b=c")
    assert shows(found, "'a/b' ... use only letters, digits, _, - and .")
    told = problems(SEVERAL, "data.validation.loss=c", "data.validation.bits_per_byte=d")
    assert shows(
        told,
        [
            f"command line: data.validation.{name}: {name!r} ... validation_loss/{name}); rename the set"
            for name in ("loss", "bits_per_byte")
        ],
    )
    assert shows(
        problems(RUN, "data.validation={}"),
        ["command line: data.validation: the mapping is empty; add an entry, or remove the key"],
    )
    (found,) = problems(SEVERAL, "data.validation.code=''")
    assert shows(found, "command line: data.validation.code: empty; set the path of a folder")


def test_other_tokenizers(data):
    data.stores["heldout"].tokenizer_digest = "two"
    assert (
        "data.validation: heldout was packed with a different tokenizer than the training data"
        in problems(RUN, data=True)[0]
    )
    data.stores["heldout"].tokenizer_digest = "one"
    data.tokenizers["tok"].digest = "three"
    assert shows(problems(RUN, data=True)[0], "data.train: store was packed with a different tokenizer than tok")


def test_warm_up_of_a_run_in_epochs(data):
    overrides = ["training.steps=null", "training.epochs=1", "schedule.warmup_steps=2"]
    (found,) = problems(RUN, *overrides, data=True)
    assert shows(found, "2 steps of warm-up, but the run has 1")


def test_structure_and_data_are_reported_together(data):
    found = problems(RUN, "tokenizer=a", "optimizer.learning_rate=3", data=True)
    assert len(found) == 2


# ---- with files as they are


@pytest.fixture
def files():
    """A tokenizer folder and two stores, byte by byte."""
    vocabulary = {"model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(300)}}, "added_tokens": []}
    Path("tok").mkdir()
    Path("tok/tokenizer.json").write_text(json.dumps(vocabulary))
    Path("tok/tokenizer_config.json").write_text('{"eos_token": "t0"}')
    digest = headers_module().read_tokenizer_header("tok").digest
    for name, tokens in (("store", 500), ("heldout", 70)):
        Path(name).mkdir()
        Path(name, "tokens.bin").write_bytes(b"\1\0" * tokens)
        index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1, 2) + struct.pack("<iqqq", tokens, 0, 0, 1)
        Path(name, "tokens.idx").write_bytes(index)
        info = {
            "tokens": tokens,
            "documents": 1,
            "vocab_size": 300,
            "tokenizer_digest": digest,
            "eod_id": 0,
            "bytes": 9,
            "dtype": "uint16",
        }
        Path(name, "store.json").write_text(json.dumps(info))


def headers_module():
    from weft import headers

    return headers


def test_real_headers_are_read(files):
    assert load(RUN, data=True).model.vocab_size == 512
    (found,) = problems(RUN, "model.vocab_size=299", data=True)
    assert shows(found, "299 ... 300 tokens of the tokenizer tok")


def test_a_store_short_by_one_byte_and_a_missing_tokenizer(files):
    Path("heldout/tokens.bin").write_bytes(Path("heldout/tokens.bin").read_bytes()[:-1])
    found = problems(RUN, "tokenizer=nowhere", data=True)
    assert len(found) == 2
    assert shows(found[0], "run.yaml:4: data.validation: heldout/tokens.bin: ... 139 bytes instead of 140")
    assert found[1].startswith("command line: tokenizer: nowhere: no such tokenizer")
    load(RUN, "tokenizer=nowhere", data=False)


def test_checking_headers_needs_no_torch_and_no_numpy(files):
    Path("run.yaml").write_text(RUN)
    said = check_without_torch_and_numpy()
    assert "store, 500 tokens, in sequences of 64" in said
    assert "(68.6 epochs)" in said


def test_a_run_that_cannot_end():
    for key, value in (("steps", "1e30"), ("tokens", "1e30"), ("tokens", 10**400), ("steps", 10**12 + 1)):
        (found,) = problems(SHORT.replace("steps: 10", f"{key}: {value}"))
        what = "more than 1e+12 steps ... lower the value"
        assert shows(found, f"run.yaml:3: training.{key}: {what}")
    load(SHORT.replace("steps: 10", "steps: 1e12"))


def test_a_name_longer_than_a_folders():
    (found,) = problems(SHORT, f"run.name={'a' * 300}")
    assert shows(found, "run.name: 300 bytes ... use at most 200")
    assert load(SHORT, f"run.name={'a' * 200}").run.name == "a" * 200
    assert shows(problems(SHORT, "run.name=a" + 100 * "\u00e9")[0], "201 bytes")


def test_early_stopping_needs_validations():
    for stop in ("early_stopping", "{type: early_stopping, metric: loss}"):
        (found,) = problems(RUN + f"callbacks: [lr_monitor, {stop}]\n", "data.validation=null")
        assert shows(found, "callbacks[1]: early_stopping ... set data.validation, or remove the callback")
    assert load(RUN + "callbacks: [early_stopping]\n").callbacks


def test_the_same_tracker_twice():
    (found,) = problems(SHORT + "log: {trackers: [tensorboard, mlflow, tensorboard]}\n")
    assert shows(found, "run.yaml:4: log.trackers[2]: tensorboard is in the list twice; remove one")
    write("class T:\n    log = text = close = None\n    def __init__(self, run, where: str = 'x'): ...\n", "mine.py")
    twice = "log: {trackers: [{type: 'mine:T', where: a}, {type: 'mine:T', where: b}]}\n"
    assert len(load(SHORT + twice).log.trackers) == 2
    assert shows(problems(SHORT + twice.replace("where: b", "where: a"))[0], "mine:T is in the list twice; remove one")
    (found,) = problems(SHORT + "callbacks: [lr_monitor, ema, lr_monitor]\n")
    assert shows(found, "run.yaml:4: callbacks[2]: lr_monitor is in the list twice; remove one")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "objective: {type: sft, loss: sequences}\n",
            "run.yaml:4: objective.loss: sequences ... data.packing to best_fit, or data.document_attention to true",
        ),
        ("objective: {type: sft, loss: mean}\n", "run.yaml:4: objective.loss: ... tokens"),
        ("objective: {type: sft, neftune: -1}\n", "run.yaml:4: objective.neftune: must be at least 0, not -1"),
    ],
)
def test_fine_tuning(text, said):
    (found,) = problems(SHORT + text, "data.packing=concatenate")
    assert shows(found, said)


def test_fine_tuning_that_knows_its_documents():
    text = SHORT + "objective: {type: sft, loss: sequences, neftune: 5}\n"
    arguments = load(text, "data.packing=best_fit").objective.arguments
    assert arguments.items() >= {"loss": "sequences", "neftune": 5}.items()
    assert load(text, "data.document_attention=true").objective.type == "sft"


def test_noise_needs_to_know_the_embedding_of_a_custom_model():
    write("class Model:\n    def __init__(self): ...\n    def forward(self, tokens): ...\n", "mine.py")
    text = "model: {type: 'mine:Model'}\n" + SIZES + "objective: {type: sft, neftune: 5}\n"
    (found,) = problems(text)
    assert shows(found, "run.yaml:4: objective.neftune: ... Model is not known; add ... or set neftune to 0")
