"""`--to megatron` and `--to dcp` with `weft import`: what stock loaders read, round trips, refusals."""

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config

import weft
from weft.checkpoint.distributed.dcp_reader import _Chunk, _cover
from weft.checkpoint.weights import open_weights
from weft.cli.main import main
from weft.errors import UserError

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, rope_scaling=LLAMA3 | {"original_max_position_embeddings": 8192}),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "gpt2": GPT2Config(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None
    ),
}  # fmt: skip


def made(folder: Path, *names: str) -> Path:
    """Writes Transformers models with random weights to FOLDER/NAME."""
    for name in names:
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
        for number, parameter in enumerate(model.parameters()):
            mean, generator = float(parameter.dim() == 1), torch.Generator().manual_seed(number)
            torch.nn.init.normal_(parameter, mean, 0.2, generator=generator)
        model.save_pretrained(folder / name)
    return folder


def exported(folder: Path, to: str, *names: str) -> Path:
    for name in names:
        assert main(["export", str(folder / name), str(folder / f"{name}-{to}"), "--to", to]) == 0
    return folder


def same_weights(one: Path, other: Path) -> bool:
    first, second = (open_weights(path, huggingface=False).tensors for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name].full(), second[name].full()) for name in first)


def largest_difference(folder: Path, answers: Path) -> float:
    """Largest difference between Weft's logits and those that another program wrote for the same tokens."""
    found = torch.load(answers)
    models = {name: weft.load_model(folder / name) for name, *_ in found}
    with torch.no_grad():
        pairs = [(models[name](tokens), logits[..., :100]) for (name, *_), (tokens, logits) in found.items()]
    assert min(ours.std() for ours, _ in pairs) > 0.5
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def run_script(name: str, python: str, folder: Path, *names: str) -> None:
    command = [python, str(Path(__file__).with_name(name)), str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def load_stock(path: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint, read by torch.distributed.checkpoint."""
    entries = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size) for name, entry in entries.items() if hasattr(entry, "size")}
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


@pytest.mark.export
def test_megatron_core_computes_the_same_logits_and_its_checkpoints_are_imported(tmp_path):
    names = [*CONFIGS]
    exported(made(tmp_path, *names), "megatron", *names)
    run_script("megatron_models.py", sys.executable, tmp_path, *names)
    assert largest_difference(tmp_path, tmp_path / "logits.pt") < 1e-4
    for name in names:
        weft.import_model(tmp_path / f"{name}-saved", tmp_path / f"{name}-back")  # described by Megatron's arguments
        assert same_weights(tmp_path / f"{name}-back", tmp_path / name)
        assert open_weights(tmp_path / f"{name}-back").tensors["norm.weight"].dtype == torch.float32


def test_megatrons_layout_in_closed_form(tmp_path):
    """Megatron-LM's own description: rows of qkv alternate by query group, gate before up, padding after the rows."""
    model = AutoModelForCausalLM.from_pretrained(exported(made(tmp_path, "llama"), "megatron", "llama") / "llama")
    ours, theirs = load_stock(tmp_path / "llama-megatron" / "release"), model.state_dict()
    for layer in range(2):
        q, k, v = (theirs[f"model.layers.{layer}.self_attn.{kind}_proj.weight"].split(8) for kind in "qkv")
        rows = [q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]  # heads of 8 rows, two groups of two query heads
        assert torch.equal(ours["decoder.layers.self_attention.linear_qkv.weight"][layer], torch.cat(rows))
        gate, up = (theirs[f"model.layers.{layer}.mlp.{kind}_proj.weight"] for kind in ("gate", "up"))
        assert torch.equal(ours["decoder.layers.mlp.linear_fc1.weight"][layer], torch.cat([gate, up]))
        norm = theirs[f"model.layers.{layer}.post_attention_layernorm.weight"]
        assert torch.equal(ours["decoder.layers.mlp.linear_fc1.layer_norm_weight"][layer], norm)
    words = ours["embedding.word_embeddings.weight"]
    assert words.shape == (128, 32)
    assert torch.equal(words[:100], theirs["model.embed_tokens.weight"])
    assert not words[100:].any()


def test_dcp_has_torchtitans_names_and_rotary_order(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(exported(made(tmp_path, "llama"), "dcp", "llama") / "llama")
    ours, theirs = load_stock(tmp_path / "llama-dcp"), model.state_dict()
    k = theirs["model.layers.1.self_attn.k_proj.weight"]
    pairs = [k[head + one] for head in (0, 8) for pair in range(4) for one in (pair, pair + 4)]
    assert torch.equal(ours["layers.1.attention.qkv_linear.wk.weight"], torch.stack(pairs))
    assert torch.equal(ours["layers.0.feed_forward.w3.weight"], theirs["model.layers.0.mlp.up_proj.weight"])
    assert ours.keys() >= {"tok_embeddings.weight", "norm.weight", "lm_head.weight", "layers.1.attention.wo.weight"}


@pytest.mark.parametrize("to", ["dcp", "megatron"])
def test_round_trip_of_a_trained_checkpoint_with_its_tokenizer(tmp_path, hf_folder, to, capsys):
    assert main(["export", str(hf_folder), str(tmp_path / "out"), "--to", to, "--dtype", "bfloat16"]) == 0
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "back"), "--dtype", "float32"]) == 0
    first, second = (open_weights(path, huggingface=False).tensors for path in (hf_folder, tmp_path / "back"))
    assert all(torch.equal(first[name].full().bfloat16().float(), second[name].full()) for name in first)
    assert (tmp_path / "back" / "tokenizer" / "tokenizer.json").is_file()
    assert main(["export", str(hf_folder), str(tmp_path / "out"), "--to", to]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.export
def test_torchtitan_computes_the_same_logits_and_its_checkpoints_are_imported(tmp_path, environment):
    names = ["llama", "qwen3"]
    exported(made(tmp_path, *names), "dcp", *names)
    run_script("torchtitan_models.py", environment("torchtitan"), tmp_path, *names)
    assert largest_difference(tmp_path, tmp_path / "titan.pt") < 1e-4
    for name in names:
        weft.import_model(tmp_path / f"{name}-trained", tmp_path / f"{name}-back", config=tmp_path / name)
        assert same_weights(tmp_path / f"{name}-back", tmp_path / name)


class Attack:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


def test_a_pickle_runs_nothing(tmp_path):
    """Stock loaders unpickle .metadata; the import only parses it, and refuses what is not a checkpoint."""
    exported(made(tmp_path, "llama"), "dcp", "llama")
    path, trace = tmp_path / "llama-dcp", tmp_path / "trace"
    content = pickle.loads((path / ".metadata").read_bytes())
    content.planner_data = Attack(trace)
    (path / ".metadata").write_bytes(pickle.dumps(content))
    weft.import_model(path, tmp_path / "back")
    assert not trace.exists()
    assert same_weights(tmp_path / "back", tmp_path / "llama")
    (path / ".metadata").write_bytes(pickle.dumps(Attack(trace)))
    with pytest.raises(UserError, match="not the metadata of torch"):
        weft.import_model(path, tmp_path / "other")
    assert not trace.exists()


def test_mistakes_are_one_line_and_write_nothing(tmp_path, capsys):
    made(tmp_path, "llama", "gpt2", "qwen2")
    exported(tmp_path, "dcp", "llama")

    def fails(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "model.norm is 'layernorm'" in fails("export", tmp_path / "gpt2", tmp_path / "out", "--to", "dcp")
    assert "model.attention_bias is True" in fails("export", tmp_path / "qwen2", tmp_path / "out", "--to", "dcp")
    wide = ("export", tmp_path / "llama", tmp_path / "out", "--to", "megatron", "--vocab-multiple", 0)
    assert "must be at least 1" in fails(*wide)
    mixtral = ("export", made(tmp_path, "mixtral") / "mixtral", tmp_path / "out", "--to", "dcp")
    assert "model.qk_norm is False" in fails(*mixtral)
    path = tmp_path / "llama-dcp"
    other = ("import", path, tmp_path / "out", "--config", tmp_path / "qwen2")
    assert "attention_bias" in fails(*other)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 40'))
    assert "layers.0.feed_forward.w1.weight has shape [48, 32]" in fails("import", path, tmp_path / "out")
    config.unlink()
    assert "--config" in fails("import", path, tmp_path / "out")
    largest = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))
    assert f"{largest}" in fails("import", path, tmp_path / "out", "--config", tmp_path / "llama")
    largest.write_bytes(bytes(data[:-20]))
    assert "truncated" in fails("import", path, tmp_path / "out", "--config", tmp_path / "llama")
    (tmp_path / "classic").mkdir()
    (tmp_path / "classic" / "latest_checkpointed_iteration.txt").write_text("5")
    assert "torch_dist" in fails("import", tmp_path / "classic", tmp_path / "out")


@pytest.mark.parametrize("to", ["dcp", "megatron"])
def test_damaged_checkpoints_are_one_line(tmp_path, to, capsys):
    """Bytes of each kind of file are changed or cut off: the import succeeds or ends with one line, without OUT."""
    exported(made(tmp_path, "llama"), to, "llama")
    path, random, refused = tmp_path / f"llama-{to}", Random(3), 0
    files = [file for file in path.rglob("*") if file.name in (".metadata", "common.pt", "__0_0.distcp")]
    whole = {file: file.read_bytes() for file in files}
    archive = next(file for file in files if file.name == "__0_0.distcp")
    name = whole[archive].rindex(b"archive/")  # of the archive's last entry, which is marked as UTF-8 here
    central = whole[archive].rindex(b"PK\x01\x02")
    utf8 = bytearray(whole[archive])
    utf8[central + 9] |= 8
    utf8[name] = 0xFF
    cases = [(archive, bytes(utf8))]
    for _ in range(10):
        file = random.choice(files)
        data = bytearray(whole[file])
        for at in random.choices(range(len(data)), k=random.choice((1, 4, 12))):
            data[at] = random.randrange(256)
        cases.append((file, bytes(data[: len(data) if random.random() < 0.7 else random.randrange(len(data))])))
    (path / "config.json").unlink(missing_ok=to == "megatron")
    config = [] if to == "megatron" else ["--config", str(tmp_path / "llama")]
    capsys.readouterr()
    for file, data in cases:
        file.write_bytes(data)
        code = main(["import", str(path), str(tmp_path / "out"), *config])
        error = [line for line in capsys.readouterr().err.splitlines() if line[:9] not in ("importing", "warning: ")]
        assert (code, (tmp_path / "out").exists()) in ((0, True), (2, False)), error
        if code == 2:
            assert len(error) == 1
            assert str(path) in error[0]
            refused += 1
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        file.write_bytes(whole[file])
    assert refused > 4


@pytest.mark.parametrize("name", ["junk", "\0", "9" * 5000, "../llama-megatron/release", ""])
def test_megatrons_latest_iteration_must_be_a_number(tmp_path, name, capsys):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(name)
    assert main(["import", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "not the number of an iteration" in error
    assert (error.count("\n"), len(error) < 400) == (1, True)


@pytest.mark.parametrize(
    ("slices", "complete"),
    [
        ([((0, 0), (4, 6)), ((4, 0), (4, 6))], True),
        ([((0, 0), (8, 3)), ((0, 3), (8, 3))], True),
        ([((0, 0), (4, 6)), ((0, 0), (4, 6))], False),  # twice the first rows: no slice has the others
        ([((0, 0), (4, 6)), ((3, 0), (4, 6))], False),
        ([((0, 0), (4, 6)), ((5, 0), (4, 6))], False),
        ([((0, 0), (4, 6))], False),
    ],
)
def test_slices_of_a_dcp_checkpoint_must_cover_the_tensor_once(slices, complete):
    chunks = [_Chunk(Path("file"), 0, 0, *one) for one in slices]
    assert _cover(chunks, (8, 6)) == complete
