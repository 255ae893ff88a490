"""How a model's matrices are cut for tensor parallelism: data, which `parallel/axes/tensor.py` acts on.

Between the parts of a layer each rank has a slice of every sequence. A part (attention, an MLP) sees all tokens and has
a cut of each matrix; its outputs are summed over the ranks. So the table says what the parts are, and what is cut:

| | for | meaning |
| --- | --- | --- |
| "part" | a module | it is given all tokens; what it returns is one summand of its output |
| "embedding" | a module | its rows are cut; it is given all ids, and returns the rank's slice of the sequence |
| "head" | a module | its rows are cut; it is given all tokens, and returns all logits |
| "positions" | a module | whole; it is given all positions, and returns the rank's slice |
| "norm" | a module | the RMS norm of one long vector, of which each rank has a cut |
| 0, 1, 2 | a parameter | the dimension that is cut |
| "added" | a parameter | whole, and added to a sum over the ranks: each rank adds its share |

Parameters that no pattern names are whole on every rank. Patterns are those of `fnmatch`; the first that fits counts.

A model of one's own has such a table as `weft_sharding`, a dictionary that is an attribute of its class. In it the kind
of an embedding, a head or a norm says that rows are cut; without a "head" the output is gathered along the sequence.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

from weft.config.model import ModelSection

Kind = Literal["part", "embedding", "positions", "norm", "head", "added"]
ShardingRule = int | Kind


def decoder_sharding(config: ModelSection, ranks: int) -> dict[str, ShardingRule]:
    """The table of the built-in decoder, in all its configurations.

    Args:
        ranks: of `tp`. Where they are more than the heads of keys and values, these maps are whole on each, which
            computes one head of them.
    """
    table: dict[str, ShardingRule] = {
        "embed_tokens": "embedding",
        "embed_tokens.weight": 0,
        "embed_positions": "positions",
        "lm_head.weight": 0,
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
    """What the table says of a module or a parameter; None: nothing."""
    return next((cut for pattern, cut in table.items() if fnmatchcase(name, pattern)), None)
