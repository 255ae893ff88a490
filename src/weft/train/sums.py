"""Defines `BatchSums`, the sums over a global batch, and the seeds of a batch's random numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSums:
    """Sums over a global batch.

    Attributes:
        weight: weight by which the loss is divided (`Objective.weight`).
        learned: weight of the tokens with loss.
        learned_tokens: number of tokens with loss.
        tokens: number of tokens, without padding sequences.
    """

    weight: float
    learned: float
    learned_tokens: int
    tokens: int


def sample_seed(seed: int, step: int, sample: int) -> int:
    """Returns the seed of a sample's random numbers in a step, which depends on the seed of the run.

    So dropout and noise do not depend on which rank has the sample, and need no saved state.
    """
    key = f"{seed} {step} {sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big", signed=True)
