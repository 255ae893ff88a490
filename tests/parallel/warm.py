"""Trains two steps when the fork server imports it: ranks are born with what a first run imports, builds and compiles.

That is half of what a short run costs a process: pydantic's models of the sections, the report's template, the sources
of classes that checks of the config read, and imports. The fake process group starts no thread, which a fork would
lose, and the run's end clears what PyTorch knows of its mesh.
"""

import contextlib
import gc
import io
import tempfile
import threading
from pathlib import Path

import torch
from matrix import Case, write_run
from pool import no_measuring

from weft.cli.main import COLLECT_EVERY
from weft.config.run import RunConfig
from weft.train.trainer import Trainer

no_measuring()
with tempfile.TemporaryDirectory() as _folder:
    _config = RunConfig.load(write_run(Path(_folder), Case("moe", "everything", layers=2), steps=2))
    if not torch.backends.cuda.is_built():  # a process that has looked for a GPU cannot be forked
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        with contextlib.redirect_stderr(io.StringIO()):
            Trainer(_config).fit()
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(60)  # such as one that reads batches ahead
        assert threading.active_count() == 1, threading.enumerate()
gc.collect()
# What was imported is never garbage: a collection in a rank would look through it, and copy the pages that forks share.
gc.freeze()
gc.set_threshold(COLLECT_EVERY)
