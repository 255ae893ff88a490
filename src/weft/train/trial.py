"""Runs real training steps with several sizes of micro-batches, in processes of their own beside the run.

`python -m weft.train.trial` is one rank of a trial. It ends with the code `NO_MEMORY` when a size does not fit.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from weft.config.derive import RunLength
from weft.config.run import RunConfig
from weft.data.batches.loader import BatchSource
from weft.errors import UserError, is_out_of_memory
from weft.observe.console import Console
from weft.observe.flops import memory_bytes
from weft.parallel.model_state import state_of
from weft.parallel.ranks import all_gather_object, error_on_all_ranks
from weft.planner.measure import synchronize
from weft.processes import die_with
from weft.train.loop import Loop
from weft.train.micro_batch import NO_MEMORY, Tried
from weft.train.profile import scratch_config
from weft.train.recorder import Recorder
from weft.train.saving import NoSaver
from weft.train.stop import Outcome, StopRequest
from weft.train.trainer import Trainer
from weft.train.watch.monitor import NoMonitor

STEPS = 3  # of each size; the first one allocates and compiles, and is not timed
GPU_SHARE = 0.95  # of a GPU's memory: a long run fragments it
SLOWER = 1.05  # a size this many times slower than the fastest counts as slower; after two of them, no more are tried


class TrialRecorder(Recorder):
    """The recorder of trials, which prints nothing and writes no report."""

    def _introduce(self, *facts) -> None:
        """Prints nothing."""

    def ended(self, *facts) -> None:
        """Writes nothing."""


@dataclass
class TrialLoop(Loop):
    """A training loop that repeats the first step with several sizes of micro-batches.

    Args:
        sizes: numbers of samples in a micro-batch, in the order in which they are tried; the config's if empty.
        seconds: no further size is tried after this time.
        out: the file to which this rank writes a line for each size that fits.
    """

    new_saver, new_monitor = NoSaver, NoMonitor
    sizes: tuple[int, ...] = ()
    seconds: float = 0.0
    out: Path = Path()

    def due(self, step: int, every: int | None) -> bool:
        """Returns False: trials have no checkpoint, validation or samples."""
        return False

    def run(self, step: int, stop: StopRequest | None = None) -> Outcome:
        """Tries the sizes, until one does not fit, two are slower than the fastest, or the time is over."""
        if not isinstance(self.data.source, BatchSource):
            raise error_on_all_ranks("training.micro_batch_size: auto needs data.train; set a number")
        began, tried = time.perf_counter(), []
        with self.recorder.progress(step), self.saver:
            self.begin(step, stop or StopRequest())
            batches = self.batches(step)
            batch = next(batches)
            batches.close()
            assert batch is not None
            assert isinstance(self.data.length, RunLength)
            sequences = self.data.source.layout.sequences
            for size in self.sizes or (self.data.length.micro_batch_size // sequences,):
                length = replace(self.data.length, micro_batch_size=size * sequences)
                self.data = replace(self.data, length=length)
                tried.append(self.try_size(size, batch))
                with self.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(tried[-1])) + "\n")
                fastest = min(one.seconds for one in tried)
                slower = len(tried) > 2 and all(one.seconds > SLOWER * fastest for one in tried[-2:])
                if slower or max(all_gather_object(time.perf_counter() - began)) > self.seconds:
                    break
        return Outcome("finished", step, None, {})

    def try_size(self, size: int, batch) -> Tried:
        """Makes steps with the present size, and returns what the ranks measured."""
        device, found, first = self.world.device, [], self.state.step
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(STEPS):
            synchronize(device)
            began = time.perf_counter()
            self.recorder.begin_step()
            self.recorder.data_arrived()
            sums, _ = self.sum_batch(batch)
            self.update(batch, sums)
            synchronize(device)
            found.append(time.perf_counter() - began)
            self.state.step = first
        answers = all_gather_object((min(found[1:]), memory_bytes(device)))
        state = state_of(self.model)
        every = state is not None and state.reduces_every
        return Tried(size, max(seconds for seconds, _ in answers), max(peak for _, peak in answers), every)


def limit_memory(limit: int) -> None:
    """Makes allocations beyond `limit` further bytes fail, before the kernel kills a process; on GPUs, at GPU_SHARE."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(GPU_SHARE, int(os.environ.get("LOCAL_RANK", 0)))
        return
    used = 0
    with open("/proc/self/status", encoding="ascii") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = used + limit if hard == resource.RLIM_INFINITY else min(used + limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def main(words: list[str]) -> int:
    """Runs one rank of a trial, and returns the exit code.

    Args:
        words: the process that started this one, the config's file, the folder of results, the seconds, the memory in
            bytes, and the sizes; without any, the config's.
    """
    parent, file, folder, seconds, limit, *sizes = words
    out = Path(folder) / f"tried-{os.environ.get('RANK', 0)}.jsonl"
    die_with(int(parent))
    try:
        config = RunConfig.load(file, for_fit=True)
        if torch.cuda.is_available() or sys.platform.startswith("linux"):
            limit_memory(int(limit))
        with tempfile.TemporaryDirectory(prefix="weft-trial-") as scratch:
            trainer = Trainer(scratch_config(config, scratch), console=Console(prints=False))
            trainer.user_config = config  # which all ranks share
            trainer.loop = partial(TrialLoop, sizes=tuple(map(int, sizes)), seconds=float(seconds), out=out)
            trainer.recorder = TrialRecorder
            trainer.fit()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BaseException as error:
        if is_out_of_memory(error):
            os._exit(NO_MEMORY)  # at once: the other ranks wait
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
