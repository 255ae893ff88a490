"""A Llama with sequences of 8,192 tokens and a large vocabulary: what ranks do, and the plans that are found."""

import copy
import weakref

import torch
from parallelize_counts import slow_device
from torch.distributed.tensor import DTensor
from zoo_to_parallelize import ChunkedLlama

from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.search import search_plan
from weft.torch_private import TorchDispatchMode, tree_leaves

LENGTH, VOCAB, HIDDEN, CHUNK = 8192, 4096, 32, 256
TABLES = ("dp", "tp", "parameters", "inputs", "outputs", "recompute", "structure")


def make():
    """A model with the same values on all ranks."""
    torch.manual_seed(0)
    return ChunkedLlama(hidden=HIDDEN, vocab=VOCAB, layers=2, chunk=CHUNK)


def inputs_of(rows):
    """Tokens, and the tokens that follow them."""
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCAB, (rows, LENGTH))
    return tokens, tokens.roll(-1, 1)


def found_plan(devices, rows):
    """The tables of the plan that the search finds."""
    torch.set_default_dtype(torch.float64)
    try:
        plan, _, _ = search_plan(make(), inputs_of(rows), devices=devices, hardware=slow_device("float64"))
    finally:
        torch.set_default_dtype(torch.float32)
    return {name: getattr(plan, name) for name in TABLES}


class Logits(TorchDispatchMode):
    """Counts the bytes of tensors with a value for each word of the vocabulary, or of this rank's part of it."""

    def __init__(self, tp):
        super().__init__()
        self.sizes = weakref.WeakKeyDictionary()
        self.tp, self.now, self.peak = tp, 0, 0

    def _free(self, size):
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors come here
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if not isinstance(one, torch.Tensor) or one.dim() < 2 or one.numel() <= HIDDEN * VOCAB:
                continue
            storage = one.untyped_storage()
            if one.shape[-1] in (VOCAB, VOCAB // self.tp) and storage not in self.sizes:
                self.sizes[storage] = storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return out


def equal_to_one_process(rows: int, plans: list[dict]) -> list[tuple[float, float]]:
    """For each plan: the largest difference of loss and gradients, and the most chunks of logits that a rank had.

    A chunk is that of a data rank's rows, with the full vocabulary: logits, their gradient and the like count as one.
    """
    torch.set_default_dtype(torch.float64)
    tokens, labels = inputs_of(rows)
    reference = make()
    expected = reference(tokens, labels)
    expected.backward()
    largest = max(one.grad.abs().max().item() for one in reference.parameters())
    found = []
    for tables in plans:
        plan = Plan(**tables)
        module = plan.apply(copy.deepcopy(reference))
        module.zero_grad()
        with Logits(plan.tp) as logits:
            loss = module(tokens, labels)
            loss.backward()
        worst = [abs(loss.item() - expected.item()) / expected.item()]
        for one, other in zip(reference.parameters(), module.parameters(), strict=True):
            worst.append((one.grad - other.grad.full_tensor()).abs().max().item() / largest)
        assert logits.peak
        found.append((max(worst), logits.peak / (rows // plan.dp * CHUNK * VOCAB * 8)))
    return found
