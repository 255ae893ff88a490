"""What every measured process shares: the shapes, the data, the optimizer's settings, and how a step is timed; and what
benchmarks share: a measurement in a process of its own, and the files of results.

A peer is a program that takes one JSON object as its argument and prints another as its last line. It needs only torch
and numpy from here, so that it can live in an environment of its own.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

VOCABULARY = 32_000
# In Hugging Face's words, which are Weft's too.
SHAPES = {
    "14m": {  # 14.0M parameters, 8.2M of them the embedding that is also the head
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 688,
        "tie_word_embeddings": True,
    },
    "60m": {  # 58.1M parameters, embedding and head 16.4M each
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1376,
        "tie_word_embeddings": False,
    },
}
for shape in SHAPES.values():
    shape |= {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0
LOAD = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # before a benchmark adds its own


def matmul_parameters(shape: dict) -> int:
    """Parameters used in matrix products: all of the blocks' matrices, and the head."""
    width, heads = shape["hidden_size"], shape["num_attention_heads"]
    kv_width = width // heads * shape["num_key_value_heads"]
    block = 2 * width * width + 2 * width * kv_width + 3 * width * shape["intermediate_size"]
    return shape["num_hidden_layers"] * block + width * shape["vocab_size"]


def parameters_of(shape: dict) -> int:
    """All of a Llama's."""
    look_up = 0 if shape["tie_word_embeddings"] else shape["hidden_size"] * shape["vocab_size"]
    return matmul_parameters(shape) + look_up + (2 * shape["num_hidden_layers"] + 1) * shape["hidden_size"]


def flops_per_token(shape: dict, sequence: int) -> int:
    """Of forward and backward: 6 x matmul parameters + 12 x layers x width x sequence."""
    return 6 * matmul_parameters(shape) + 12 * shape["num_hidden_layers"] * shape["hidden_size"] * sequence


def job(torch_threads: bool = True) -> dict:
    """The JSON object this process was started with, its last argument; sets PyTorch's number of threads."""
    asked = json.loads(sys.argv[-1])
    if torch_threads:
        import torch

        torch.set_num_threads(asked["threads"])
    return asked


def write_tokens(path: Path, rows: int, sequence: int, vocabulary: int = VOCABULARY) -> Path:
    """Random tokens from a fixed seed, uint16 [rows, sequence + 1]: what is in them does not change a step's time."""
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, vocabulary, size=(rows, sequence + 1), dtype=np.uint16)
    np.save(path, tokens, allow_pickle=False)
    return path


def windows(asked: dict):
    """The shared sequences, uint16 [rows, sequence + 1]: random tokens, the same for everyone."""
    import numpy as np

    return np.load(asked["data"], mmap_mode="r", allow_pickle=False)


def batch(asked: dict, step: int):
    """Step `step`'s (tokens, labels), int64 [batch, sequence] each, on the device."""
    import torch

    rows = windows(asked)
    first = step * asked["batch"] % (len(rows) - asked["batch"] + 1)
    block = torch.from_numpy(rows[first : first + asked["batch"]].astype("int64"))
    return block[:, :-1].to(asked["device"]).contiguous(), block[:, 1:].to(asked["device"]).contiguous()


def optimizer(model, groups: list[dict] | None = None):
    """AdamW as every peer runs it: the fused one, the fastest on CPU and GPU alike."""
    import torch

    groups = groups or [{"params": list(model.parameters())}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


class Clock:
    """Notes the time at the end of each step; a step lasts from one end to the next, whatever happens between."""

    def __init__(self, asked: dict):
        self.asked, self.ends = asked, []

    def tick(self) -> None:
        if self.asked["device"] == "cuda":
            import torch

            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of the steps after the warm-up."""
        steps = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        return steps[self.asked["warmup"] - 1 :][: self.asked["steps"]]


def bare_loop(asked: dict, model, loss_of) -> None:
    """The least a training loop can be: forward and loss under autocast, backward, clip, update. Prints the result.

    Args:
        loss_of: (model, tokens, labels) -> the mean loss.
    """
    import torch

    model.to(asked["device"]).train()
    adamw = optimizer(model)
    if asked["compile"]:
        model = torch.compile(model)
    clock, losses = Clock(asked), []
    for step in range(asked["warmup"] + asked["steps"]):
        tokens, labels = batch(asked, step)
        with torch.autocast(asked["device"], torch.bfloat16, enabled=asked["dtype"] == "bf16"):
            loss = loss_of(model, tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
        clock.tick()
    report(asked, model, clock, losses)


def report_decoding(asked: dict, generate: Callable[[list[list[int]], int], float]) -> None:
    """Prints the seconds of `generate(prompts, new tokens)` for each batch size, after a warm-up."""
    random, seconds = Random(0), {}
    for size in asked["batches"]:
        prompts = [[random.randrange(asked["shape"]["vocab_size"]) for _ in range(64)] for _ in range(size)]
        generate(prompts, 8)
        seconds[size] = generate(prompts, asked["tokens"])
    print(json.dumps(seconds), flush=True)


def report(asked: dict, model, clock: Clock, losses: list[float]) -> None:
    """Print what was measured, as the one line that the benchmark reads."""
    import torch

    done = {
        "seconds": clock.seconds(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_bytes": torch.cuda.max_memory_allocated() if asked["device"] == "cuda" else peak_resident_bytes(),
        "torch": torch.__version__,
    }
    print(json.dumps(done), flush=True)


def peak_resident_bytes() -> int:
    """The most memory this process has had at once."""
    import resource

    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Hosts in a cloud hide an EPYC's number; its generations differ twofold in speed. (family, first model, last model)
ZEN = {(25, 0, 15): "Zen 3", (25, 16, 31): "Zen 4", (25, 160, 175): "Zen 4", (26, 0, 31): "Zen 5"}


def processor() -> str:
    """The processor's name, its generation if the name does not tell it, and the number of usable cores."""
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        name = found["model name"]
    except (OSError, KeyError):
        name = platform.processor() or platform.machine()
    if name == "AMD EPYC":
        family, model = int(found["cpu family"]), int(found["model"])
        zen = [zen for (known, first, last), zen in ZEN.items() if family == known and first <= model <= last]
        name = " ".join([name, *zen])
    return f"{name}, {available_cores()} cores"


def load_before() -> str:
    """How busy the machine was when this process began: the mean number of ready processes in the minute before."""
    return f"load average before: {LOAD:.1f} on {available_cores()} cores" if LOAD is not None else "load not known"


def slug(device: str) -> str:
    """A file name's part from a device's name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((R|TM)\)", "", device).lower()).strip("-")


def run_peer(python: Path | str, program: str, asked: dict, work: str | None = None) -> dict:
    """Runs a program of this folder, in the folder `work`, and returns what it prints as its last line."""
    here = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(here.parents[1] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(asked["threads"])}
    command = [str(python), str(here / program), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=work)
    if done.returncode:
        raise SystemExit(f"{program}: {done.stdout[-1500:]}{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def mesh_options(description: str, quick: str) -> argparse.Namespace:
    """Of a benchmark that takes many meshes, each in a process of its own; `job`: what this one is asked, or None."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help=f"{quick}: does it work at all?")
    parser.add_argument("--only", type=lambda axes: set(axes.split(",")), help="meshes with one of these axes: tp,cp")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def measured_apart(script: str, job: dict) -> dict:
    """What `script --job JOB` prints as its last line, in a process of its own; or `{"failed": why}`."""
    done = subprocess.run([sys.executable, script, "--job", json.dumps(job)], capture_output=True, text=True)
    return _result(done.stdout, done.stderr, done.returncode)


def measured_on_ranks(script: str, job: dict, ranks: int, minutes: float = 10) -> dict:
    """Like `measured_apart`, for the first of `ranks` processes of a process group.

    When one of them ends badly, the others are ended too: they would wait for it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(job["threads"]),
    }
    command = [sys.executable, script, "--job", json.dumps(job)]
    with ExitStack() as stack:
        outs, errors = ([stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)] for _ in "ab")
        workers = []
        for rank in range(ranks):
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(subprocess.Popen(command, env=environment, stdout=outs[rank], stderr=errors[rank]))
            stack.callback(_end, workers[-1])
        until = time.monotonic() + 60 * minutes
        while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
            if time.monotonic() > until:
                return {"failed": f"took more than {minutes:g} minutes"}
            time.sleep(0.05)
        found = []
        for rank in [rank for rank, worker in enumerate(workers) if worker.poll()] or [0]:
            for file in (outs[rank], errors[rank]):
                file.seek(0)
            found.append(_result(outs[rank].read(), errors[rank].read(), workers[rank].returncode))
        # Who lost the others has less to tell than who was lost.
        return min(found, key=lambda one: "onnection" in one.get("failed", ""))


def _end(worker: subprocess.Popen) -> None:
    if worker.poll() is None:
        worker.kill()
    worker.wait()


def _result(out: str, error: str, code: int) -> dict:
    with suppress(IndexError, ValueError):
        return json.loads(out.splitlines()[-1])
    lines = error.strip().splitlines() or [f"exit code {code}"]
    raised = [line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
    word = re.sub(r"^\[rank\d+\]: ", "", (raised or lines)[-1])
    out_of_memory = re.search(r"MemoryError|OutOfMemory|out of memory|allocate memory", error)
    return {"failed": "out of memory" if out_of_memory or code < 0 else word}


def write_results(out: Path, name: str, page: str, found: dict | list, show: bool = True) -> None:
    """Write a table and all its numbers, and show the table.

    Args:
        out: the folder.
        name: of the files, without `.md` and `.json`.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / f"{name}.md").write_text(page)
    if show:
        print(f"\n{page}\nwritten to {out / name}.md and .json")
