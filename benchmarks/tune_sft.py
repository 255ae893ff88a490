"""Supervised fine-tuning on short records: useful tokens/s and peak memory of Weft and TRL's `SFTTrainer`.

    .venv/bin/python benchmarks/tune_sft.py --trl-python ENV/bin/python [--size 60m] [--rounds 3] [--quick]

Each measurement is a process of its own: one epoch over the same conversations with the same Hugging Face model, chat
template, optimizer and number of records per step, with and without LoRA. Useful tokens are those of the records,
without padding. The first steps are not timed. The peers take turns, and the table has the median of the rounds.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from tuning import ANSWER, PROMPT, Texts, arguments, compare, rates_table


def main() -> None:
    args = arguments("Speed and memory of supervised fine-tuning, beside TRL.", size="60m", records=480, quick=96)
    texts = Texts()

    def record() -> dict:
        roles = zip(("user", "assistant"), texts.draw(PROMPT, ANSWER), strict=True)
        return {"messages": [{"role": role, "content": text} for role, text in roles]}

    what = f"{args.records} short conversations, 16 records a step"
    asked = {"method": "sft", "batch": 16}
    compare(args, "tune_sft", asked, record, lambda found: rates_table(args, "Supervised fine-tuning", what, found))


if __name__ == "__main__":
    main()
