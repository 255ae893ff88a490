"""What other tools predict of a run's memory, beside `weft plan` and two simulated steps, and how long they take.

    python benchmarks/plan_peers.py [--deepspeed PYTHON] [--accelerate PYTHON] [--torchtitan PYTHON] [--calculon PYTHON]

Each peer runs in an interpreter of its own: `python -m venv deepspeed; deepspeed/bin/pip install torch deepspeed`, and
so on; without the option, in this one. A peer that is absent, or that cannot estimate this run, is a row with its
reason. The model is made from a local config of Transformers, on the meta device; nothing is downloaded.

The run is a Llama of 1.06 billion parameters with FSDP on 8 ranks. Its truth is `simulate`: two steps of the code on
tensors without memory. The second table has searches: only Weft searches here, since DeepSpeed's autotuner and
Galvatron run jobs on the devices. Seconds are CPU seconds of a process, with imports.

Writes benchmarks/results/plan_peers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import processor, write_results  # noqa: E402

RANKS = 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
RUN = {
    "model": {key: CONFIG[key] for key in (*KEYS, "intermediate_size", "max_position_embeddings")},
    "data": {"sequence_length": 2048},
    "parallel": {"dp_shard": RANKS},
    "training": {"steps": 10, "batch_tokens": RANKS * 2048, "micro_batch_size": 1, "dtype": "bfloat16"},
}
MODEL = """
import json, sys, time
import torch
from transformers import AutoConfig, AutoModelForCausalLM
def model():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
"""
PROGRAMS = {  # each prints bytes of one rank, and what they are
    "DeepSpeed": MODEL
    + """
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, model_to_params
total, largest = model_to_params(model())
_, found, _ = estimate_zero3_model_states_mem_needs(total, largest, int(sys.argv[2]), 1, cpu_offload=False)
print(json.dumps([found, "ZeRO-3 without offload: 18 bytes per parameter over the ranks, and the largest layer"]))
""",
    "accelerate": MODEL
    + """
from accelerate.utils import calculate_maximum_sizes
total, _ = calculate_maximum_sizes(model())
print(json.dumps([4 * total, "training with Adam in float32, one rank: 4 times the weights, no activations"]))
""",
    "Transformers": MODEL
    + """
print(json.dumps([model().get_memory_footprint(), "weights and buffers alone, one rank"]))
""",
    "torchtitan": """
from importlib.metadata import files
if not any(path.stem in ("estimate", "estimation") for path in files("torchtitan")):
    raise SystemExit("the package has no estimator (scripts/estimate is not part of the wheel)")
raise SystemExit("its estimator needs a job's config of its own models")
""",
    "Calculon": """
from importlib.metadata import files, metadata
if not any("megatron" in str(path) for path in files("calculon")):
    raise SystemExit("the package of this name is another project: " + metadata("calculon")["Summary"][:46] + " ...")
raise SystemExit("it predicts only the hardware of its own files")
""",
    "accelerate estimate-memory": """
import subprocess, sys
done = subprocess.run(
    [sys.executable, "-m", "accelerate.commands.accelerate_cli", "estimate-memory", sys.argv[1],
     "--library_name", "transformers"],
    capture_output=True, text=True, env={"HF_HUB_OFFLINE": "1"},
)
if done.returncode:
    raise SystemExit("no local folders, only names of the Hub: " + done.stderr.strip().splitlines()[-1][:90])
raise SystemExit("its table has the sizes of the row before")
""",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("deepspeed", "accelerate", "torchtitan", "calculon"):
        parser.add_argument(f"--{name}", default=sys.executable, metavar="PYTHON", help=f"interpreter that has {name}")
    parser.add_argument("--jobs", type=int, default=1, help="processes at the same time")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plan-peers-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "run.yaml").write_text(json.dumps(RUN))  # JSON is YAML
        with ThreadPoolExecutor(args.jobs) as pool:
            waiting = [pool.submit(weft_plan, folder), pool.submit(truth, folder)]
            for peer, program in PROGRAMS.items():
                python = getattr(args, peer.split()[0].lower(), sys.executable)
                waiting.append(pool.submit(asked, peer, [python, "-c", program, str(folder), str(RANKS)]))
            found = [pool.submit(search, folder, devices) for devices in (64, 2048)]
            rows, searches = ([one.result() for one in many] for many in (waiting, found))
    report(rows, searches, args.out)


def completed(command: list[str]) -> tuple[int, str, str, float]:
    """Runs a command. Returns its exit code, stdout, stderr and CPU seconds, which other programs hardly change."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        pid = subprocess.Popen(command, stdout=out, stderr=errors).pid
        _, status, used = os.wait4(pid, 0)
        texts = [file.read() for file in (out, errors) if not file.seek(0)]
    return os.waitstatus_to_exitcode(status), texts[0], texts[1], used.ru_utime + used.ru_stime


def asked(peer: str, command: list[str]) -> dict:
    """Runs a command that prints bytes and what they are as a JSON list. Returns a row; its reason if it fails."""
    code, out, errors, seconds = completed(command)
    row = {"tool": peer, "seconds": seconds, "bytes": None}
    if code:
        return row | {"what": (errors.strip().splitlines() or ["no reason given"])[-1]}
    size, what = json.loads(out.strip().splitlines()[-1])
    return row | {"bytes": size, "what": what}


def planned(*words: str) -> tuple[dict, float]:
    """Returns the JSON of `weft plan`, and its CPU seconds."""
    code, out, errors, seconds = completed([sys.executable, "-m", "weft", "plan", *words, "--json"])
    if code:
        sys.exit(errors)
    return json.loads(out), seconds


def weft_plan(folder: Path) -> dict:
    """Returns the row of `weft plan --keep-mesh` with the kernels of a CPU, as the simulation has them."""
    words = ["--devices", str(RANKS), "--hardware", "cpu-generic", "--keep-mesh"]
    found, seconds = planned(str(folder / "run.yaml"), *words)
    what = "parameters, gradients, optimizer, activations, logits, gathered, buffers; CPU kernels"
    return {"tool": "weft plan", "seconds": seconds, "bytes": found["plans"][0]["memory_bytes"], "what": what}


def truth(folder: Path) -> dict:
    """Returns the row of two simulated steps."""
    program = (
        "import json, sys; from weft.config.run import RunConfig; from weft.planner.simulate import simulate\n"
        "config = RunConfig.load(sys.argv[1] + '/run.yaml', check_data=False, ranks=int(sys.argv[2]))\n"
        "print(json.dumps([simulate(config, int(sys.argv[2]))[0].memory.total, 'two steps of the code: the truth']))"
    )
    return asked("weft plan --simulate", [sys.executable, "-c", program, str(folder), str(RANKS)])


def search(folder: Path, devices: int) -> dict:
    """Returns how long `weft plan` takes to search the meshes of a 70B Llama."""
    model = {
        "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "max_position_embeddings": 8192,
    }  # fmt: skip
    run = {"model": model, "data": {"sequence_length": 8192}}
    run["training"] = {"steps": 10, "batch_tokens": 1 << 24, "dtype": "bfloat16"}
    path = folder / f"search-{devices}.yaml"
    path.write_text(json.dumps(run))
    found, seconds = planned(str(path), "--devices", str(devices), "--hardware", "h100-sxm")
    return {"devices": devices, "seconds": seconds, "exact": found["exact"], "mfu": found["plans"][0]["mfu"]}


def report(rows: list[dict], searches: list[dict], out: Path) -> None:
    """Writes both tables."""
    truth = next(row["bytes"] for row in rows if row["tool"] == "weft plan --simulate")
    lines = [
        "| tool | CPU s | GB of a rank | beside the truth | what |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        size = row["bytes"]
        numbers = "- | -" if size is None else f"{size / 1e9:.2f} | {size / truth - 1:+.0%}"
        lines.append(f"| {row['tool']} | {row['seconds']:.1f} | {numbers} | {row['what']} |")
    page = f"# Memory by other tools, and `weft plan`\n\nA Llama of 1.06B, FSDP on {RANKS} ranks. {processor()}\n\n"
    page += "\n".join(lines) + "\n\nSearches of `weft plan` for a 70B Llama on H100:\n\n"
    page += "| devices | CPU s | surely the fastest (`exact`) | MFU of the best plan |\n| ---: | ---: | --- | ---: |\n"
    for one in searches:
        exact = "yes" if one["exact"] else "no"
        page += f"| {one['devices']} | {one['seconds']:.1f} | {exact} | {one['mfu']:.0%} |\n"
    write_results(out, "plan_peers", page, {"memory": rows, "searches": searches})


if __name__ == "__main__":
    main()
