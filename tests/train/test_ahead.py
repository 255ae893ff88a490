"""Batches that are read while the device computes."""

import pytest
import torch

from weft.data.batches.batch import Batch
from weft.errors import UserError
from weft.train.ahead import Ahead


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


@pytest.mark.gpu
def test_batches_for_a_gpu_are_in_page_locked_memory():
    assert next(Ahead(batches([]), torch.device("cuda"))).tokens.is_pinned()
