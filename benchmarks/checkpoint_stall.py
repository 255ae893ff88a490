"""Seconds that a training waits for a checkpoint: Weft's sync and async saves, DCP's, Accelerate's and torch.save.

    .venv/bin/python benchmarks/checkpoint_stall.py [--shape 14m] [--saves 2] [--every 50] [--directory DIR] [--quick]

One process trains a Llama with AdamW in float32, and saves weights and optimizer state after some steps. A stall is the
time that the call takes in the training's thread; the steps until the save is complete are timed beside steps without a
save. Then the last checkpoint is loaded. Each way is a process of its own. Writes a table (.md) and all numbers
(.json) into benchmarks/results.
"""

import argparse
import datetime
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import (  # noqa: E402
    SHAPES,
    available_cores,
    job,
    load_before,
    measured_apart,
    processor,
    slug,
    write_results,
)

WAYS = {
    "weft-sync": "Weft, `checkpoint.mode: sync`",
    "weft-async": "Weft, `checkpoint.mode: async`",
    "dcp": "`dcp.save`",
    "dcp-async": "`dcp.async_save`",
    "accelerate": "Accelerate's `save_state`",
    "torch": "`torch.save`",
}
NOTES = """\
- Stall: median seconds in the training's thread for one save, after a first save that is not counted. Of async saves it
  contains the copy to memory that the process already has.
- CPU of the stall: of the training's thread. CPU of a save: of all threads; CPU seconds of steps with
  saves, less those of steps without. Other programs on the machine disturb these less than times.
- Whole run: the time of all steps and saves, with the wait for the last save, beside the same steps without saves.
- Load: the last checkpoint into the model and the optimizer, in the same process. The kernel is asked to forget the
  files before, also before the disk's own read. Weft verifies every byte.
- Weft hashes every byte (SHA-256) and waits for the disk (fsync). `dcp.save` also waits for the disk, without a hash;
  Accelerate and torch.save do neither.
- The disk's own speed is that of one file of the same size, written in blocks of 16 MB, with fsync."""


def trained(asked: dict):
    """A model and an optimizer that has made a step, and a function that makes one more."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[asked["shape"]]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 32_000, (asked["batch"], 257))

    def step() -> None:
        loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def saver(way: str, model, optimizer, folder: Path):
    """Functions that save as a step, and that wait for the save in progress."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    pending = []

    def wait() -> None:
        while pending:
            pending.pop().result()

    if way.startswith("weft"):
        from weft.checkpoint.background import BackgroundSaver
        from weft.checkpoint.checkpoint_files import Keep
        from weft.checkpoint.save import Content, stage

        background = BackgroundSaver() if way == "weft-async" else None

        def save(step: int) -> None:
            content = Content(step, model, optimizer, {}, {}, {})
            if background is None:
                stage(folder, content, Keep(2)).write()
            else:
                background.finish()
                background.start(stage(folder, content, Keep(2), background.begin()))

        return save, background.finish if background is not None else wait
    if way == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        return lambda step: accelerator.save_state(str(folder / str(step))), wait

    def save_other(step: int) -> None:
        wait()
        if way == "torch":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{step}.pt")
            return
        weights, state = get_state_dict(model, optimizer)
        both = {"model": weights, "optimizer": state}
        if way == "dcp":
            dcp.save(both, checkpoint_id=folder / str(step))
        else:
            pending.append(dcp.async_save(both, checkpoint_id=folder / str(step)))

    return save_other, wait


def measure(asked: dict) -> dict:
    """Times one way, in this process."""
    import torch.distributed as dist

    folder = Path(asked["folder"])
    if asked["way"] == "disk":
        wrote = disk(folder / "file", asked["bytes"])
        return {"seconds": wrote, "read": read(folder)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    if asked["way"].startswith("dcp"):
        dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)  # async_save needs one
    model, optimizer, step = trained(asked)
    save, wait = saver(asked["way"], model, optimizer, folder)
    save(0)  # allocates
    wait()
    stalls, stalls_cpu, began, began_cpu = [], [], time.perf_counter(), time.process_time()
    for number in range(1, asked["saves"] * asked["every"] + 1):
        step()
        if number % asked["every"] == 0:
            before, before_cpu = time.perf_counter(), time.thread_time()
            save(number)
            stalls.append(time.perf_counter() - before)
            stalls_cpu.append(time.thread_time() - before_cpu)
    wait()
    with_saves, began = time.perf_counter() - began, time.perf_counter()
    with_cpu, began_cpu = time.process_time() - began_cpu, time.process_time()
    for _ in range(asked["every"]):
        step()
    without = asked["saves"] * (time.perf_counter() - began)
    without_cpu = asked["saves"] * (time.process_time() - began_cpu)
    size = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    forget(folder)
    began = time.perf_counter()
    load(asked["way"], model, optimizer, folder, asked["saves"] * asked["every"])
    return {
        "stalls": stalls,
        "stalls_cpu": stalls_cpu,
        "with": with_saves,
        "without": without,
        "with_cpu": with_cpu,
        "without_cpu": without_cpu,
        "load": time.perf_counter() - began,
        "bytes": size,
    }


def load(way: str, model, optimizer, folder: Path, step: int) -> None:
    """Loads the checkpoint of a step."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    if way.startswith("weft"):
        from weft.checkpoint import load as weft_load

        weft_load.load(weft_load.find_checkpoint(folder), model=model, optimizer=optimizer)  # verifies
    elif way == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        accelerator.load_state(str(folder / str(step)))
    elif way == "torch":
        both = torch.load(folder / f"{step}.pt", weights_only=True)
        model.load_state_dict(both["model"])
        optimizer.load_state_dict(both["optimizer"])
    else:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / str(step))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def forget(folder: Path) -> None:
    """Asks the kernel to drop its copies of the files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> float:
    """Seconds to read all files of a folder."""
    forget(folder)
    began = time.perf_counter()
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(16 << 20):
                pass
    return time.perf_counter() - began


def disk(path: Path, size: int) -> float:
    block, began = os.urandom(16 << 20), time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(size // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


def table(found: dict) -> str:
    """The result as a page of Markdown."""
    size, speed = found["bytes"], found["bytes"] / found["disk"] / 1e9
    lines = [
        "# Stall per checkpoint",
        "",
        f"{found['device']}, {found['threads']} threads; a Llama of {found['shape']} parameters, {size / 1e6:,.0f} MB "
        f"of weights and AdamW state, a save every {found['every']} steps; the disk writes {speed:.2f} GB/s and "
        f"reads {size / found['read'] / 1e9:.2f} GB/s; {load_before()}; {found['date'][:10]}.",
        "",
        NOTES,
        "",
        "| way | stall | of Weft's sync stall | GB/s of the stall | CPU of the stall | CPU of a save | whole run, more "
        "than without saves | CPU, more | load, GB/s |",
        "| --- |" + " ---: |" * 8,
    ]
    sync = statistics.median(found["ways"]["weft-sync"]["stalls"])
    for way, got in found["ways"].items():
        if "failed" in got:
            lines.append(f"| {WAYS[way]} | {got['failed'].splitlines()[-1][:80]} |" + " |" * 8)
            continue
        stall, more = statistics.median(got["stalls"]), got["with"] / got["without"] - 1
        cpu = (got["with_cpu"] - got["without_cpu"]) / len(got["stalls"])
        lines.append(
            f"| {WAYS[way]} | {stall:.3f} s | {stall / sync:.1%} | {size / stall / 1e9:.2f} | "
            f"{statistics.median(got['stalls_cpu']):.3f} s | {cpu:.2f} s | {more:+.1%} | "
            f"{got['with_cpu'] / got['without_cpu'] - 1:+.1%} | {size / got['load'] / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="14m")
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--every", type=int, default=50, help="steps between saves")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 256 tokens in a step")
    parser.add_argument("--directory", help="where checkpoints are written (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--quick", action="store_true", help="does it work? a small shape, no figures to quote")
    args = parser.parse_args()
    shape, saves, every = ("14m", 2, 3) if args.quick else (args.shape, args.saves, args.every)
    threads = available_cores()
    base = {"shape": shape, "saves": saves, "every": every, "batch": args.batch, "threads": threads}
    found = {"ways": {}, **base, "device": processor(), "date": datetime.datetime.now().isoformat()}
    for way in [*args.only.split(","), "disk"]:
        work = Path(tempfile.mkdtemp(dir=args.directory, prefix="stall-"))
        try:
            asked = base | {"way": way, "folder": str(work)}
            if way == "disk":
                found["bytes"] = next(got["bytes"] for got in found["ways"].values() if "bytes" in got)
                got = measured_apart(__file__, asked | {"bytes": found["bytes"]})
                found["disk"], found["read"] = got["seconds"], got["read"]
            else:
                found["ways"][way] = got = measured_apart(__file__, asked)
        finally:
            shutil.rmtree(work)
        print(way, got, flush=True)
    write_results(args.out, f"checkpoint_stall-{slug(found['device'])}", table(found), found)


if __name__ == "__main__":
    if sys.argv[-1].startswith("{"):
        import json

        print(json.dumps(measure(job())))
    else:
        main()
