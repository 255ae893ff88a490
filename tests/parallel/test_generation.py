"""Generation with a decoder that is sharded over `tp`, against one process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from generation_parts import pieces, refused, sharded
from running import metrics  # pyright: ignore[reportMissingImports]

import weft
from weft.config.model import ModelSection
from weft.generation.engine import Engine
from weft.models.build import build_model
from weft.models.initialize import initialize

sys.path.append(str(Path(__file__).parent.parent / "checkpoint"))
from checkpoint_cases import write  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.xdist_group("ranks")

SHAPE = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
KINDS = {
    "grouped": {"num_key_value_heads": 2, "attention_bias": True, "tie_word_embeddings": True},
    "one key head": {"num_key_value_heads": 1, "sliding_window": 9, "qk_norm": True},
    "slopes": {"position": "alibi"},
    "latent, experts": {"mla": LATENT, "moe": {"num_experts": 4, "num_experts_per_tok": 2}},
    "learned": {"position": "learned", "norm": "layernorm", "mlp": "plain"},
}
PROMPTS = [[5], list(range(40)), [7, 8, 9], list(range(35)), [1, 2]]


def save(folder, **keys):
    section = ModelSection(**(SHAPE | keys))
    model = build_model(section)
    initialize(model, seed=3)
    write(folder, model, None, architecture=section.model_dump(mode="json", by_alias=True))
    return folder


def compare(runner, folder, kinds, **options):
    paths = [save(folder / kind, **KINDS[kind]) for kind in kinds]
    found = runner.pool.call(sharded, 2, paths, PROMPTS, options, seconds=120)
    assert found[0] == found[1]
    for path, (got, size) in zip(paths, found[0], strict=True):
        engine = Engine(weft.load_model(path), max_cache_tokens=800, **options)
        for ours, one in zip(got, pieces(engine, PROMPTS), strict=True):
            assert [token for token, *_ in ours] == [token for token, *_ in one]
            for (_, logprob, top), (_, other, others) in zip(ours, one, strict=True):
                assert logprob == pytest.approx(other, abs=1e-4)
                assert [value for _, value in top] == pytest.approx([value for _, value in others], abs=1e-4)
        if engine.runner.cache is not None:
            share = 1 if path.name in ("latent, experts", "one key head") else 2
            assert size == engine.runner.cache.nbytes // share


def test_two_ranks_generate_what_one_process_does(runner, tmp_path):
    compare(runner, tmp_path, ["grouped", "latent, experts"], max_step_tokens=13)


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"cache": False}, {"batch_invariant": True}], ids=str)
def test_two_ranks_and_every_kind_of_attention(runner, tmp_path, options):
    compare(runner, tmp_path, KINDS, **options)


def test_sizes_that_ranks_do_not_divide(runner, tmp_path):
    path = save(tmp_path, num_attention_heads=2, intermediate_size=23)
    (told, other) = runner.pool.call(refused, 2, path)
    assert told == other
    assert "tensor parallelism over 2 ranks: 2 does not divide the MLP's hidden size, 23" in told


@pytest.mark.matrix
def test_the_command_prints_what_one_process_prints(tmp_path, tiny_tokenizer):
    """Also its errors, once."""
    path = save(tmp_path / "run", vocab_size=512)
    shutil.copytree(tiny_tokenizer, path / "tokenizer")
    command = [sys.executable, "-m", "weft", "generate", str(path), "Kalo", "Ren mi", "--max-new-tokens", "5"]
    one, two = (
        subprocess.run([*command, "--seed", "2", *more], capture_output=True, text=True, timeout=120)
        for more in ([], ["--tp", "2"])
    )
    assert (two.returncode, two.stdout) == (0, one.stdout)
    short = subprocess.run([*command, "--tp", "2", "--max-length", "6"], capture_output=True, text=True, timeout=120)
    assert (short.returncode, short.stderr.count("a text ended at")) == (0, 1)
    assert "[2] Ren mi" in two.stdout
    wrong = subprocess.run([*command, "--tp", "2", "--top-p", "7"], capture_output=True, text=True, timeout=120)
    assert (wrong.returncode, wrong.stderr.count("top_p is 7")) == (2, 1)


MESHES = [
    {"pp": 2, "cp": 2, "cp_method": "all_to_all"},
    *(
        pytest.param(mesh, marks=pytest.mark.matrix)
        for mesh in (
            {"tp": 2, "dp_shard": 2},
            {"cp": 2, "tp": 2, "cp_method": "all_gather"},
            {"cp": 2, "dp_shard": 2, "cp_method": "ring"},
            {"pp": 2, "tp": 2, "pp_schedule": "zbv_zero_bubble"},
        )
    ),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_samples_of_a_sharded_run_are_those_of_one_process(runner, run_yaml, tmp_path, tiny_heldout, mesh):
    """And training goes on as if none had been written."""
    texts, losses = [], []
    for name, parallel, ranks in (("one", {}, 1), ("sharded", mesh, 4)):
        file = run_yaml(
            run={"name": name},
            model={"num_hidden_layers": 4 if "pp_schedule" in mesh else 2}
            | {"num_key_value_heads": 4, "tie_word_embeddings": True},
            parallel=parallel,
            samples={"prompts": ["Ka", "Kalo mi ren"], "max_new_tokens": 7, "temperature": 0.0},
            data={"validation": str(tiny_heldout)},
            training={"steps": 2, "batch_tokens": 512, "dtype": "float64"},
            validation={"every": 1, "tokens": 512},
            schedule={"type": "constant", "warmup_steps": 0},
        )
        runner.pool.run(file, ranks, fresh=True, seconds=120)
        lines = (tmp_path / "runs" / name / "samples.jsonl").read_text().splitlines()
        texts.append([line.split('"samples"')[-1] for line in lines])
        losses.append([line["loss"] for line in metrics(tmp_path / "runs" / name)])
    assert len(texts[0]) >= 2
    assert texts[0] == texts[1]
    assert losses[0] == pytest.approx(losses[1], rel=0, abs=1e-9)
