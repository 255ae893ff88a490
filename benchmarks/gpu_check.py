"""Everything that a GPU machine has to show, in the order of its value, within a time budget.

    python benchmarks/gpu_check.py [--minutes 9] [--out benchmarks/results]
    .venv/bin/python benchmarks/gpu_check.py --device cpu --quick --minutes 4  # does it work at all?

Runs the tests marked `gpu`, then the benchmarks, one process each. What a process prints is in `gpu_check/NAME.txt`
under the folder of `--out` as it is printed, and the benchmarks write their tables after each measurement. The page
`gpu_check-DEVICE.md` is written again before and after each process: it lists what ran, what failed, what the time
budget cut short, and what needs a package that is missing. So whatever ends this program, what was measured is kept.

Exits with 1 if a process failed, but not for a missing package or for the end of the time.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MARGIN = 8.0  # seconds that are left for the last page


@dataclass
class Job:
    """One process.

    Attributes:
        name: name of the file with what it prints.
        what: description in the table.
        command: arguments of the interpreter. `{minutes}` stands for the minutes that the process has.
        seconds: the most that it may take; less if the budget, without what is reserved, is less.
        least: it is not started if less of the budget is left.
        reserve: seconds of the budget that the parts before it leave for it.
        needs: packages without which it is left out.
    """

    name: str
    what: str
    command: list[str]
    seconds: float
    least: float = 20
    reserve: float = 0
    needs: tuple[str, ...] = ()
    status: str = "not started: the time was over"
    took: float | None = None
    last: str = ""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The tests and benchmarks of a GPU, in a time budget.")
    parser.add_argument("--minutes", type=float, default=9, help="time budget")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--only", default="", help="only the parts whose names contain one of these texts: tests,fp8")
    parser.add_argument("--quick", action="store_true", help="tiny models: does it work at all?")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    args.out = args.out.resolve()
    return args


def jobs(args: argparse.Namespace) -> list[Job]:
    """All parts, the most valuable first."""
    common = ["--device", args.device, "--out", str(args.out)]
    quick, once = ["--quick"] if args.quick else [], ["--rounds", "1", "--minutes", "{minutes}"]
    gpu = [str(HERE / "parallel_gpu.py"), *common, *once, *quick]
    marked = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    tests = ["-m", "pytest", "-v", "-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short"]
    sizes = [] if args.quick else ["--sizes", "350m", "--rounds", "1"]
    rows = ["--rows", "Weft without,transformers"] if args.device == "cuda" or args.quick else []
    decode = [str(HERE / "generate_decode.py"), *common, *sizes, *rows, *quick]
    throughput = ["--sizes", "60m", "--modes", "compiled", "--dtypes", "bf16", "--only", "weft,trainer,hf"]
    families = ["--modes", "compiled"]
    trainer, titan = [*gpu, "--only", "trainer-bf16"], [*gpu, "--only", "titan-bf16"]
    found = [
        Job(
            "tests", "tests marked `gpu`", [*tests, "--continue-on-collection-errors", *marked], 150, 15, 0, ("pytest",)
        ),
        Job("training-bf16", "training in bf16: tokens/s, MFU, memory", [*gpu, "--only", "weft-bf16"], 300, 20, 120),
        Job(
            "training-fp8", "training in fp8", [*gpu, "--only", "weft-fp8,weft-fp8-rowwise"], 200, 20, 60, ("torchao",)
        ),
        Job("generation", "decoding, beside transformers", decode, 120, 20, 40),
        Job("trainer", "`Trainer` in bf16", trainer, 200, 30, 60, ("transformers", "accelerate")),
        Job("torchtitan", "torchtitan in bf16", titan, 200, 30, 60, ("torchtitan",)),
        Job(
            "throughput",
            "a small model beside `Trainer` and a bare loop",
            [str(HERE / "train_throughput.py"), *common, *once, *(quick or throughput)],
            150,
            30,
            needs=("transformers",),
        ),
        Job(
            "families",
            "a step of each family beside transformers",
            [str(HERE / "family_step.py"), *common, *once, *(quick or families)],
            300,
            30,
            needs=("transformers",),
        ),
    ]
    asked = args.only.split(",")
    found = [job for job in found if args.device == "cuda" or "fp8" not in job.name]  # no CPU multiplies in 8 bits
    return [job for job in found if any(text in job.name for text in asked)]


def missing(job: Job) -> list[str]:
    """The packages that a process needs, and this interpreter does not have."""
    return [name for name in job.needs if importlib.util.find_spec(name) is None]


def run(job: Job, folder: Path, left: float, reserved: float = 0) -> None:
    """Runs a process until it ends or its time is over, and notes how it ended.

    Args:
        left: seconds of the budget.
        reserved: those of them that belong to later parts. A part gets its own reserve in any case.
    """
    if absent := missing(job):
        job.status = f"left out: {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
        return
    if left < job.least:
        return
    seconds, began = min(job.seconds, left, max(left - reserved, job.reserve, job.least)), time.monotonic()
    # A benchmark starts no measurement in the last part of its time, which is that of one measurement, about a minute.
    command = [text.replace("{minutes}", f"{max(0.6 * seconds, seconds - 70) / 60:.2f}") for text in job.command]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    out = folder / f"{job.name}.txt"
    with out.open("w") as file:
        child = subprocess.Popen(
            [sys.executable, *command],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,  # so that its own processes end with it
        )
        try:
            code = child.wait(seconds)
            job.status = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            job.status = f"cut short after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    lines = [line.strip() for line in out.read_text(errors="replace").splitlines() if line.strip()]
    job.took, job.last = time.monotonic() - began, lines[-1][:160] if lines else ""


def write(args: argparse.Namespace, device: str, every: list[Job]) -> Path:
    """Writes the page and its numbers, each by one rename."""
    name = f"gpu_check-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}" + ("-quick" if args.quick else "")
    lines = [
        "# What ran on the GPU machine",
        "",
        f"{device}; Python {sys.version.split()[0]}; {args.minutes:g} minutes.",
    ]
    lines += ["", "| part | seconds | | last line |", "| --- | ---: | --- | --- |"]
    for job in every:
        took = "" if job.took is None else f"{job.took:.0f}"
        last = job.last.replace("|", "/")
        lines.append(f"| {job.what} (`gpu_check/{job.name}.txt`) | {took} | {job.status} | {last} |")
    texts = {".json": json.dumps([asdict(job) for job in every], indent=1), ".md": "\n".join(lines)}
    for suffix, text in texts.items():
        new = args.out / f"{name}{suffix}.new"
        new.write_text(text + "\n")
        new.replace(args.out / f"{name}{suffix}")
    return args.out / f"{name}.md"


def device_name(args: argparse.Namespace) -> str | None:
    """Returns the name of the GPU, from a process of its own, which does not keep the GPU; None if there is none."""
    if args.device == "cpu":
        return "CPU"
    program = "import torch; print(torch.cuda.get_device_name() + ', torch ' + torch.__version__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def main() -> int:
    args, began = arguments(), time.monotonic()
    device = device_name(args)
    if device is None:
        print("gpu_check: torch finds no GPU here (or there is no torch); try --device cpu --quick")
        return 1
    every, folder = jobs(args), args.out / "gpu_check"
    folder.mkdir(parents=True, exist_ok=True)
    for number, job in enumerate(every, 1):
        left = 60 * args.minutes - MARGIN - (time.monotonic() - began)
        later, job.status = job.status, "running"
        page = write(args, device, every)
        job.status = later
        run(job, folder, left, sum(later.reserve for later in every[number:] if not missing(later)))
        page = write(args, device, every)
        print(f"{job.name}: {job.status}" + (f" ({job.took:.0f} s): {job.last}" if job.took else ""), flush=True)
    print(f"written to {page}")
    return int(any(job.status.startswith("failed") for job in every))


if __name__ == "__main__":
    raise SystemExit(main())
