"""Batches that are read while the device computes, and the processes that read them."""

import multiprocessing

import pytest
import torch
from running import QUIET

import weft
from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.train.ahead import Ahead
from weft.train.loop import Loop


def batches(read):
    for number in range(3):
        read.append(number)
        tokens = torch.full((1, 4), number)
        yield Batch(tokens, tokens, torch.ones(1, 4), tokens, None, torch.tensor([number]))
    raise UserError("the data are damaged")


@pytest.mark.parametrize(("device", "early"), [("meta", True), ("meta", False), ("cpu", True)])
def test_a_batch_is_read_beside_the_device_only(device, early):
    read = []
    ahead = Ahead(batches(read), torch.device(device), early=early)
    in_advance = int(device == "meta" and early)
    for number in range(3):
        assert int(next(ahead).tokens[0, 0]) == number
        ahead.fetch()
        ahead.fetch()  # at most one
        assert read == list(range(min(3, number + 1 + in_advance)))
    with pytest.raises(UserError, match="damaged"):  # only now
        next(ahead)


def test_a_closed_iterator_forgets_the_batch_that_it_read():
    read = []
    ahead = Ahead(batches(read), torch.device("meta"))
    next(ahead)
    ahead.fetch()
    ahead.close()
    with pytest.raises(StopIteration):
        next(ahead)


ENDS = """
import os, signal
from weft.errors import UserError

class Ends:
    def __init__(self, *, how: str):
        self.how = how

    def step(self, state):
        if state.step != 2:
            return
        if self.how == "asked":
            state.request_stop("enough")
        elif self.how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.how == "error":
            raise UserError("no more")
"""


def test_no_worker_outlives_its_run(run_yaml, tmp_path, monkeypatch):
    """Whichever way the run ends, and although the program keeps its loop or its error."""
    (tmp_path / "ends_for_ahead.py").write_text(ENDS)
    monkeypatch.syspath_prepend(tmp_path)
    kept, begin = [], Loop.run
    monkeypatch.setattr(Loop, "run", lambda loop, *rest: kept.append(loop) or begin(loop, *rest))
    before = multiprocessing.active_children()
    for how, status in (("asked", "stopped-early"), ("signal", "stopped"), ("error", None), ("not", "finished")):
        file = run_yaml(
            training={"steps": 4, "batch_tokens": 64, "micro_batch_size": 1},
            schedule={"type": "constant", "warmup_steps": 0},
            data={"validation": None, "workers": 1},
            model={"num_hidden_layers": 1},
            callbacks=[{"type": "ends_for_ahead:Ends", "how": how}],
            log=QUIET,
        )
        trainer = weft.Trainer(weft.RunConfig.load(file), fresh=True)
        if status is None:
            with pytest.raises(UserError, match="no more") as error:
                trainer.fit()
            kept.append(error)
        else:
            assert trainer.fit().status == status
        assert multiprocessing.active_children() == before, how
    assert len(kept) == 5


@pytest.mark.gpu
def test_batches_for_a_gpu_are_in_page_locked_memory():
    assert next(Ahead(batches([]), torch.device("cuda"))).tokens.is_pinned()
