"""Which tokens context ranks have: all of them once, and work in equal parts."""

import pytest
import torch

from weft.config.model import ModelSection
from weft.kernels.document_attention import run_starts
from weft.parallel.axes.context import SequenceShard

CONFIG = ModelSection(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=8)


class Group:
    """A process group as far as places are concerned."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def shares(way: str, ranks: int, seq: int, apart: bool) -> list[torch.Tensor]:
    shard = SequenceShard(CONFIG, Group(ranks), way)
    return [shard.positions(seq, apart, torch.device("cpu"), rank) for rank in range(ranks)]


@pytest.mark.parametrize("way", ["all_to_all", "all_gather", "ring"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_token_is_on_one_rank(way, apart, ranks):
    found = shares(way, ranks, 64, apart)
    assert {len(places) for places in found} == {64 // ranks}
    assert sorted(torch.cat(found).tolist()) == list(range(64))


@pytest.mark.parametrize("way", ["all_gather", "ring"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_under_a_causal_mask_all_ranks_see_as_many_keys(way, ranks):
    seen = [int((places + 1).sum()) for places in shares(way, ranks, 256, apart=False)]
    assert set(seen) == {256 * 257 // 2 // ranks}
    assert max((places + 1).sum() for places in shares("all_to_all", ranks, 256, apart=False)) > seen[0]


def test_of_documents_all_ranks_see_about_as_many_keys():
    """Each rank within one key a token of a document's share; pieces from front and end would be far off."""
    generator = torch.Generator().manual_seed(0)
    seq, ranks = 4096, 8
    lengths = torch.randint(3, 700, (40,), generator=generator)
    ends = lengths.cumsum(0)
    segments = torch.searchsorted(ends, torch.arange(seq), right=True).unsqueeze(0)
    keys = torch.arange(seq) - run_starts(segments)[0] + 1  # that each token sees
    seen = torch.stack([keys[places].sum() for places in shares("all_gather", ranks, seq, apart=True)])
    assert (seen.max() - seen.min()) / seen.double().mean() < 0.03
    pieces = torch.stack([keys[places].sum() for places in shares("all_gather", ranks, seq, apart=False)])
    assert (pieces.max() - pieces.min()) / pieces.double().mean() > 0.1
