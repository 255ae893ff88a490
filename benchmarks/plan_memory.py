"""Memory by formulas (`memory_of`) beside two steps of the real code on tensors without memory (`simulate_rank`).

    python benchmarks/plan_memory.py [--count N] [--seed S] [--kinds A,B] [--simulated RUNS.jsonl] [--out TABLE.md]

Draws random decoders and meshes of 8 ranks: dense or with experts, MLA, sliding windows, soft caps, sinks, clipped
experts, tied embeddings; fsdp, tp, pp, cp and ep; recomputation, dtypes, optimizers, and small or large vocabularies.
Draws that are not a legal run are drawn again. Of a pipeline, rank 0 and the first rank of the stages that need most
are simulated. The goal is an error of at most 5%. The kernels are those of a CPU; benchmarks/plan_memory_real.py
measures real peaks.

With --simulated, simulated runs are appended to a file as they are made. Another call with this file and seed goes on
where it ends, and compares the runs in it with the formulas as they are then.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import yaml

from weft.config.run import RunConfig
from weft.errors import UserError
from weft.planner.memory import memory_of
from weft.planner.simulate import simulate

RANKS, GOAL = 8, 0.05
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 704}
KINDS = {  # what a kind adds to a dense decoder
    "dense": {},
    "experts": {"moe": EXPERTS},
    "mla": {"mla": {"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}},
    "sliding": {},
    "capped": {"attn_logit_softcapping": 50.0, "logit_softcap": 30.0, "norm": "rmsnorm1p"},
    "sinks": {"attention_sinks": True, "attention_bias": True},
    "clipped": {"moe": EXPERTS | {"router_bias": True, "expert_bias": True, "swiglu_limit": 7.0}},
}
WINDOWED = ("sliding", "capped", "sinks")  # a window of a quarter of the sequence
MESHES = (
    {}, {"dp_replicate": 2}, {"tp": 2}, {"tp": 4}, {"pp": 2}, {"pp": 2, "pp_schedule": "gpipe"}, {"pp": 4}, {"cp": 2},
    {"cp": 2, "cp_method": "ring"}, {"pp": 2, "tp": 2}, {"ep": 2}, {"ep": 4},
)  # fmt: skip


def drawn(draw: random.Random, kinds: list[str]) -> dict:
    """Returns a description of a run, which need not be legal."""
    kind, mesh, micro = draw.choice(kinds), dict(draw.choice(MESHES)), draw.choice((1, 2))
    heads, length = draw.choice((8, 16)), draw.choice((512, 1024, 2048))
    model = {
        "hidden_size": 64 * heads,
        "num_hidden_layers": draw.choice((2, 4, 6)),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((heads, heads // 2, 4)),
        "intermediate_size": draw.choice((1408, 2816)),
        "vocab_size": draw.choice((4096, 32_000, 128_256)),
        "tie_word_embeddings": draw.random() < 0.3,
        "max_position_embeddings": length,
    }
    model |= KINDS[kind]
    if kind == "mla":
        del model["num_key_value_heads"]
    if kind in WINDOWED:
        model["sliding_window"] = length // 4
    return {
        "model": model,
        "data": {"sequence_length": length},
        "optimizer": draw.choice(({"type": "adamw", "lr": 1e-4}, {"type": "muon", "lr": 1e-2})),
        "training": {
            "steps": 2,
            "batch_tokens": RANKS * micro * draw.choice((1, 2)) * length,
            "micro_batch_size": micro,
            "dtype": draw.choice(("bfloat16", "bfloat16", "float32")),
            "activation_checkpointing": draw.choice(("none", "selective", "full")),
        },
        "parallel": mesh,
    }


def config_of(content: dict, folder: Path) -> RunConfig:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return RunConfig.load(file, check_data=False, ranks=RANKS)


def described(content: dict) -> str:
    model, training = content["model"], content["training"]
    otherwise = "sliding" if "sliding_window" in model else "dense"
    kind = next((kind for kind, keys in KINDS.items() if keys and keys.items() <= model.items()), otherwise)
    mesh = " ".join(f"{key} {value}" for key, value in content["parallel"].items()) or "fsdp"
    tied = ", tied" if model["tie_word_embeddings"] else ""
    return (
        f"{kind} {model['num_hidden_layers']} x {model['hidden_size']}, {model['vocab_size']:,}{tied} | {mesh} | "
        f"{training['micro_batch_size']} x {content['data']['sequence_length']} | {training['dtype']}, "
        f"{training['activation_checkpointing']}, {content['optimizer']['type']}"
    )


def simulated(content: dict, folder: Path) -> dict | None:
    """Returns the simulated bytes by part of one or two ranks by their number, or why there are none; None for an
    illegal draw."""
    try:
        config = config_of(content, folder)
    except UserError:
        return None
    try:
        return {"ranks": {str(one.rank): one.memory.parts() for one in simulate(config, RANKS)}}
    except UserError as error:
        return {"failed": str(error)}


def runs(
    count: int, seed: int, kinds: list[str], file: Path | None, folder: Path
) -> Iterator[tuple[dict, dict | None]]:
    """Yields draws and what `simulated` returned for them, until `count` runs have been simulated."""
    draw = random.Random(seed)
    known = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    while count:
        content = drawn(draw, kinds)
        if known:
            row = known.pop(0)
            if row["content"] != content:
                raise SystemExit(f"{file}: of another --seed, other --kinds or other draws; choose another file")
            found = row["found"]
        else:
            found = simulated(content, folder)
            if file:
                with file.open("a") as lines:
                    lines.write(json.dumps({"content": content, "found": found}) + "\n")
        count -= bool(found and "ranks" in found)
        yield content, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="number of runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of models, such as dense,mla")
    parser.add_argument("--simulated", type=Path, help="file of simulated runs, which is continued")
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    arguments = parser.parse_args()
    if unknown := set(kinds := arguments.kinds.split(",")) - set(KINDS):
        raise SystemExit(f"--kinds: unknown {', '.join(sorted(unknown))}; use {', '.join(KINDS)}")
    rows, errors, failed, refused, made = [], [], [], 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for content, found in runs(arguments.count, arguments.seed, kinds, arguments.simulated, folder):
            if found is None:
                refused += 1
                continue
            if "failed" in found:
                failed.append(f"- not simulated: {described(content)}: {found['failed']}")
                print(failed[-1], flush=True)
                continue
            made += 1
            planned = memory_of(config_of(content, folder), RANKS, cpu=True)
            for rank, parts in found["ranks"].items():
                measured, formula = sum(parts.values()), planned[int(rank) * len(planned) // RANKS].total
                errors.append(abs(formula / measured - 1))
                bytes_of = f"{measured / 2**20:,.0f} | {formula / 2**20:,.0f} | {formula / measured - 1:+.1%}"
                rows.append(f"| {described(content)} | {rank} | {bytes_of} |")
                print(rows[-1], flush=True)
    good = sum(error <= GOAL for error in errors)
    summary = (
        f"{made} random runs of {RANKS} ranks (seed {arguments.seed}; {refused} illegal draws, {len(failed)} not "
        f"simulated), {len(errors)} ranks: {good} within {GOAL:.0%}; mean error {fmean(errors):.1%}, median "
        f"{median(errors):.1%}, largest {max(errors):.1%}."
    )
    print(summary)
    if arguments.out:
        head = (
            "| model | mesh | micro-batch | training | rank | simulated, MiB | formula, MiB | error |\n"
            + "| --- " * 8
            + "|"
        )
        arguments.out.write_text("\n".join((summary, "", head, *rows, "", *failed, "")))


if __name__ == "__main__":
    main()
