"""Time and memory of Hugging Face files in and out: `weft import`, `weft export`, `weft.load_model`, and transformers'.

    .venv/bin/python benchmarks/huggingface_files.py [--parameters 1e9] [--rounds 3] [--quick]
    .venv/bin/python benchmarks/huggingface_files.py --parameters 8e9 --only import,export --rounds 1

A Llama of the preset that is nearest in size, and an OLMoE of half a billion parameters in many small tensors, are
written as sharded bfloat16 safetensors of random numbers. Each measurement is a process of its own; they take turns,
round after round. What would not fit into the machine's memory or on its disk is not tried. Writes a table (.md) and
all numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import available_cores, measured_apart, processor, slug, write_results  # noqa: E402

JOB = str(HERE / "peers" / "file_jobs.py")
SHARD_BYTES = 2_000_000_000
# OLMoE's parts at half a billion: 1,536 tensors of experts.
MIXTURE = {
    "family": "olmoe",
    "vocab_size": 50304,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "qk_norm": True,
    "qk_norm_over": "width",
    "moe": {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
}
WAYS = {  # name in the table; whether the whole model is in memory
    "import": ("weft import", False),
    "export": ("weft export", False),
    "load_model": ("weft.load_model, of the Hugging Face folder", True),
    "load_imported": ("weft.load_model, of what `weft import` made", True),
    "from_pretrained": ("transformers from_pretrained", True),
    "save_pretrained": ("transformers from_pretrained, then save_pretrained", True),
}
NOTES = """\
- Files to be read have been read once just before, as far as memory holds them; what was written before is on the disk
  by then. Time is of the call in a process that has its libraries imported already.
- `weft import` and `weft export` read every tensor, write it, hash what they write and wait for the disk (fsync);
  `save_pretrained` does the first two, and how long the disk then takes is in brackets, not in its time.
- Of loaded models one number of each page is read, so that all is in memory; what transformers only maps stays a file's
  page until it is written to, as training does.
- Memory is what the process had more at its peak than before the call: all that is resident, with pages of files that
  are only mapped and that the kernel takes back when it needs them; and, looked at every 10 ms, without those.
- Both sides have the same number of threads; all else is as by default."""


def llama(parameters: float) -> tuple[str, dict]:
    """The Llama preset that is nearest in size, with its head untied."""
    from weft.config.model import ModelSection
    from weft.families import presets

    known = {name: keys for name, keys in presets().items() if keys["family"] == "llama" and "vocab_size" in keys}
    sizes = {name: ModelSection(**keys).size().parameters for name, keys in known.items()}
    name = min(sizes, key=lambda one: abs(sizes[one] - parameters))
    return name, known[name]


def ready(folder: Path) -> None:
    """What was written is on the disk, and what will be read has been read."""
    os.sync()
    block = bytearray(16 << 20)
    for path in sorted(folder.rglob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


def memory() -> dict[str, int]:
    """Bytes of memory that the machine has, and has left."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return {name: 1024 * int(lines[key].split()[0]) for name, key in (("all", "MemTotal"), ("left", "MemAvailable"))}


def refuse(size: int, ways: list[str], work: Path) -> dict[str, str]:
    """Ways -> why they are not tried with a model of this size in bytes."""
    why, left = {}, memory()["left"]
    for way in ways:
        if WAYS[way][1] and 1.3 * size > left:
            why[way] = f"the model has {size / 1e9:.1f} GB, and {left / 1e9:.1f} GB of memory are left"
    free = shutil.disk_usage(work).free
    if free < 3.1 * size:  # the source, what was imported, and what is written
        why = dict.fromkeys(ways, f"{3.1 * size / 1e9:.0f} GB are needed on the disk, and {free / 1e9:.0f} are free")
    return why


def measure(model: str, section: dict, size: int, args: argparse.Namespace, work: Path) -> dict:
    """All ways with one model, round after round."""
    source, imported, out = work / "source", work / "imported", work / "out"
    found = {"model": model, "rounds": 0, "cells": {}, "failed": refuse(size, args.only, work)}
    if set(found["failed"]) == set(args.only):
        return found
    try:
        base = {"threads": args.threads, "shard_bytes": SHARD_BYTES}
        base |= {"source": str(source), "imported": str(imported)}
        made = measured_apart(JOB, base | {"way": "make", "section": section, "folder": str(source)})
        if "failed" in made:
            sys.exit(f"{model}: {made['failed']}")
        found |= made
        if {"export", "load_imported"} & set(args.only):
            measured_apart(JOB, base | {"way": "import", "out": str(imported)})
        for number in range(args.rounds):
            for way in [way for way in args.only if way not in found["failed"]]:
                ready(imported if way in ("export", "load_imported") else source)
                got = measured_apart(JOB, base | {"way": way, "out": str(out)})
                shutil.rmtree(out, ignore_errors=True)
                if "failed" in got:
                    found["failed"][way] = got["failed"]
                else:
                    found["cells"].setdefault(way, []).append(got)
                told = got.get("failed") or f"{got['seconds']:.2f} s, {got['peak_bytes'] / 1e9:.2f} GB"
                print(f"round {number + 1}: {model}: {way}: {told}", flush=True)
            found["rounds"] += 1
    except KeyboardInterrupt:
        print("interrupted: the table has what there is", flush=True)
    finally:
        shutil.rmtree(work)
    return found


def number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def table(found: dict) -> str:
    """The result as a page of Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "# Hugging Face files in and out",
        "",
        f"{found['device']}, {found['threads']} threads, {found['memory_bytes'] / 2**30:.0f} GiB of memory; "
        f"{versions}; {found['date'][:10]}. Medians of the rounds.",
        "",
        NOTES,
    ]
    if found["quick"]:
        lines += ["", "**A quick look, not a measurement.**"]
    for model in found["models"]:
        if not model["cells"]:
            lines += ["", f"## {model['model']}", "", *(f"- {WAYS[w][0]}: {why}" for w, why in model["failed"].items())]
            continue
        lines += [
            "",
            f"## {model['model']}: {model['parameters'] / 1e9:.2f}B parameters",
            "",
            f"{model['bytes'] / 1e9:.2f} GB in {model['tensors']:,} tensors and {number(model['files'], 'file')}; "
            f"{number(model['rounds'], 'round')}.",
            "",
            "| | seconds | GB/s | memory above the start (GB) | without files' pages (GB) |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for way, runs in model["cells"].items():
            median = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            disk = f" (+ {median['fsync_seconds']:.2f})" if "fsync_seconds" in median else ""
            lines.append(
                f"| {WAYS[way][0]} | {median['seconds']:.2f}{disk} | {model['bytes'] / 1e9 / median['seconds']:.2f} "
                f"| {median['peak_bytes'] / 1e9:.2f} | {median['anonymous_peak_bytes'] / 1e9:.2f} |"
            )
        if model["failed"]:
            lines += ["", "Not measured:", "", *(f"- {WAYS[way][0]}: {why}" for way, why in model["failed"].items())]
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time and memory of Hugging Face files in and out.")
    parser.add_argument("--parameters", type=float, default=1e9, help="of the Llama; its nearest preset is taken")
    parser.add_argument("--only", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--quick", action="store_true", help="a small Llama alone, once: does it work at all?")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if args.quick:
        args.parameters, args.rounds = 1e8, 1
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(WAYS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(WAYS)}")
    return args


def main() -> int:
    args = arguments()
    import torch
    import transformers

    import weft
    from weft.config.model import ModelSection

    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(args.threads)}
    (HERE / "work").mkdir(exist_ok=True)
    name, section = llama(args.parameters)
    models = {name: section}
    if args.parameters < 2e9:
        models["OLMoE's parts"] = MIXTURE
    found = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": processor(),
        "threads": args.threads,
        "memory_bytes": memory()["all"],
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "weft": weft.__version__}
        | {"transformers": transformers.__version__},
        "quick": args.quick,
        "models": [],
    }
    for model, keys in models.items():
        size = 2 * ModelSection(**keys).size().parameters
        folder = Path(tempfile.mkdtemp(prefix="files-", dir=HERE / "work"))
        found["models"].append(measure(model, keys, size, args, folder))
    name = f"huggingface_files-{slug(found['device'])}-{name}" + ("-quick" if args.quick else "")
    write_results(args.out, name, table(found), found)
    return 0 if any(model["cells"] for model in found["models"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
