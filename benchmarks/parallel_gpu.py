"""Training on one GPU: tokens/s, MFU and peak memory of Llamas, beside transformers' `Trainer` and torchtitan.

    python benchmarks/parallel_gpu.py [--sizes 1b,124m,2.7b,125m] [--rounds 2] [--minutes 25]
    .venv/bin/python benchmarks/parallel_gpu.py --device cpu --quick  # does it work at all?

Weft in bfloat16 and with products in 8 bits (`training.fp8`), both compiled, as are the peers; a peer that is not
installed is left out, and the table says so. Whoever does not get a step's sequences into memory at once takes them in
halves. They take turns, round after round; the goals are an MFU of 0.55 or more in bfloat16 from a billion parameters
on, and 465,000 tokens/s of 124M parameters on an H100. Writes a table (.md) and all numbers
(.json) into benchmarks/results after each measurement; sizes and subjects that are not asked for keep the figures that
are there, if those are from the same device and versions.
"""

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import (  # noqa: E402
    VOCABULARY,
    available_cores,
    flops_per_token,
    measured_apart,
    parameters_of,
    processor,
    slug,
    write_results,
    write_tokens,
)

_LLAMA = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5}


def _shape(width: int, layers: int, heads: int, inner: int) -> dict:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | _LLAMA | {"num_key_value_heads": heads, "intermediate_size": inner, "tie_word_embeddings": False}


# shape; tokens of a sequence; sequences a step; how many of them are tried at once (of 80 GB, state takes 16 bytes a
# parameter). The most valuable first: what has a goal.
PLAN = {
    "1b": (_shape(2048, 18, 16, 5632), 4096, 8, 8),
    # 84.9M parameters in the blocks, as GPT-2's smallest, with its vocabulary padded to a multiple of 64
    "124m": (_shape(768, 12, 12, 2048) | {"vocab_size": 50_304, "tie_word_embeddings": True}, 1024, 64, 64),
    "2.7b": (_shape(2560, 32, 20, 6912), 4096, 4, 2),
    "125m": (_shape(768, 12, 12, 2048), 4096, 16, 16),
}
QUICK = {"tiny": (_shape(64, 2, 4, 176) | {"vocab_size": 512, "tie_word_embeddings": True}, 128, 4, 2)}
SUBJECTS = {  # name in the table, program, the package it needs, what it is asked for
    "weft-bf16": ("Weft, bf16", "parallel_steps.py", "torch", {"peer": "weft", "dtype": "bf16"}),
    "weft-fp8": ("Weft, fp8", "parallel_steps.py", "torchao", {"peer": "weft", "dtype": "fp8"}),
    "weft-fp8-rowwise": (
        "Weft, fp8 with scales for rows",
        "parallel_steps.py",
        "torchao",
        {"peer": "weft", "dtype": "fp8-rowwise"},
    ),
    "trainer-bf16": ("transformers' Trainer, bf16", "hf_trainer.py", "transformers", {"dtype": "bf16"}),
    "titan-bf16": ("torchtitan, bf16", "titan_steps.py", "torchtitan", {"dtype": "bf16"}),
}
WARMUP, STEPS = 3, 8
GOAL, GOAL_124M = 0.55, 465_000
LLAMA_8B = _shape(4096, 32, 32, 14_336) | {"num_key_value_heads": 8, "vocab_size": 128_256}
TITAN = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1"
MODALITIES = "github.com/Modalities/modalities, README.md, MareNostrum 5"
REPORTED = [  # who, what, tokens/s on each GPU, GiB, MFU as reported (None: by our definition), source
    ("torchtitan", "Llama 3.1 8B, 8 H100, FSDP2, 8,192 tokens, bf16", 5762, 82.4, None, TITAN),
    ("torchtitan", "the same, compiled", 6667, 77.0, None, TITAN),
    ("torchtitan", "the same, compiled, fp8", 8532, 76.8, None, TITAN),
    (
        "Modalities",
        "2.7B, 4 H100 (64 GB), HYBRID_SHARD, 4,096 tokens, bf16",
        15.14 * 4096 / 4,
        None,
        0.2998,
        MODALITIES,
    ),
]
NOTES = f"""\
- MFU = tokens/s x (6 x matmul parameters + 12 x layers x width x sequence) / the device's bfloat16 peak, for fp8 too.
- **Weft**: the parts of its training loop (`build_sharded_model` on a mesh of one process, passes, clipping), blocks
  compiled and float32 state; nothing is computed again. fp8: `training.fp8`, the layers' matrices by torchao.
- **Trainer**: its defaults with `bf16=True` (autocast) and `torch_compile=True`, less reports, progress bar and saving.
- **torchtitan**: its Llama, parallelized by its own function on a mesh of one process (FSDP2's precision policy, each
  block compiled), its loss in 8 chunks, compiled; scaled dot-product attention.
- The same shape, random tokens, fused AdamW, clipping at 1, and number of sequences in a step; each measurement in a
  fresh process. A step lasts from the end of one to the end of the next. Memory is the peak of what was allocated.
- The goals are an MFU of {GOAL} or more in bf16 from a billion parameters on, and {GOAL_124M:,} tokens/s of 124M
  parameters with sequences of 1,024 tokens on an H100."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Training on one GPU, of Weft and its peers.")
    parser.add_argument("--sizes", default=",".join(PLAN), help=f"of {', '.join(PLAN)}")
    parser.add_argument("--only", default=",".join(SUBJECTS), help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--modes", default="compiled", help="of eager, compiled")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS, help="measured in each round")
    parser.add_argument("--minutes", type=float, default=25, help="start no measurement after this many minutes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, one round of two steps: does it work at all?"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    args.plan = QUICK if args.quick else PLAN
    if args.quick:
        args.sizes, args.rounds, args.steps = ",".join(QUICK), 1, 2
    for name, known in (("sizes", args.plan), ("only", SUBJECTS), ("modes", ("eager", "compiled"))):
        asked = getattr(args, name).split(",")
        if unknown := set(asked) - set(known):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
        setattr(args, name, asked)
    return args


class Measurements:
    """What was measured so far, on disk after each measurement: what ends a GPU's lease asks nobody.

    Args:
        peak: the device and the most that it can do.
    """

    def __init__(self, args: argparse.Namespace, peak: dict):
        self.args = args
        device = peak["device"] or processor()
        self.name = f"parallel_gpu-{slug(device)}" + ("-quick" if args.quick else "")
        self.found = {
            "device": device,
            "peak_flops_per_second": peak["flops_per_second"],
            "peak_origin": peak["origin"],
            "versions": {"python": sys.version.split()[0]} | {name: _version(name) for name in _PACKAGES},
            "quick": args.quick,
        }
        path = args.out / f"{self.name}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        same = all(before.get(key) == value for key, value in self.found.items())
        kept = before.get("sizes", {}) if same else {}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        new = {}
        for size in args.sizes:
            new[size] = {"date": now}
            for kind in ("cells", "failed"):  # those of other subjects stay
                old = kept.get(size, {}).get(kind, {})
                new[size][kind] = {key: value for key, value in old.items() if key.split()[1] not in args.only}
        self.found["sizes"] = {size: (kept | new)[size] for size in args.plan if size in kept | new}

    def take(self) -> None:
        """Round after round until the rounds or the minutes are used up."""
        began, args = time.monotonic(), self.args
        work = HERE / "work"
        work.mkdir(exist_ok=True)
        for number in range(args.rounds):
            for subject, size, mode in product(args.only, args.sizes, args.modes):
                key, of_size = f"{mode} {subject}", self.found["sizes"][size]
                if key in of_size["failed"]:
                    continue
                if time.monotonic() - began > 60 * args.minutes:
                    print(f"{args.minutes:g} minutes are over: stopping in round {number + 1} of {args.rounds}")
                    return
                try:
                    got = self.one(size, mode, subject, work)
                except KeyboardInterrupt:
                    print("interrupted: the table has what there is")
                    return
                if "failed" in got:
                    of_size["failed"][key] = got["failed"][:200]
                    print(f"round {number + 1}: {size} {key}: FAILED: {got['failed'][:200]}", flush=True)
                else:
                    of_size["cells"].setdefault(key, []).append(got)
                    speed = args.plan[size][1] * args.plan[size][2] / statistics.median(got["seconds"])
                    print(f"round {number + 1}: {size} {key}: {speed:,.0f} tokens/s", flush=True)
                write_results(args.out, self.name, self.table(), self.found, show=False)

    def one(self, size: str, mode: str, subject: str, work: Path) -> dict:
        """One measurement, with as many sequences at once as there is memory for."""
        args = self.args
        shape, sequence, rows, micro = args.plan[size]
        _, program, package, own = SUBJECTS[subject]
        if importlib.util.find_spec(package) is None:
            return {"failed": f"{package} is not installed"}
        data = write_tokens(work / f"{size}-{sequence}.npy", 64, sequence, shape["vocab_size"])
        before = self.found["sizes"][size]["cells"].get(f"{mode} {subject}")
        micro = before[0]["micro"] if before else micro
        while True:
            job = own | {"shape": shape, "batch": rows, "micro": micro, "sequence": sequence, "data": str(data)}
            job |= {"warmup": WARMUP, "steps": args.steps, "compile": mode == "compiled", "device": args.device}
            got = measured_apart(str(HERE / "peers" / program), job | {"threads": available_cores()})
            if got.get("failed") != "out of memory" or micro == 1:
                return got | {"micro": micro}
            micro //= 2

    def table(self) -> str:
        """The result as a page of Markdown."""
        found = self.found
        versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
        dates = " to ".join(sorted({one["date"][:10] for one in found["sizes"].values()}))
        peak = found["peak_flops_per_second"]
        lines = [
            "# Training on one device",
            "",
            f"{found['device']}; bfloat16 peak: {peak / 1e12:,.1f} TFLOP/s ({found['peak_origin']}); {versions}; "
            f"{dates}.",
            "",
            f"The median step of {self.args.rounds} rounds or what there was of them, taking turns.",
            "",
            NOTES,
        ]
        if found["quick"]:
            lines += ["", "**A quick look at a tiny model, not a measurement.**"]
        lines += [
            "",
            "| parameters | | tokens/s | MFU | x Trainer | peak memory (GiB) | sequences a step (at once) of tokens |",
            "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        missing = []
        for size, one in found["sizes"].items():
            shape, sequence, rows, _ = self.args.plan[size]
            speeds = {
                key: rows * sequence / statistics.median(s for run in runs for s in run["seconds"])
                for key, runs in one["cells"].items()
            }
            for key, runs in one["cells"].items():
                mode, subject = key.split()
                memory = statistics.median(run["peak_bytes"] for run in runs)
                trainer = speeds.get(f"{mode} trainer-bf16")
                lines.append(
                    f"| {parameters_of(shape) / 1e6:,.0f}M | {SUBJECTS[subject][0]}, {mode} | {speeds[key]:,.0f} "
                    f"| {speeds[key] * flops_per_token(shape, sequence) / peak:.3f} "
                    f"| {f'{speeds[key] / trainer:.2f}' if trainer else '-'} | {memory / 2**30:,.1f} "
                    f"| {rows} ({runs[0]['micro']}) of {sequence:,} |"
                )
            missing += [f"- {size}, {key}: {why}" for key, why in one["failed"].items()]
        lines += ["", *reported()]
        if missing:
            lines += ["", "Not measured:", "", *missing]
        return "\n".join(lines) + "\n"


def reported() -> list[str]:
    """What others report of themselves: not this machine."""
    lines = ["Reported by others, on their machines:", ""]
    lines += ["| | | tokens/s a GPU | MFU | memory (GiB) | source |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for who, what, speed, memory, stated, source in REPORTED:
        share = stated or speed * flops_per_token(LLAMA_8B, 8192) / 989.4e12
        word = "as stated" if stated else "by the definition above, 989.4 TFLOP/s"
        lines.append(f"| {who} | {what} | {speed:,.0f} | {share:.3f} ({word}) | {memory or '-'} | {source} |")
    return lines


_PACKAGES = ("torch", "transformers", "accelerate", "torchao", "torchtitan")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def main() -> int:
    args = arguments()
    own = [str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(HF_HUB_OFFLINE="1", PYTHONPATH=os.pathsep.join(own))
    asked = {"peer": "peak", "device": args.device, "threads": available_cores()}
    peak = measured_apart(str(HERE / "peers" / "parallel_steps.py"), asked)
    if "failed" in peak:
        print(f"parallel_gpu: nothing can be measured here: {peak['failed']}")
        return 1
    measurements = Measurements(args, peak)
    measurements.take()
    if not any(one["cells"] for one in measurements.found["sizes"].values()):
        print(measurements.table())
        return 1
    write_results(args.out, measurements.name, measurements.table(), measurements.found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
