"""A vocabulary whose rows are sharded over `tp`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.parallel import collectives


@dataclass(frozen=True)
class ShardedVocabulary:
    """A vocabulary whose rows are sharded over the ranks of `tp`, for functions of the output head.

    It has the interface of `weft.kernels.cross_entropy.Vocabulary`.

    Attributes:
        first: first token id of this rank's shard.
        size: number of token ids.
        group: process group of `tp`.
    """

    first: int
    size: int
    group: dist.ProcessGroup

    def join(self, chosen: torch.Tensor, normalizers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each label's logit, and the log-sum-exp over the full vocabulary, on all ranks, by one all-gather.

        Args:
            chosen: the label's logit if the label is in this rank's shard, else 0.
            normalizers: log-sum-exp of each token's logits over this rank's shard.
        """
        both = torch.stack((chosen, normalizers)).unsqueeze(0)
        gathered = collectives.all_gather(both, 0, self.group, replicated=True)
        return gathered[:, 0].sum(0), gathered[:, 1].logsumexp(0)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """All-gathers logits `[tokens, rows of this rank]` along the vocabulary."""
        return collectives.all_gather(logits, 1, self.group, replicated=True)
