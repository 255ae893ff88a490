"""Reinforcement learning (GRPO): sampled tokens/s, seconds per update and peak memory of Weft and TRL's `GRPOTrainer`.

    .venv/bin/python benchmarks/tune_grpo.py --trl-python ENV/bin/python [--size 14m] [--rounds 3] [--quick]

Each measurement is a process of its own, with the same Hugging Face model, prompts, number of answers, length of
answers, temperature and optimizer, one update per rollout, with and without LoRA. TRL samples with transformers'
`generate`, its only engine on a CPU. The time of a rollout lasts from the last update to the rewards, and includes for
Weft the copy of the weights and the rewards. The model has random weights: nearly all answers have the largest length,
so that TRL does not wait for the longest answer of a batch. The goal is 3 times TRL's sampled tokens/s.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from tuning import PROMPT, Texts, arguments, compare, heading, median

PROMPTS, GROUP, NEW_TOKENS = 4, 8, 64


def table(args, found: dict) -> str:
    what = f"rollouts of {PROMPTS} prompts with {GROUP} answers of up to {NEW_TOKENS} tokens, an update each"
    lines = [
        *heading(args, "Reinforcement learning (GRPO)", what, found),
        "| case | system | sampled tokens/s in rollouts | of TRL's | seconds per update with its rollout | of TRL's "
        "| peak memory, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, peers in found.items():
        rates = {
            peer: median(each, lambda one: one["sampled"] / one["rollout_seconds"]) for peer, each in peers.items()
        }
        times = {peer: median(each, lambda one: one["seconds"] / one["updates"]) for peer, each in peers.items()}
        for peer, each in peers.items():
            memory = median(each, lambda one: one["peak_bytes"] / 2**20)
            lines.append(
                f"| {case} | {peer} | {rates[peer]:,.0f} | {rates[peer] / rates['TRL']:.2f} | {times[peer]:.2f} | "
                f"{times[peer] / times['TRL']:.2f} | {memory:,.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    args = arguments("Speed and memory of GRPO, beside TRL.", size="14m", records=24, quick=20)
    texts = Texts(most=60)
    asked = {"method": "grpo", "prompts": PROMPTS, "group": GROUP, "new_tokens": NEW_TOKENS}
    compare(args, "tune_grpo", asked, lambda: {"prompt": texts.draw(PROMPT)[0]}, lambda found: table(args, found))


if __name__ == "__main__":
    main()
