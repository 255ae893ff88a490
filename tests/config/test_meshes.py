"""Which meshes are refused, in which words, and that what is said to be the nearest legal one is that."""

import re

import pytest
import yaml
from config_cases import DENSE, load, shows, write

from weft.config.derive import derive
from weft.config.legal_mesh import check_mesh
from weft.config.mesh import AXES, MeshShape
from weft.errors import ConfigError

SIZES = (*AXES, "ep")
MOE = DENSE.replace("96}", "96,\n  moe: {num_experts: 12, num_experts_per_tok: 2, moe_intermediate_size: 40}}")


@pytest.fixture
def mesh(monkeypatch):
    """What is said of a mesh, whose keys stand one below the other from the line of `parallel:` on."""

    def said(text: str, ranks: int | None, keys: dict) -> list[str]:
        lines = text.partition("parallel:")[0] + "parallel:\n"
        lines += "".join(f"  {key}: {in_yaml(value)}\n" for key, value in keys.items())
        before = lines_of(lambda: load(lines))
        if ranks is None:
            return before
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        known = lines_of(lambda: load(lines))
        monkeypatch.delenv("WORLD_SIZE")
        if not before:  # legal on some number of ranks: told of this one when it is known
            assert lines_of(lambda: check_mesh(load(lines), ranks)) == known
        return known

    return said


def lines_of(act) -> list[str]:
    try:
        act()
    except ConfigError as error:
        return str(error).splitlines()
    return []


def in_yaml(value) -> str:
    return yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").strip()


@pytest.mark.parametrize(
    ("keys", "ranks", "said"),
    [
        # sizes that do not multiply to the ranks
        (
            {"dp_replicate": 3},
            8,
            "run.yaml:6: parallel: dp_replicate 3 does not divide the 8 ranks; start a multiple of 3, ... divides 8; "
            "nearest legal: parallel: {dp_replicate: 4, dp_shard: 2}",
        ),
        (
            {"dp_shard": 2, "tp": 2},
            8,
            "run.yaml:6: parallel: dp_replicate 1 x dp_shard 2 x tp 2 = 4, but the run has 8 ranks; set "
            "dp_shard: -1 ... or start 4 ranks (--nproc 4); nearest legal: parallel: {dp_shard: 4, tp: 2}",
        ),
        (
            {"pp": -1},
            None,
            "run.yaml:6: parallel: only one of pp and dp_shard can be -1; set the others ... nearest legal: "
            "parallel: {pp: -1, dp_shard: 1}",
        ),
        # tensor parallel
        (
            {"tp": 16},
            16,
            "run.yaml:6: parallel.tp: 16 does not divide 8 attention heads (model.num_attention_heads); nearest "
            "legal: parallel: {dp_shard: 2, tp: 8}",
        ),
        (
            {"tp": 16},
            None,
            "run.yaml:6: parallel.tp: 16 does not divide 8 attention heads (model.num_attention_heads); nearest "
            "legal: parallel: {tp: 8}",
        ),
        # context parallel
        (
            {"cp": 64},
            64,
            "run.yaml:6: parallel.cp: cp 64 cannot split sequences of 64 tokens (data.sequence_length); choose a "
            "multiple of 128; nearest legal: parallel: {dp_shard: 2, cp: 32}",
        ),
        (
            {"cp": 8, "cp_method": "all_to_all"},
            8,
            "run.yaml:7: parallel.cp_method: all_to_all, but cp 8 does not divide 4 key/value heads; set auto; "
            "nearest legal: parallel: {dp_shard: 2, cp: 4}",
        ),
        (
            {"cp": 4, "tp": 2, "cp_method": "all_to_all"},
            8,
            "run.yaml:8: parallel.cp_method: all_to_all, but cp 4 does not divide 4 key/value heads / tp 2; set "
            "auto; nearest legal: parallel: {dp_shard: 2, cp: 2, tp: 2}",
        ),
        # expert parallel
        (
            {"ep": 2},
            2,
            "run.yaml:6: parallel.ep: 2, but the model has no experts (model.moe); nearest legal: parallel: "
            "{dp_shard: 2}",
        ),
        # pipelines
        (
            {"pp": 16, "pp_schedule": "gpipe"},
            16,
            "run.yaml:6: parallel.pp: 16 stages, but the model has 8 layers (model.num_hidden_layers); nearest "
            "legal: parallel: {pp: 8, dp_shard: 2}",
        ),
        (
            {"pp": 4, "stages_per_rank": 3, "pp_schedule": "interleaved_1f1b"},
            4,
            "run.yaml:6: parallel.pp: 4 x 3 stages, but the model has 8 layers (model.num_hidden_layers); set "
            "stages_per_rank: 2; nearest legal: parallel: {pp: 2, dp_shard: 2}",
        ),
        (
            {"pp": 2, "stages_per_rank": 3, "pp_schedule": "dualpipev"},
            2,
            "run.yaml:7: parallel.stages_per_rank: 3 ... dualpipev has 2 stages per rank (one from each end); remove "
            "the key",
        ),
        (
            {"pp": 2, "stages_per_rank": 2},
            2,
            "run.yaml:7: parallel.stages_per_rank: 2 ... 1f1b has 1 stage per rank; remove the key, or set "
            "pp_schedule: interleaved_1f1b",
        ),
        (
            {"pp": 2, "stage_layers": [3, 3]},
            2,
            "run.yaml:7: parallel.stage_layers: 6 layers ... the model has 8 (model.num_hidden_layers); set "
            "numbers with this sum",
        ),
        (
            {"pp": 2, "stage_layers": [8, 0]},
            2,
            "run.yaml:7: parallel.stage_layers: [8, 0]: ... set at least 1 layer",
        ),
        (
            {"pp": 4, "stage_layers": [4, 4]},
            8,
            "run.yaml:7: parallel.stage_layers: 2 stages, ... pp 4 with 1f1b has 4; list the layers of each stage, "
            "or remove the key; nearest legal: parallel: {pp: 2, dp_shard: 4}",
        ),
        (
            {"pp": 4, "dp_shard": 8},
            32,
            "run.yaml:6: parallel.pp: 1f1b over 4 ranks needs at least 4 ... has 2 (4 sequences, 2 per micro-batch); "
            "set training.micro_batch_size: 1; nearest legal: parallel: {pp: 4, dp_shard: 4, tp: 2}",
        ),
        (
            {"pp": 4, "dp_shard": 16},
            64,
            "run.yaml:6: parallel.pp: 1f1b over 4 ranks needs at least 4 ... has 1 (2 sequences, 2 per micro-batch); "
            "set training.batch_tokens: 8192; nearest legal: parallel: {pp: 4, dp_shard: 4, tp: 4}",
        ),
        (
            {"pp": 4, "dp_shard": 3, "pp_schedule": "interleaved_1f1b", "stages_per_rank": 2},
            12,
            "",
        ),
        (
            {"pp": 2, "dp_shard": 3, "pp_schedule": "interleaved_1f1b"},
            6,
            "",
        ),
        (
            {"pp": 2, "dp_shard": 7, "pp_schedule": "interleaved_1f1b"},
            14,
            "",
        ),
        # FSDP
        (
            {"reshard_after_forward": 3, "dp_shard": 4},
            4,
            "run.yaml:6: parallel.reshard_after_forward: 3 does not divide dp_shard 4 x cp 1; set true or false; "
            "nearest legal: parallel: {dp_replicate: 4}",
        ),
        (
            {"reshard_after_forward": 2, "dp_shard": 4, "tp": 2},
            8,
            "run.yaml:6: parallel.reshard_after_forward: 2 of 4 ranks ... set true or false; nearest legal: "
            "parallel: {dp_replicate: 2, dp_shard: 2, tp: 2}",
        ),
        (
            {"reshard_after_forward": 0},
            4,
            "run.yaml:6: parallel.reshard_after_forward: 0 is not a number of ranks; set true",
        ),
        (
            {"zero_stage": 3, "reshard_after_forward": False},
            4,
            "run.yaml:7: parallel.reshard_after_forward: false ... zero_stage 3 sets true; remove one of the keys",
        ),
        (
            {"zero_stage": 1, "reduce_gradients": "every"},
            4,
            "run.yaml:7: parallel.reduce_gradients: every ... zero_stage 1 sets last; remove one of the keys",
        ),
        (
            {"compress": {"rank": 2, "start_step": 5}},
            4,
            "run.yaml:6: parallel.compress: ... one replica; set dp_replicate, or remove the section; nearest legal: "
            "parallel: {dp_replicate: 2, dp_shard: 2}",
        ),
        (
            {"compress": {"rank": 2, "start_step": 5}},
            1,
            "run.yaml:6: parallel.compress: ... one replica; set dp_replicate, or remove the section; no mesh "
            "with this number of ranks is legal",
        ),
    ],
)
def test_a_dense_decoder(mesh, keys, ranks, said):
    assert shows(mesh(DENSE, ranks, keys), [said] if said else [])


@pytest.mark.parametrize(
    ("keys", "ranks", "said"),
    [
        (
            {"ep": 8},
            8,
            "run.yaml:7: parallel.ep: 8 does not divide the 12 experts (model.moe.num_experts); nearest legal: "
            "parallel: {dp_shard: 8, ep: 4}",
        ),
        (
            {"ep": 4, "tp": 2},
            4,
            "run.yaml:7: parallel.ep: 4 does not divide dp_shard 2 x cp 1 ... ; nearest legal: parallel: "
            "{dp_shard: 2, tp: 2, ep: 2}",
        ),
        (
            {"dp_shard": 8, "ep": 2, "reshard_after_forward": 2},
            8,
            "run.yaml:9: parallel.reshard_after_forward: 2, ... 4 ranks (dp_shard x cp / ep); set 4, true or "
            "false; nearest legal: parallel: {dp_shard: 8, ep: 4}",
        ),
        ({"dp_shard": 4, "ep": 4, "reshard_after_forward": 2}, 4, ""),
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, 8, ""),
        ({"dp_shard": -1, "ep": 4}, None, ""),
    ],
)
def test_experts(mesh, keys, ranks, said):
    assert shows(mesh(MOE, ranks, keys), [said] if said else [])


def test_all_that_is_wrong_is_reported_at_once(mesh):
    text = MOE.replace("2048, micro_batch_size: 2", "1920, compile: true").replace(
        "sequence_length: 64", "sequence_length: 60"
    )
    keys = {"tp": 16, "ep": 5, "pp": 2, "pp_schedule": "zbv_zero_bubble", "zero_stage": 3, "reduce_gradients": "last"}
    said = mesh(text, 160, keys)
    assert shows(
        said,
        [
            "run.yaml:5: training.compile: zbv_zero_bubble ... to false, or parallel.pp_schedule: interleaved_1f1b",
            "run.yaml:7: parallel.tp: 16 does not divide 8 attention heads (model.num_attention_heads)",
            "run.yaml:7: parallel.tp: 16 does not divide the experts' hidden size, 40 "
            "(model.moe.moe_intermediate_size)",
            "run.yaml:7: parallel.tp: tp 16 cannot split sequences of 60 tokens (data.sequence_length); choose a "
            "multiple of 16",
            "run.yaml:8: parallel.ep: 5 does not divide the 12 experts (model.moe.num_experts); nearest legal: "
            "parallel: {pp: 2, dp_shard: 20, tp: 4, ep: 4}",
            "run.yaml:12: parallel.reduce_gradients: last, but zero_stage 3 sets every; remove one of the keys",
        ],
    )


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("vocab_size: 511", "the vocabulary's 511 rows (model.vocab_size); set model.pad_vocab_to_multiple: 2, or"),
        ("intermediate_size: 97", "the MLP's hidden size, 97 (model.intermediate_size)"),
        (
            "num_attention_heads: 5, num_key_value_heads: 5, head_dim: 8",
            "5 attention heads (model.num_attention_heads)",
        ),
        (
            "moe: {num_experts: 4, num_experts_per_tok: 1, moe_intermediate_size: 11, first_k_dense_replace: 1}, "
            "intermediate_size: 96",
            "the experts' hidden size, 11 (model.moe.moe_intermediate_size)",
        ),
        (
            "moe: {num_experts: 4, num_experts_per_tok: 1, moe_intermediate_size: 12, mlp_only_layers: [1]}, "
            "intermediate_size: 97",
            "the MLP's hidden size, 97 (model.intermediate_size)",
        ),
        # No layer has this MLP.
        ("moe: {num_experts: 4, num_experts_per_tok: 1, moe_intermediate_size: 12}, intermediate_size: 97", None),
        ("mla: {kv_lora_rank: 9, qk_nope_head_dim: 3, qk_rope_head_dim: 2, v_head_dim: 5}, q: 0", None),
    ],
)
def test_what_two_tensor_ranks_can_share(mesh, model, said):
    keys = {"vocab_size": "512", "hidden_size": "64", "num_hidden_layers": "2", "num_attention_heads": "4"}
    keys |= dict(re.findall(r"(\w+): (\{.*?\}|[^,]+)(?:, |$)", model))
    keys.pop("q", None)
    text = "model:\n" + "".join(f"  {key}: {value}\n" for key, value in keys.items()) + DENSE[DENSE.index("data:") :]
    found = mesh(text, None, {"tp": 2})
    if said is None:
        assert shows(found, [])
    else:
        (line,) = found
        assert shows(line, f"parallel.tp: 2 does not divide {said}")


@pytest.mark.parametrize(
    ("model", "tp", "said"),
    [
        (
            "",
            6,
            "parallel.tp: 6 does not divide 4 key/value heads (model.num_key_value_heads), nor is it a multiple of 4;",
        ),
        ("", 12, None),  # three ranks for each
        (", qk_norm: true", 12, None),
        # One norm of all heads together would count each three times.
        (
            ", qk_norm: true, qk_norm_over: width",
            12,
            "heads (model.num_key_value_heads), which share one norm (model.qk_norm_over);",
        ),
    ],
)
def test_tensor_ranks_may_be_more_than_heads_of_keys(mesh, model, tp, said):
    text = DENSE.replace("num_attention_heads: 8", "num_attention_heads: 12, head_dim: 8")
    text = (
        text.replace("512", "480").replace("96}", f"96{model}}}").replace("sequence_length: 64", "sequence_length: 96")
    )
    text = text.replace("batch_tokens: 2048", "batch_tokens: 3072")
    found = mesh(text, None, {"tp": tp})
    assert shows(found, [] if said is None else [said])


def test_every_row_of_a_warm_up_can_be_cut(mesh):
    text = DENSE.replace("sequence_length: 64", "sequence_length: 64, length_warmup: {start: 4, steps: 2}")
    assert mesh(text, 4, {"cp": 4}) == []  # by heads
    assert mesh(text, 4, {"cp": 2, "tp": 2}) == []
    (line,) = mesh(text, 4, {"cp": 4, "cp_method": "all_gather"})
    assert shows(line, "cp 4 ... 4 tokens (data.length_warmup.start); choose a multiple of 8")


def test_micro_batches_that_are_not_set_are_such_as_a_pipeline_can_order(mesh):
    text = DENSE.replace(", micro_batch_size: 2", "")
    for keys in ({"pp": 8}, {"pp": 4, "pp_schedule": "dualpipev"}, {"pp": 3, "pp_schedule": "interleaved_1f1b"}):
        assert mesh(text, keys["pp"], keys) == []
        pipeline = load(text, "parallel.dp_shard=1", *(f"parallel.{key}={value}" for key, value in keys.items()))
        length = derive(pipeline, mesh=MeshShape(pp=keys["pp"]))
        assert pipeline.parallel.supports(length.accumulation, keys["pp"])
        assert length.accumulation >= keys["pp"] * pipeline.parallel.virtual_stages > 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pp": 2}, "model.position: own:Turns ... pipeline stage; choose a built-in component"),
        ({"tp": 2}, "model.position: own:Turns ... heads (tp 2); choose a built-in component"),
        ({"cp": 2}, "model.position: own:Turns ... tokens (cp 2); choose a built-in component"),
        ({"dp_replicate": 2}, None),
    ],
)
def test_parts_of_ones_own(mesh, keys, said):
    write("class Turns:\n  def __init__(self, config): ...\n  def forward(self, q, k, positions): ...\n", "own.py")
    found = mesh(DENSE.replace("96}", "96, position: 'own:Turns'}"), 2, keys)
    assert shows(found, [] if said is None else [f"run.yaml:2: {said}; nearest legal: parallel: {{dp_shard: 2}}"])


def test_rows_that_are_trained_alone(mesh):
    text = DENSE.replace("micro_batch_size: 2", "micro_batch_size: 2, only_rows_from: 500")
    assert mesh(text, 4, {"tp": 2, "cp": 2}) == []
    (line,) = mesh(text, 2, {"pp": 2})
    assert shows(line, "run.yaml:4: training.only_rows_from: 500 ... remove the key")


OWN = """\
from torch import nn

class Plain(nn.Module):
    def __init__(self): ...

class Cut(Plain):
    weft_sharding = {"words": "embedding"}

class Inherits(Cut): ...
"""


@pytest.mark.parametrize(
    ("chosen", "keys", "said"),
    [
        (
            "own:Plain",
            {"tp": 2},
            "parallel.tp: 2, ... own:Plain ... weft_sharding",
        ),
        ("own:Cut", {"tp": 2}, None),
        ("own:Inherits", {"tp": 2}, None),
        ("own:Cut", {"pp": 2}, "parallel.pp: 2, ... a custom model supports only dp_replicate ... weft_sharding"),
        ("own:Cut", {"cp": 2}, "parallel.cp: 2, ... a custom model supports only dp_replicate ... weft_sharding"),
        ("own:Cut", {"dp_shard": 2, "ep": 2}, "parallel.ep: 2, ... a custom model supports only dp_replicate"),
        ("own:Cut", {"dp_replicate": 2}, None),
    ],
)
def test_a_model_of_ones_own(mesh, chosen, keys, said):
    write(OWN, "own.py")
    text = f"model: {{type: '{chosen}'}}\n" + DENSE[DENSE.index("data:") :]
    found = mesh(text, 2, keys)
    if said is None:
        assert shows(found, [])
    else:
        (line,) = found
        assert shows(line, said)
        assert line.endswith("nearest legal: parallel: {dp_shard: 2}")
