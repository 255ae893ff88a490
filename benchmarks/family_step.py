"""The time and memory of a training step of each family, in Weft and in transformers, with the same weights.

    .venv/bin/python benchmarks/family_step.py [--families llama,mixtral] [--rounds 2] [--minutes 20] [--quick]

A step is forward with the loss, backward and the update by AdamW (fused), on one batch of random tokens. transformers
makes each model from the config that Weft writes for it, and saves its random weights; both sides read that folder, so
the first losses are to agree, and the table says how well they do. Each measurement is a process of its own; they take
turns, round after round. Writes a table (.md) and all numbers (.json) into benchmarks/results; families that are not
asked for keep the figures that are there already, if those are from the same device and versions.
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
import time
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
import families  # noqa: E402
from common import (  # noqa: E402
    available_cores,
    measured_apart,
    processor,
    slug,
    write_results,
)

SEQUENCE = {"cpu": 512, "cuda": 2048}
BATCH = 4
JOB = str(HERE / "peers" / "family_steps.py")
PEERS = {
    "weft": "Weft",
    "transformers": "transformers",
    "hf": "transformers' model in Weft's policy (`type: hf`)",
}
NOTES = """\
- **Weft**: the model as a run has it: `build_sharded_model` on a mesh of one process (with bf16 its policy: float32
  state, bfloat16 weights and activations for computing, float32 gradients and losses); compiled: `training.compile`.
- **transformers**: `AutoModelForCausalLM` with float32 weights, with bf16 under autocast as
  `Trainer(bf16=True)` has it, `labels` given; with its own choice of attention (sdpa where it has it) and of experts;
  compiled: `torch.compile` of the whole model. Autocast leaves its grouped products of experts in float32.
- **transformers' model in Weft's policy**: the same class as `type: hf` has it, under FSDP2's policy in place of
  autocast, so that its experts compute in bfloat16 too; compiled: its layers.
- The same AdamW over all parameters, no clipping, no loss that balances experts; both processes have the threads' and
  the allocator's settings of `weft train`, so that what differs is the model. Memory on a CPU is the peak of the
  process, with its libraries, loading and compiling; on a GPU, of what was allocated."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step of each family in Weft and in transformers.")
    parser.add_argument("--families", help="default: all; on a GPU, those that have a size for it")
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)}; default: the last one for mixtures of experts alone")
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3, help="of measured steps in one measurement")
    parser.add_argument("--minutes", type=float, default=25, help="start no measurement after this many minutes")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="two families, once: does it work at all?")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 0
        args.families = args.families or "llama,gpt_oss"
    sizes = families.GPU if args.device == "cuda" else families.CPU
    args.families = args.families or ",".join(sizes)
    known = {"families": sizes, "peers": PEERS, "modes": ("eager", "compiled")}
    for name, values in known.items():
        asked = getattr(args, name).split(",") if getattr(args, name) else []
        if unknown := set(asked) - set(values):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(values)}")
        setattr(args, name, asked)
    return args


def measure(args: argparse.Namespace, work: Path) -> tuple[dict, dict, int]:
    """Round after round until the rounds or the minutes are used up: what was measured, what failed, whole rounds."""
    began, cells, failed = time.monotonic(), {}, {}
    base = {"threads": args.threads, "device": args.device, "dtype": args.dtype, "seconds": args.seconds}
    base |= {"sequence": SEQUENCE[args.device], "batch": BATCH}
    for number in range(args.rounds):
        for family in args.families:
            folder = work / family
            if not folder.exists():
                made = measured_apart(JOB, base | {"peer": "make", "family": family, "folder": str(folder)})
                if "failed" in made:
                    sys.exit(f"{family}: {made['failed']}")
            usual = [p for p in PEERS if p != "hf" or families.section(family, args.device).moe is not None]
            for mode, peer in product(args.modes, args.peers or usual):
                key = f"{family} {mode} {peer}"
                if key in failed:
                    continue
                if time.monotonic() - began > 60 * args.minutes:
                    print(f"{args.minutes:g} minutes are over: stopping in round {number + 1} of {args.rounds}")
                    return cells, failed, number
                try:
                    got = measured_apart(JOB, base | {"peer": peer, "mode": mode, "folder": str(folder)})
                except KeyboardInterrupt:
                    print("interrupted: the table has what there is")
                    return cells, failed, number
                if "failed" in got:
                    failed[key] = got["failed"][:200]
                    print(f"round {number + 1}: {key}: FAILED: {failed[key]}", flush=True)
                    continue
                cells.setdefault(key, []).append(got)
                print(f"round {number + 1}: {key}: {1e3 * statistics.median(got['seconds']):,.0f} ms", flush=True)
                save(args, (cells, failed, number), show=False)
    return cells, failed, args.rounds


def result(args: argparse.Namespace, measured: tuple[dict, dict, int], path: Path) -> dict:
    """All that was measured and on what, with the families that `path` has from before."""
    import torch
    import transformers

    import weft

    cells, failed, rounds = measured
    found = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else processor(),
        "threads": args.threads,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "weft": weft.__version__}
        | {"transformers": transformers.__version__},
        "dtype": args.dtype,
        "sequence": SEQUENCE[args.device],
        "sequences_a_step": BATCH,
        "quick": args.quick,
    }
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = before.get("families", {}) if all(before.get(key) == value for key, value in found.items()) else {}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    new = {
        family: {"date": now, "whole_rounds": rounds}
        | {
            kind: {key.partition(" ")[2]: value for key, value in what.items() if key.partition(" ")[0] == family}
            for kind, what in (("cells", cells), ("failed", failed))
        }
        for family in args.families
        if any(key.partition(" ")[0] == family for key in [*cells, *failed])
    }
    together = kept | new
    return found | {"families": {family: together[family] for family in families.CPU if family in together}}


def table(found: dict) -> str:
    """The result as a page of Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    dates = sorted({one["date"][:10] for one in found["families"].values()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    rounds = sorted({one["whole_rounds"] for one in found["families"].values()})
    lines = [
        "# A training step of each family",
        "",
        f"{found['device']}, {found['threads']} threads; {versions}; {when}.",
        "",
        f"{BATCH} sequences of {found['sequence']} tokens, {found['dtype']}; median step over "
        f"{' or '.join(map(str, rounds))} whole rounds and what there was of the next, taking turns, each in a fresh "
        "process. Above 1, `x Weft's` of the same mode says that Weft is faster, or needs less.",
        "",
        NOTES,
    ]
    if found["quick"]:
        lines += ["", "**A quick look, not a measurement**: one round of three steps."]
    lines += [
        "",
        "| family | parameters | mode | | step (ms) | x Weft's | peak memory (MiB) | x Weft's | first loss |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    missing = []
    for family, one in found["families"].items():
        missing += [f"- {families.LABELS[family]}, {key}: {why}" for key, why in one["failed"].items()]
        steps = {
            key: statistics.median(s for run in runs for s in run["seconds"]) for key, runs in one["cells"].items()
        }
        peaks = {key: statistics.median(run["peak_bytes"] for run in runs) for key, runs in one["cells"].items()}
        for key, runs in one["cells"].items():
            mode, peer = key.split()
            how = runs[0]["implementation"]
            own = f"{mode} weft"
            lines.append(
                f"| {families.LABELS[family]} | {runs[0]['parameters'] / 1e6:,.1f}M | {mode} "
                f"| {PEERS[peer]}{f' ({how})' if how else ''} "
                f"| {1e3 * steps[key]:,.1f} | {f'{steps[key] / steps[own]:.2f}' if own in steps else '-'} "
                f"| {peaks[key] / 2**20:,.0f} | {f'{peaks[key] / peaks[own]:.2f}' if own in peaks else '-'} "
                f"| {runs[0]['first_loss']:.4f} |"
            )
    if missing:
        lines += ["", "Not measured:", "", *missing]
    return "\n".join(lines) + "\n"


def save(args: argparse.Namespace, measured: tuple[dict, dict, int], show: bool = True) -> bool:
    """Writes what was measured so far. Returns whether there is anything."""
    if args.device == "cuda":
        import torch

        device = torch.cuda.get_device_name()
    else:
        device = processor()
    name = f"family_step-{slug(device)}-{args.dtype}" + ("-quick" if args.quick else "")
    found = result(args, measured, args.out / f"{name}.json")
    if found["families"]:
        write_results(args.out, name, table(found), found, show)
    return bool(found["families"])


def main() -> int:
    args = arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = HERE / "work" / f"families-{os.getpid()}"
    try:
        measured = measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if save(args, measured) else 1


if __name__ == "__main__":
    raise SystemExit(main())
