"""Real peaks of memory on gloo meshes of 2 and 4 processes, beside the formulas and the simulated ranks.

    python benchmarks/plan_memory_real.py [--ranks 2] [--only NAME] [--out TABLE.md]

Each mesh makes three real steps (`weft.Trainer.step`). On each rank, a dispatch mode counts the bytes of all storages
that exist, from before the model is built; the peak is that of the last two steps, as the optimizer's state is made by
the first. The counter shares no code with `weft plan --simulate`. The other column of the process is the highest
resident memory of these steps minus that before the model was built; it has what the allocator keeps, gloo's buffers
and libraries, too. A row is a pipeline rank: of its processes the one that needs most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft

LENGTH, SEQUENCES, STEPS = 128, 16, 3
MODEL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "max_position_embeddings": LENGTH,
}
EXPERTS = {"moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}}
MUON = {"type": "muon", "lr": 1e-2}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {  # name -> ranks, and values of the run file
    "fsdp": (2, {}),
    "fsdp, bfloat16": (2, {"training.dtype": "bfloat16"}),
    "fsdp, full recomputation": (2, {"training.activation_checkpointing": "full"}),
    "fsdp, muon": (2, {"optimizer": MUON}),
    "fsdp, micro-batch 2": (2, {"training.micro_batch_size": 2}),
    "fsdp, kept after forward": (2, {"parallel.reshard_after_forward": False}),
    "fsdp, tied embeddings": (2, {"model": {"tie_word_embeddings": True}}),
    "dp": (2, {"parallel.dp_replicate": 2, "parallel.dp_shard": 1}),
    "tp": (2, {"parallel.tp": 2}),
    "cp": (2, {"parallel.cp": 2}),
    "pp": (2, {"parallel.pp": 2}),
    "experts, fsdp": (2, {"model": EXPERTS}),
    "experts, ep": (2, {"model": EXPERTS, "parallel.ep": 2}),
    "tp 2, fsdp 2": (4, {"parallel.tp": 2}),
    "pp 2, fsdp 2": (4, {"parallel.pp": 2}),
    "pp 2, tp 2": (4, {"parallel.pp": 2, "parallel.tp": 2}),
    "cp 2, fsdp 2, selective": (4, {"parallel.cp": 2, "training.activation_checkpointing": "selective"}),
    "hybrid, bfloat16": (4, {"parallel.dp_replicate": 2, "training.dtype": "bfloat16"}),
}


def config_of(name: str, folder: Path) -> weft.RunConfig:
    ranks, changes = RUNS[name]
    content: dict[str, Any] = {
        "run": {"name": name.replace(", ", "-").replace(" ", "_"), "directory": str(folder / "runs")},
        "model": dict(MODEL),
        "data": {"sequence_length": LENGTH},
        "optimizer": {"type": "adamw", "lr": 1e-3},
        "schedule": {"type": "constant"},
        "training": {"batch_tokens": SEQUENCES * LENGTH, "micro_batch_size": 4, "dtype": "float32"},
        "parallel": {},
        "log": {"trackers": []},
    }
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        content[section] |= {rest: value} if rest else value
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    return weft.RunConfig.load(file, check_data=False, ranks=ranks)


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, while they live."""

    def __init__(self):
        super().__init__()
        self.known = weakref.WeakKeyDictionary[torch.UntypedStorage, list[int]]()
        self.total = self.peak = 0

    def note(self, storage: torch.UntypedStorage) -> None:
        size = self.known.get(storage)
        if size is None:
            size = self.known[storage] = [0]
            weakref.finalize(storage, self.free, size)
        self.total += storage.nbytes() - size[0]
        size[0] = storage.nbytes()
        self.peak = max(self.peak, self.total)

    def free(self, size: list[int]) -> None:
        self.total -= size[0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # its local tensors come here
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                self.note(tensor.untyped_storage())
        return out


def resident(what: str) -> int:
    """Returns VmRSS (now) or VmHWM (the highest since it was reset) of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def run_rank(name: str, folder: Path) -> None:
    """Makes the steps of a mesh on this rank, and writes its peaks."""
    rank, counter, resize = int(os.environ["RANK"]), Storages(), torch.UntypedStorage.resize_
    (mine := folder / f"rank{rank}").mkdir(exist_ok=True)

    def resized(storage: torch.UntypedStorage, size: int) -> None:  # FSDP2 frees gathered parameters in this way
        resize(storage, size)
        counter.note(storage)

    config = config_of(name, mine)
    config = config.model_copy(update={"run": config.run.model_copy(update={"directory": str(folder / "runs")})})
    before, found = resident("VmRSS"), {}
    with mock.patch.object(torch.UntypedStorage, "resize_", resized), counter:
        trainer = weft.Trainer(config, batches="global")
        for step in range(STEPS):
            tokens = torch.randint(8192, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(step))
            if step == 1:
                counter.peak = counter.total
                with suppress(OSError):  # some containers do not let a process reset its mark
                    Path("/proc/self/clear_refs").write_text("5")
            trainer.step({"tokens": tokens})
        found = {"tensors": counter.peak, "process": resident("VmHWM") - before, "stage": trainer.mesh.pp_rank}
    (folder / f"peak-{rank}.json").write_text(json.dumps(found))
    trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="only meshes of this many processes")
    parser.add_argument("--only", help="only this mesh")
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(arguments.rank_of[0], Path(arguments.rank_of[1]))
        return
    from weft.planner.memory import memory_of
    from weft.planner.simulate import simulate_rank

    rows, errors = ["| mesh | rank of the pipeline | tensors | formula | simulated | process |", "| --- " * 6 + "|"], []
    for name, (ranks, _) in RUNS.items():
        if arguments.only not in (None, name) or arguments.ranks not in (None, ranks):
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            words += [__file__, "--rank-of", name, place]
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            if done.returncode:
                sys.exit(f"{name}: {done.stderr[:3000]}")
            peaks = [json.loads((folder / f"peak-{rank}.json").read_text()) for rank in range(ranks)]
            config = config_of(name, folder)
        for stage, planned in enumerate(memory_of(config, ranks, cpu=True)):
            most = max((one for one in peaks if one["stage"] == stage), key=lambda one: one["tensors"])
            fake = simulate_rank(config, ranks, peaks.index(most)).memory.total
            real, formula = most["tensors"], planned.total
            errors.append(abs(formula / real - 1))
            sizes = [f"{size / 2**20:,.1f}" for size in (real, formula, fake, most["process"])]
            sizes[1] += f" ({formula / real - 1:+.1%})"
            sizes[2] += f" ({fake / real - 1:+.1%})"
            rows.append(f"| {ranks} ranks: {name} | {stage} | {' | '.join(sizes)} |")
            print(rows[-1], flush=True)
    good, mean = sum(one <= 0.05 for one in errors), sum(errors) / len(errors)
    summary = f"MiB. Formulas: {good} of {len(errors)} within 5%, mean error {mean:.1%}, largest {max(errors):.1%}."
    print(summary)
    if arguments.out:
        arguments.out.write_text("\n".join((summary, "", *rows, "")))


if __name__ == "__main__":
    main()
