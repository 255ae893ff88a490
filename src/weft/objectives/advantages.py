"""Advantages of sampled answers, from the rewards of all answers to the same prompt."""

from __future__ import annotations

from typing import Literal

import torch

# Rewards of a group that differ by at most this, relative to the largest magnitude in the group, are equal.
EQUAL = 1e-12  # rounding of float64
EQUAL_STD = 2.0**-22  # 2.4e-7, rounding of float32: divided by its own standard deviation, it would become about 1


def group_advantages(
    rewards: torch.Tensor,
    *,
    normalize: Literal["group_std", "none", "batch"] = "group_std",
    leave_one_out: bool = False,
) -> torch.Tensor:
    """Returns the advantage of each answer, float64 `[prompts, group]`: its reward minus a baseline of its group.

    The advantages of a group of equal rewards are exactly 0. Rewards are equal if they differ by at most 1e-12 of the
    largest magnitude in the group; with `group_std`, which would amplify rounding of float32, by at most 2.4e-7.

    With `normalize="none"`, the baseline is the group's mean as in Dr. GRPO (Liu et al., 2025), or the mean of the
    group's other answers as in RLOO (Ahmadian et al., 2024).

    Args:
        rewards: rewards of the answers to each prompt, `[prompts, group]`.
        normalize: divisor of the advantages. `group_std`: the standard deviation of the group's rewards (GRPO; Shao et
            al., 2024). `batch`: the standard deviation of all rewards. `none`: 1. Standard deviations are those of a
            sample, with the divisor n - 1.
        leave_one_out: whether the baseline is the mean of the other answers of the group, instead of all its answers.

    Raises:
        ValueError: a group has fewer than 2 answers, or a reward is not finite.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards must have the shape [prompts, group] with 2 or more per group, not {[*rewards.shape]}"
        )
    rewards, group = rewards.to(torch.float64), rewards.shape[1]
    if not rewards.isfinite().all():
        raise ValueError(f"rewards of prompt {int((~rewards.isfinite()).nonzero()[0, 0])} are not all finite")
    advantages = rewards - rewards.mean(1, keepdim=True)
    if leave_one_out:
        advantages = advantages * (group / (group - 1))
    if normalize == "group_std":
        advantages = advantages / rewards.std(1, keepdim=True)
    elif normalize == "batch":
        advantages = advantages / rewards.std()
    spread = rewards.amax(1, keepdim=True) - rewards.amin(1, keepdim=True)
    equal = EQUAL_STD if normalize == "group_std" else EQUAL
    return advantages.masked_fill(spread <= equal * rewards.abs().amax(1, keepdim=True), 0.0)
