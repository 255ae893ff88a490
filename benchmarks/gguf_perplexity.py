"""Perplexity of GGUF files of each type, computed by llama.cpp, and how much worse than of float32 weights it is.

    .venv/bin/python benchmarks/gguf_perplexity.py --llama-python .venv-llama/bin/python [--steps 600] [--quick]

A Llama of the size of the model of `weft quickstart` is trained on Python's standard library. `weft export` writes it
in each type. llama.cpp computes the logits of windows of held-out files with keys and values in float32; the second
half of each window counts. Needs an environment with llama-cpp-python (`make export-check` builds it). Writes a
table (.md) and all numbers (.json) into benchmarks/results.
"""

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import available_cores, processor, slug, write_results  # noqa: E402

ANSWERS = HERE.parent / "tests" / "export" / "llama_answers.py"
TYPES = ("f32", "bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_k_m", "q4_1", "q4_0")
WINDOW = 256
LIMITS = {"q8_0": 0.005, "q4_0": 0.08}
MODEL = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768,
    "max_position_embeddings": 1024,
}  # fmt: skip


def weft(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "weft", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def train(folder: Path, steps: int) -> None:
    """Trains the model in `folder`/runs/model, with the files of the standard library in `folder`/train and heldout."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts and 1000 < path.stat().st_size < 100_000:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    for name, part in (("heldout", texts[::20]), ("train", [text for n, text in enumerate(texts) if n % 20])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in part))
    weft("data", "train-tokenizer", folder / "train.jsonl", "--vocab-size", "4096", "--out", folder / "tokenizer")
    weft("data", "pack", folder / "train.jsonl", "--tokenizer", folder / "tokenizer", "--out", folder / "train")
    config = {
        "run": {"name": "model", "directory": str(folder / "runs"), "seed": 1}, "model": MODEL,
        "tokenizer": str(folder / "tokenizer"), "data": {"train": str(folder / "train"), "sequence_length": 256},
        "optimizer": {"type": "adamw", "lr": 2e-3}, "schedule": {"type": "cosine", "warmup_steps": 30},
        "training": {"steps": steps, "batch_tokens": 4096, "micro_batch_size": 8, "dtype": "float32"},
        "checkpoint": {"every": steps},
    }  # fmt: skip
    (folder / "run.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))
    weft("train", folder / "run.yaml")


def export(folder: Path, kind: str, python: str) -> Path:
    """Exports the model. K-quants are made in the environment of llama-cpp-python, with Weft's packages behind."""
    out = folder / f"{kind}.gguf"
    path = os.pathsep.join([str(HERE.parent / "src"), sysconfig.get_path("purelib")])
    command = [python if "_k" in kind else sys.executable, "-m", "weft", "export", str(folder / "runs" / "model")]
    command += [str(out), "--to", "gguf", "--type", kind]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    return out


def perplexity(file: Path, windows: list[list[int]], python: str) -> float:
    asked = {"model": str(file), "texts": [], "prompts": windows, "tokens": 0, "context": WINDOW, "nll": True}
    done = subprocess.run([python, str(ANSWERS)], input=json.dumps(asked), capture_output=True, text=True, check=True)
    return math.exp(sum(json.loads(done.stdout)["answers"]) / (len(windows) * (WINDOW - WINDOW // 2)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--llama-python", default=str(HERE.parent / ".venv-llama" / "bin" / "python"))
    parser.add_argument("--steps", type=int, default=600, help="training steps of 4,096 tokens")
    parser.add_argument("--windows", type=int, default=80)
    parser.add_argument("--quick", action="store_true", help="a few steps and windows, to see that everything runs")
    parser.add_argument("--work", type=Path, help="keep the model here, and use the one that is there")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    steps, number = (20, 4) if options.quick else (options.steps, options.windows)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.work or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "runs" / "model").exists():
            train(folder, steps)
        from weft.data.tokenizers.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folder / "tokenizer")
        lines = (folder / "heldout.jsonl").read_text().splitlines()
        windows = []
        for ids in (tokenizer.encode(json.loads(line)["text"]) for line in lines):
            windows += [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW, 4 * WINDOW)]
        windows = windows[:: max(1, len(windows) // number)][:number]
        found = []
        for kind in TYPES:
            file = export(folder, kind, options.llama_python)
            found.append({"type": kind, "bytes": file.stat().st_size})
            found[-1]["perplexity"] = perplexity(file, windows, options.llama_python)
            print(found[-1], flush=True)
    exact = found[0]["perplexity"]
    lines = ["| type | MB | perplexity | worse than f32 | limit |", "| --- | ---: | ---: | ---: | ---: |"]
    for one in found:
        one["worse"] = one["perplexity"] / exact - 1
        limit = f"{LIMITS[one['type']]:.1%}" if one["type"] in LIMITS else ""
        lines.append(
            f"| {one['type']} | {one['bytes'] / 1e6:.2f} | {one['perplexity']:.4f} | {one['worse']:+.2%} | {limit} |"
        )
    missed = [one["type"] for one in found if one["worse"] > LIMITS.get(one["type"], 1)]
    today = datetime.date.today().isoformat()
    page = (
        f"# Perplexity of GGUF files\n\n{processor()}, {available_cores()} cores, {today}. A Llama of 4 layers and "
        f"hidden size 256, {steps:,} steps of 4,096 tokens of Python's standard library; {len(windows)} windows of "
        f"{WINDOW} held-out tokens, the second half of which counts; computed by llama.cpp.\n\n"
        + "\n".join(lines)
        + f"\n\n{'Missed limits: ' + ', '.join(missed) if missed else 'All limits are kept.'}\n"
    )
    name = f"gguf_perplexity-{slug(processor())}"
    write_results(options.out, name, page, {"steps": steps, "windows": len(windows), "types": found})
    sys.exit(bool(missed) and not options.quick)


if __name__ == "__main__":
    main()
