"""The rules by which tensor parallelism shards a model's matrices; `parallel/axes/tensor.py` applies the rules.

Between layers each rank of `tp` has a shard of every sequence. Attention and MLPs all-gather the sequence, compute with
sharded matrices, and reduce-scatter their output. Rules are keyed by a pattern of module and parameter names:

| rule | for | meaning |
| --- | --- | --- |
| "part" | a module | all-gathers the input over `tp`, reduce-scatters the partial output |
| "embedding" | a module | rows sharded; takes all token ids, returns the rank's shard of the sequence |
| "head" | a module | rows sharded; all-gathers the input, returns full logits |
| "positions" | a module | replicated; takes all positions, returns the rank's shard of the sequence |
| "scores" | a module | replicated; all-gathers the output |
| "norm" | a module | an RMS norm whose input vector is sharded |
| 0, 1, 2 | a parameter | sharded along this dim, `Shard(dim)` |
| "added" | a parameter | replicated, and added to a partial output: each rank adds 1 / ranks of it |

Parameters without a rule are replicated. Patterns have the syntax of `fnmatch`; the first match applies.

The class of a custom model has such a table as its attribute `weft_sharding`, a dictionary. In a custom model's table,
a rule "embedding", "head" or "norm" for a module also shards dim 0 of the module's parameters. If the table has no rule
"head", the model's output is all-gathered along the sequence.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from weft.config.adapter import is_stacked, layer_of
from weft.config.model import ModelSection

Kind = Literal["part", "embedding", "positions", "norm", "head", "scores", "added"]
ShardingRule = int | Kind


def decoder_sharding(config: ModelSection, ranks: int) -> dict[str, ShardingRule]:
    """Returns the sharding rules of the built-in decoder.

    Args:
        config: the decoder's configuration.
        ranks: size of `tp`. If it does not divide the number of key/value heads, the projections of keys and values are
            replicated, and each rank computes one key/value head.
    """
    table: dict[str, ShardingRule] = {
        "embed_tokens": "embedding",
        "embed_tokens.weight": 0,
        "embed_positions": "positions",
        "lm_head.weight": 0,
        "score": "scores",
        "layers.*.attention": "part",
        "layers.*.q_proj.*": 0,
        "layers.*.q_b_proj.*": 0,
        "layers.*.kv_b_proj.*": 0,
        "layers.*.attend.sinks": 0,
        "layers.*.o_proj.weight": 1,
        "layers.*.o_proj.bias": "added",
        "layers.*.mlp": "part",
        "layers.*.experts.gate_proj": 1,
        "layers.*.experts.up_proj": 1,
        "layers.*.experts.gate_bias": 1,
        "layers.*.experts.up_bias": 1,
        "layers.*.experts.down_proj": 2,
        "layers.*.experts.down_bias": "added",
        "layers.*.gate_proj.*": 0,
        "layers.*.up_proj.*": 0,
        "layers.*.down_proj.weight": 1,
        "layers.*.down_proj.bias": "added",
    }
    if config.kv_heads % ranks == 0:
        table |= {"layers.*.k_proj.*": 0, "layers.*.v_proj.*": 0}
    if config.qk_norm and config.qk_norm_over == "width":
        for name in ("q_norm", "k_norm"):
            table |= {f"layers.*.{name}": "norm", f"layers.*.{name}.weight": 0}
    return table


def find_rule(table: dict[str, ShardingRule], name: str) -> ShardingRule | None:
    """Returns the rule for the module or parameter with this name; None if no pattern matches the name.

    The rules of an adapter's parameters follow from the rule of the layer's weight: where the weight's outputs are
    sharded, so are the outputs of B and the magnitudes of DoRA; where its inputs are sharded, so are the inputs of A.
    """
    if (adapter := layer_of(name)) is None:
        rules: list[ShardingRule] = [rule for pattern, rule in table.items() if fnmatchcase(name, pattern)]
        rule = rules[0] if rules else None
        weight = name.removesuffix("_scale")  # the scales of a quantized weight are sharded like the weight
        scales = weight != name and (weight.endswith(".weight") or is_stacked(weight))
        return find_rule(table, weight) if rule is None and scales else rule
    layer, kind = adapter
    outputs = 1 if is_stacked(layer) else 0  # dimension of the outputs in the weight
    rule = find_rule(table, layer if is_stacked(layer) else f"{layer}.weight")
    sharded = {
        outputs: ("lora_b", "lora_b0", "lora_magnitude"),
        outputs + 1: ("lora_a", "lora_a0"),
    }
    return rule if isinstance(rule, int) and kind in sharded.get(rule, ()) else None
