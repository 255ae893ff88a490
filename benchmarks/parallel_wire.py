"""What a rank sends in a training step on each kind of mesh, beside the least that it could. Counted, not timed.

    .venv/bin/python benchmarks/parallel_wire.py [--quick] [--only tp,cp]

Sixteen ranks train a Llama of 1.1B parameters, or a mixture of experts, at 4,096 tokens in bfloat16: one of them is
this process, with tensors that have no values; the others are imagined (`tests/parallel/shapes.py`). A run's own loop
takes the step, and what it hands to the backend is counted, as what any algorithm has to send for it. The least is a
formula.
"""

import datetime
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
sys.path.insert(0, str(HERE.parent / "tests" / "parallel"))
from common import measured_apart, mesh_options, write_results  # noqa: E402

RANKS, SEQUENCE = 16, 4096
WEIGHT, GRADIENT, ACTIVATION, RESIDUAL = 2, 4, 2, 2  # bytes of a number, as a run in bfloat16 has them
LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "max_position_embeddings": SEQUENCE,
}
EXPERTS = LLAMA | {"moe": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}}
# What it is called, the mesh (dp_shard is the rest of the ranks), keys of `training`.
MESHES = [
    ("FSDP2", {}, {}),
    ("FSDP2, 4 micro-batches", {}, {"micro": 4}),
    ("FSDP2, 4 micro-batches", {"zero_stage": 1}, {"micro": 4}),
    ("FSDP2, 4 micro-batches", {"zero_stage": 2}, {"micro": 4}),
    ("copies", {"dp_replicate": 16}, {}),
    ("HSDP", {"dp_replicate": 4}, {}),
    ("tensor", {"tp": 8}, {}),
    ("tensor, computed again", {"tp": 8}, {"activation_checkpointing": "full"}),
    ("context, heads for tokens", {"cp": 8}, {}),
    ("context, keys and values gathered", {"cp": 8, "cp_method": "all_gather"}, {}),
    ("context, keys and values passed round", {"cp": 8, "cp_method": "ring"}, {}),
    ("pipeline", {"pp": 4}, {}),
    ("pipeline, gathered anew", {"pp": 4, "reshard_after_forward": True}, {}),
    ("pipeline, two stages a rank", {"pp": 4, "pp_schedule": "interleaved_1f1b"}, {}),
    ("experts", {"ep": 8}, {}),
    ("experts cut", {"ep": 8, "tp": 2}, {}),
    ("", {"dp_replicate": 2, "tp": 4}, {}),
    ("", {"cp": 2, "tp": 4}, {}),
    ("", {"pp": 2, "tp": 4}, {}),
    ("", {"pp": 2, "cp": 2, "tp": 2}, {}),
]
NOTES = """\
- Sent: what this rank cannot but send for the collectives that it calls, whatever the algorithm: of a gathering or a
  scattered sum over n ranks (n - 1)/n of the whole, of an all-reduce twice that, of an exchange all but its own part.
- The least: each parameter is gathered (2 bytes) once before forward and, where it was freed, once before backward;
  its gradient (4 bytes) is summed once a step, or with each micro-batch; copies add up a rank's share of it. Between
  a layer's parts tensor ranks gather all tokens and scatter sums; backward mirrors that, and gathers the tokens of
  attention and MLP again, of which a rank has saved its own only. Context ranks exchange each query, key, value and
  result once, or tell all others their keys and values, and have their gradients back. A stage keeps what it has
  gathered, and passes on the residual stream (2 bytes) and its gradient. A token goes once to each rank that has one
  of its experts, and one sum comes back, if all choices are equally likely; so do the gradients. Single numbers,
  norms' gradients and what fills up cuts are not in it.
- A row of 4,096 tokens a step for each data rank, two for each rank of a pipeline, one at a time; or as many as it
  says. Of a pipeline, the second rank."""


def least(shape: dict, mesh: dict, micro: int, checkpointing: str) -> dict[str, float]:
    """Bytes that a rank has to send in a step: for weights and gradients, and for tokens."""
    pp, copies, cp, tp, ep = (mesh.get(axis, 1) for axis in ("pp", "dp_replicate", "cp", "tp", "ep"))
    shards = RANKS // (pp * copies * tp)  # dp_shard x cp
    width, heads, kv = shape["hidden_size"], shape["num_attention_heads"], shape["num_key_value_heads"]
    head, layers = width // heads, shape["num_hidden_layers"] // pp
    moe = shape.get("moe")

    def weights(of_layer: float, of_rest: float, ranks: int) -> float:
        """Gathered and scattered over the ranks that share them out, and summed over the copies."""
        others = (ranks - 1) / ranks
        whole, anew = layers * of_layer + of_rest, (layers - 1) * of_layer
        keeps = mesh.get("zero_stage") in (1, 2) or mesh.get("reshard_after_forward") is False or pp > 1
        gathered = whole if keeps else micro * (whole + anew)
        sums = micro if mesh.get("zero_stage") == 2 else 1
        between = 2 * (copies - 1) / copies * whole / ranks
        return others * (WEIGHT * gathered + GRADIENT * whole * sums) + GRADIENT * between

    mlp = 3 * width * shape["intermediate_size"] / tp
    layer = 2 * width * head * (heads + kv) / tp + (moe["num_experts"] * width if moe else mlp) + 2 * width
    # Of two stages the second is the last, and has the head; of more it has neither that nor the embedding.
    ends = {1: 2, 2: 1}.get(pp, 0)
    rest = ends * shape["vocab_size"] * width / tp + width * (ends > 0)
    for_weights = weights(layer, rest, shards)
    if moe:
        for_weights += weights(3 * moe["num_experts"] * moe["moe_intermediate_size"] * width / ep / tp, 0, shards // ep)

    tokens, for_tokens = SEQUENCE / cp, 0.0
    message = tokens * width
    if tp > 1:
        parts = 2 * layers + ends / 2  # attention and MLP are gathered and scattered, the embedding or head either
        again = (3 if checkpointing == "full" else 1 if moe else 2) * layers
        for_tokens += (tp - 1) / tp * message * ACTIVATION * (4 * parts + again)
    if cp > 1:
        queries, keys = (SEQUENCE * each / tp * head * ACTIVATION for each in (heads, 2 * kv))
        if mesh.get("cp_method", "all_to_all") == "all_to_all":
            for_tokens += layers * 2 * (cp - 1) / cp * (2 * queries + keys) / cp
        else:
            for_tokens += layers * 2 * (cp - 1) / cp * keys
    if pp > 1:
        stages = 2 if mesh.get("pp_schedule") == "interleaved_1f1b" else 1
        for_tokens += (2 * stages if pp > 2 else 1) * message / tp * RESIDUAL
    if ep > 1:
        experts, chosen = moe["num_experts"], moe["num_experts_per_tok"]
        missed = math.comb(experts - experts // ep, chosen) / math.comb(experts, chosen)
        for_tokens += layers * 4 * message * ACTIVATION * (ep - 1) * (1 - missed)
    return {"weights": for_weights, "tokens": for_tokens * micro}


def job(asked: dict) -> None:
    """One mesh, in a process of its own: prints what was sent, by kind."""
    from shapes import imagine, write_run

    mesh, training = asked["mesh"], dict(asked["training"])
    shape = EXPERTS if "ep" in mesh else LLAMA
    shape = shape | {"num_hidden_layers": asked["layers"]}
    micro = training.pop("micro", 1)
    if "pp" in mesh:
        stages = mesh["pp"] * (2 if mesh.get("pp_schedule") == "interleaved_1f1b" else 1)
        mesh["stage_layers"] = [asked["layers"] // stages] * stages
    training = {"activation_checkpointing": "none", "steps": 2, "threads": 1} | training
    with tempfile.TemporaryDirectory() as folder:
        file = write_run(Path(folder), mesh, shape, ranks=RANKS, sequence=SEQUENCE, micro=micro, **training)
        found = imagine(file, RANKS, RANKS // mesh["pp"] if "pp" in mesh else 0)
    kinds: dict[str, list[int]] = {}
    for call in found.calls:
        number = kinds.setdefault(call.kind, [0, 0])
        number[0] += 1
        number[1] += call.sent
    micro = 2 * mesh["pp"] if "pp" in mesh else micro
    print(json.dumps({"kinds": kinds, "least": least(shape, mesh, micro, training["activation_checkpointing"])}))


def main() -> int:
    args = mesh_options("What a rank sends in a step, beside the least that it could.", "8 layers")
    if args.job is not None:
        job(args.job)
        return 0
    layers, rows = 8 if args.quick else LLAMA["num_hidden_layers"], []
    for name, mesh, training in MESHES:
        if args.only and not args.only & set(mesh):
            continue
        found = measured_apart(__file__, {"mesh": mesh, "training": training, "layers": layers})
        label = ", ".join(filter(None, (name, " ".join(f"{key} {value}" for key, value in mesh.items()))))
        if "failed" in found:
            print(f"{label}: FAILED: {found['failed']}", flush=True)
            return 1
        rows.append({"label": label, "mesh": mesh, "training": training} | found)
        print(line(rows[-1]), flush=True)
    lines = [
        "# What a rank sends in a step",
        "",
        f"{RANKS} ranks; {layers} layers, width {LLAMA['hidden_size']}, {SEQUENCE:,} tokens; {datetime.date.today()}; "
        f"{version()}. MiB a rank and step.",
        "",
        NOTES,
        "",
        "| | calls | sent | the least | of it for weights | x the least |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *map(line, rows),
    ]
    name = "parallel_wire-quick" if args.quick else "parallel_wire"
    write_results(args.out, name, "\n".join(lines) + "\n", rows)
    return 0


def line(row: dict) -> str:
    calls, sent = (sum(numbers[which] for numbers in row["kinds"].values()) for which in (0, 1))
    weights, tokens = row["least"]["weights"], row["least"]["tokens"]
    amounts = " | ".join(f"{size / 2**20:,.0f}" for size in (sent, weights + tokens, weights))
    return f"| {row['label']} | {calls:,} | {amounts} | {sent / (weights + tokens):.3f} |"


def version() -> str:
    code = "import torch; print('torch', torch.__version__)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
