"""That the mesh which is told as the nearest legal one is legal, and that no other is nearer."""

import itertools
import math
import random
import re
import time

import pytest
import yaml

from weft.config.legal_mesh import reasons_against
from weft.config.mesh import AXES, MeshShape, ParallelSection
from weft.config.mesh_needs import Needs

SIZES = (*AXES, "ep")


def values(rng: random.Random, sizes: dict[str, int]) -> dict:
    """A run's values, as the rules read them, of a random model."""
    found = {f"parallel.{name}": info.get_default() for name, info in ParallelSection.model_fields.items()}
    found |= {f"parallel.{axis}": size for axis, size in sizes.items()}
    heads = rng.choice([6, 8, 12, 16, 32])
    found |= {
        "model.type": "decoder",
        "model.num_hidden_layers": rng.randint(1, 48),
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": rng.choice([None, heads, heads // 2, 2, 1]),
        "model.hidden_size": heads * 64,
        "model.mlp": "gated",
        "model.vocab_size": rng.choice([50257, 50304, 32000, 128256]),
        "data.sequence_length": rng.choice([96, 1024, 8192]),
        "training.micro_batch_size": rng.choice([None, 1, 4]),
    }
    if rng.random() < 0.5:
        found |= {"model.moe.num_experts": rng.choice([8, 60, 128]), "model.moe.num_experts_per_tok": 2}
        found |= {"model.moe.moe_intermediate_size": rng.choice([704, 768, 1408])}
    if rng.random() < 0.2:
        found["parallel.compress.rank"] = 4
    if rng.random() < 0.2:
        found["parallel.reshard_after_forward"] = rng.choice([2, 4, 8])
    found["parallel.pp_schedule"] = rng.choice(["gpipe", "1f1b", "interleaved_1f1b", "dualpipev"])
    found["parallel.cp_method"] = rng.choice(["auto", "all_to_all", "all_gather"])
    return found


def wanted_sizes(rng: random.Random, largest: int) -> dict[str, int]:
    sizes = {axis: rng.choice([1, 1, 1, rng.randint(1, largest)]) for axis in SIZES}
    if rng.random() < 0.7:
        sizes[rng.choice(AXES)] = -1
    return sizes


def nearest_of(found: dict, sequences: int, ranks: int | None) -> dict[str, int] | None:
    """What is said to be the nearest, with what is left out; None if the mesh is legal, {} if there is none."""
    reasons = reasons_against(found.get, sequences, ranks)
    if not reasons:
        return None
    found_it = re.compile(r".*; (?:nearest legal: parallel: |(?=no mesh))(.*)")
    (text,) = (found_it.match(reason.what)[1] for reason in reasons if found_it.match(reason.what))
    if text.startswith("no mesh"):
        return {}
    return dict.fromkeys(SIZES, 1) | {"dp_shard": -1} | yaml.safe_load(text)


def of_parallel(found: dict) -> dict:
    return {name: found[f"parallel.{name}"] for name in ParallelSection.model_fields}


def every_mesh(ranks: int, experts: int | None):
    """All meshes of so many ranks, by trying."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for sizes in itertools.product(divisors, repeat=4):
        if ranks % math.prod(sizes) == 0:
            whole = dict(zip(("pp", "dp_replicate", "cp", "tp"), sizes, strict=True))
            whole["dp_shard"] = ranks // math.prod(sizes)
            for ep in range(1, (experts or 1) + 1):
                yield whole | {"ep": ep}


def is_legal(found: dict, sizes: dict[str, int], sequences: int, ranks: int | None) -> bool:
    changed = found | {f"parallel.{axis}": size for axis, size in sizes.items()}
    return not reasons_against(changed.get, sequences, ranks)


@pytest.mark.parametrize("seed", range(60))
def test_the_nearest_mesh_is_legal_and_no_other_is_nearer(seed):
    rng = random.Random(seed)
    ranks, sizes = rng.choice([1, 4, 6, 8, 12, 16]), wanted_sizes(rng, 8)
    found = values(rng, sizes)
    experts, sequences = found.get("model.moe.num_experts"), rng.choice([32, 48, 512])
    told = nearest_of(found, sequences, ranks)
    if told is None:
        return
    set_ones = math.prod(max(1, sizes[axis]) for axis in AXES)
    wanted = {axis: max(1, ranks / set_ones) if size == -1 else size for axis, size in sizes.items()}

    def far(one: dict[str, int]) -> float:
        return sum(abs(math.log2(one[axis] / wanted[axis])) for axis in SIZES)

    needs = Needs(found.get, ParallelSection.model_construct(**of_parallel(found)), sequences)
    legal = [one for one in every_mesh(ranks, experts) if needs.fits(MeshShape(**one))]
    if not legal:
        assert told == {}
        return
    told["dp_shard"] = ranks // math.prod(told[axis] for axis in AXES if axis != "dp_shard")
    assert is_legal(found, told, sequences, ranks)
    assert far(told) == pytest.approx(min(map(far, legal)))


@pytest.mark.parametrize("seed", range(100))
def test_a_mesh_is_legal_or_a_legal_one_is_named_in_no_time(seed):
    rng = random.Random(seed)
    ranks = rng.choice([None, 64, 720, 1024, 2048, 2048])
    found = values(rng, wanted_sizes(rng, 2 if ranks is None else 64))
    sequences = rng.choice([512, 2048])
    began = time.process_time()
    told = nearest_of(found, sequences, ranks)
    assert time.process_time() - began < 1  # some 5 ms; garbage collection, or a busy machine, may come in between
    if told:
        assert is_legal(found, told, sequences, ranks)
