"""Seconds that a training waits for a checkpoint: Weft's sync and async saves, DCP's, Accelerate's and torch.save.

    .venv/bin/python benchmarks/checkpoint_stall.py [--shape 14m] [--saves 4] [--rounds 2] [--directory DIR] [--quick]

One process trains a Llama with AdamW in float32, and saves weights and optimizer state. A stall is the time that the
training's thread spends on a save: the call, and for Weft's async saves also the wait before the next update. Blocks of
steps with a save and without one take turns, and so do the ways, each a process of its own. Then the last checkpoint is
loaded. Writes a table (.md) and all numbers (.json) into benchmarks/results.
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
sys.path.insert(0, str(HERE.parent / "src"))
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

from weft.launch.threads import use_huge_pages, wait_briefly  # noqa: E402

WAYS = {
    "weft-sync": "Weft, `checkpoint.mode: sync`",
    "weft-async": "Weft, `checkpoint.mode: async`",
    "dcp": "`dcp.save`",
    "dcp-async": "`dcp.async_save`",
    "accelerate": "Accelerate's `save_state`",
    "torch": "`torch.save`",
}
NOTES = """\
- Stall: median seconds in the training's thread for one save, after two saves that are not counted, and range. Weft
  copies weights and optimizer state beside the next step; its stall contains the wait for the copy before the update.
- CPU of the stall: of the training's thread. CPU of a save: of all threads; CPU seconds of steps with
  saves, less those of steps without. Other programs on the machine disturb these less than times.
- Whole run: a block of steps with one save, with the wait until the save is complete, less the same steps without a
  save, in turns, as a share of the time between two saves: median and range of neighbours.
- Waiting threads sleep soon (GOMP_SPINCOUNT), and large tensors are in huge pages, as `weft train` sets it.
- Save: bytes of a checkpoint per second of a synchronous stall.
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
    """Functions that save as a step, that wait for the save in progress, and that an update needs first."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    pending = []

    def wait() -> None:
        while pending:
            pending.pop().result()

    if way.startswith("weft"):
        return weft_saver(way, model, optimizer, folder)
    if way == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        return lambda step: accelerator.save_state(str(folder / str(step))), wait, nothing

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

    return save_other, wait, nothing


def weft_saver(way: str, model, optimizer, folder: Path):
    """As `saver`, with what a training loop of Weft does."""
    from weft.checkpoint.background import BackgroundSaver
    from weft.checkpoint.checkpoint_files import Keep
    from weft.checkpoint.save import Content, stage

    background = BackgroundSaver()
    layout = None

    def save(step: int) -> None:
        nonlocal layout
        content = Content(step, model, optimizer, {}, {}, {})
        if way == "weft-sync":
            staged = stage(folder, content, Keep(2), layout=layout)
            staged.write()
        else:
            background.finish()
            staged = stage(folder, content, Keep(2), background.begin(), layout=layout)
            background.start(staged, late=True)
        layout = staged.layout

    return save, background.finish, background.copied


def nothing() -> None:
    """Does nothing."""


class Stalls:
    """Seconds and CPU seconds that the training's thread spends on each save."""

    def __init__(self):
        self.seconds, self.cpu = [], []

    def add(self, action, *, new: bool = False) -> None:
        began, began_cpu = time.perf_counter(), time.thread_time()
        action()
        spent, cpu = time.perf_counter() - began, time.thread_time() - began_cpu
        if new:
            self.seconds.append(0.0)
            self.cpu.append(0.0)
        if self.seconds:
            self.seconds[-1] += spent
            self.cpu[-1] += cpu


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
    save, wait, before_update = saver(asked["way"], model, optimizer, folder)
    stalls = Stalls()
    optimizer.register_step_pre_hook(lambda *_: stalls.add(before_update))
    for _ in range(2):  # memory, and what is planned once
        save(0)
        step()
        wait()
    stalls.seconds, stalls.cpu = [], []
    blocks = {True: [], False: []}
    for number in range(asked["saves"]):
        for saves in (True, False) if number % 2 else (False, True):
            began, began_cpu = time.perf_counter(), time.process_time()
            if saves:
                stalls.add(lambda: save(number + 1), new=True)  # noqa: B023
            for _ in range(asked["steps"]):
                step()
            wait()
            blocks[saves].append((time.perf_counter() - began, time.process_time() - began_cpu))
    size = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    forget(folder)
    began = time.perf_counter()
    load(asked["way"], model, optimizer, folder, asked["saves"])
    return {
        "stalls": stalls.seconds,
        "stalls_cpu": stalls.cpu,
        "with": blocks[True],
        "without": blocks[False],
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


def spread(values, form: str) -> str:
    """Median and range."""
    values = sorted(values)
    return f"{statistics.median(values):{form}} ({values[0]:{form}} to {values[-1]:{form}})"


def table(found: dict) -> str:
    """The result as a page of Markdown."""
    size, speed = found["bytes"], found["bytes"] / found["disk"] / 1e9
    step = statistics.median(
        seconds / found["steps"] for got in found["ways"].values() for seconds, _ in got.get("without", [])
    )
    lines = [
        "# Stall per checkpoint",
        "",
        f"{found['device']}, {found['threads']} threads; a Llama of {found['shape']} parameters, {size / 1e6:,.0f} MB "
        f"of weights and AdamW state; a save every {found['every']} steps of {256 * found['batch']:,} tokens (median "
        f"{1e3 * step:.0f} ms), measured in blocks of {found['steps']}; {found['rounds']} rounds of {found['saves']} "
        f"saves of each way; the disk writes "
        f"{speed:.2f} GB/s and reads {size / found['read'] / 1e9:.2f} GB/s; {load_before()}; {found['date'][:10]}.",
        "",
        NOTES,
        "",
        "| way | stall | of Weft's sync stall | CPU of the stall | CPU of a save | whole run, more than without | "
        "CPU, more | save, GB/s | load, GB/s |",
        "| --- |" + " ---: |" * 8,
    ]
    sync = statistics.median(found["ways"]["weft-sync"]["stalls"])
    for way, got in found["ways"].items():
        if "failed" in got:
            lines.append(f"| {WAYS[way]} | {got['failed'].splitlines()[-1][:80]} |" + " |" * 7)
            continue
        pairs = list(zip(got["with"], got["without"], strict=True))
        share = found["steps"] / found["every"]
        more, cpu_more = ([share * (saved[kind] / plain[kind] - 1) for saved, plain in pairs] for kind in (0, 1))
        cpu = statistics.median(saved[1] - plain[1] for saved, plain in pairs)
        stall = statistics.median(got["stalls"])
        lines.append(
            f"| {WAYS[way]} | {spread([1e3 * one for one in got['stalls']], '.1f')} ms | {stall / sync:.1%} | "
            f"{1e3 * statistics.median(got['stalls_cpu']):.1f} ms | {cpu:.2f} s | {spread(more, '+.1%')} | "
            f"{statistics.median(cpu_more):+.1%} | {'-' if 'async' in way else f'{size / stall / 1e9:.2f}'} | "
            f"{size / statistics.median(got['load']) / 1e9:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="14m")
    parser.add_argument("--saves", type=int, default=4, help="of each way in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--every", type=int, default=50, help="steps between saves")
    parser.add_argument("--steps", type=int, default=12, help="steps in a block with or without a save")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 256 tokens in a step")
    parser.add_argument("--directory", help="where checkpoints are written (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--quick", action="store_true", help="does it work? a small shape, no figures to quote")
    args = parser.parse_args()
    shape, saves, steps = ("14m", 2, 3) if args.quick else (args.shape, args.saves, args.steps)
    threads, rounds = available_cores(), 1 if args.quick else args.rounds
    base = {
        "shape": shape,
        "saves": saves,
        "steps": steps,
        "every": args.every,
        "batch": args.batch,
        "threads": threads,
    }
    found: dict = {"ways": {}, **base, "rounds": rounds, "device": processor()}
    found["date"] = datetime.datetime.now().isoformat()
    wait_briefly()
    use_huge_pages()
    for _ in range(rounds):
        for way in args.only.split(","):
            add(found["ways"].setdefault(way, {}), apart(args.directory, base | {"way": way}))
            print(way, found["ways"][way], flush=True)
    found["bytes"] = next(got["bytes"] for got in found["ways"].values() if "bytes" in got)
    got = apart(args.directory, base | {"way": "disk", "bytes": found["bytes"]})
    found["disk"], found["read"] = got["seconds"], got["read"]
    write_results(args.out, f"checkpoint_stall-{slug(found['device'])}", table(found), found)


def apart(directory: str | None, asked: dict) -> dict:
    """Measures in a process and a folder of their own."""
    work = Path(tempfile.mkdtemp(dir=directory, prefix="stall-"))
    try:
        return measured_apart(__file__, asked | {"folder": str(work)})
    finally:
        shutil.rmtree(work)


def add(all_rounds: dict, one: dict) -> None:
    """Adds the numbers of a round to those of the rounds before."""
    for name, value in one.items():
        if name in ("bytes", "failed"):
            all_rounds[name] = value
        else:
            all_rounds.setdefault(name, []).extend(value if isinstance(value, list) else [value])


if __name__ == "__main__":
    if sys.argv[-1].startswith("{"):
        import json

        print(json.dumps(measure(job())))
    else:
        main()
