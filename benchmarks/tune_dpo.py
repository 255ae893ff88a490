"""Direct preference optimization: useful tokens/s and peak memory of Weft and TRL's `DPOTrainer` (goal: 1.3 times).

    .venv/bin/python benchmarks/tune_dpo.py --trl-python ENV/bin/python [--size 14m] [--rounds 3] [--quick]

Each measurement is a process of its own: one epoch over the same pairs with the same Hugging Face model, chat template,
optimizer and number of pairs per step, with and without LoRA. The reference is the model at the start: a frozen copy,
or the base model under the adapter. Useful tokens are those of both answers with their prompts, without padding.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from tuning import ANSWER, PROMPT, Texts, arguments, compare, rates_table

PAIRS = 6  # per step


def main() -> None:
    args = arguments("Speed and memory of DPO, beside TRL.", size="14m", records=96, quick=48)
    texts = Texts(most=110)  # so that two answers with their prompts fit into 1,024 tokens

    def record() -> dict:
        prompt, chosen, rejected = texts.draw(PROMPT, ANSWER, ANSWER)
        roles = {"prompt": ("user", prompt), "chosen": ("assistant", chosen), "rejected": ("assistant", rejected)}
        return {key: [{"role": role, "content": text}] for key, (role, text) in roles.items()}

    what = f"{args.records} pairs of short answers, {PAIRS} pairs a step"
    asked = {"method": "dpo", "batch": PAIRS}
    title = "Direct preference optimization"
    compare(args, "tune_dpo", asked, record, lambda found: rates_table(args, title, what, found))


if __name__ == "__main__":
    main()
