"""Writes the table of memory in docs/tuning/index.md from Weft's estimate of a training step (`make docs`)."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from weft.config.adapter import AdapterSection
from weft.config.mesh import ParallelSection
from weft.config.model import ModelSection
from weft.families import presets
from weft.parallel.model_state import ModelPlan
from weft.parallel.structure import estimated_memory

PAGE = Path(__file__).parent / "tuning" / "index.md"
BEGIN, END = "<!-- memory: written by `make docs` -->\n", "<!-- end of memory -->\n"
MODELS = {
    "Llama 3.2 1B": "llama3.2-1b",
    "Llama 2 7B": "llama2-7b",
    "Llama 3.1 8B": "llama3.1-8b",
    "Llama 3.1 70B": "llama3.1-70b",
}
METHODS = {"full fine-tuning": None, "LoRA": {}, "QLoRA": {"quantize": "nf4"}}  # name -> section `adapter`
DEVICES = {1: "one GPU", 8: "each of 8 GPUs"}


def row(model: str, ranks: int) -> str:
    """Returns the row of a model (a key of `MODELS`) on `ranks` GPUs."""
    plans = [
        ModelPlan(
            ModelSection.model_validate(presets()[MODELS[model]]),
            ParallelSection(),
            dtype=torch.bfloat16,
            sequence=2048,
            activation_checkpointing="full",
            adapter=None if adapter is None else AdapterSection.model_validate(adapter),
        )
        for adapter in METHODS.values()
    ]
    sizes = [estimated_memory(plan, ranks, micro_batch_size=1).total / 1e9 for plan in plans]
    return f"| {model} | {DEVICES[ranks]} | {' | '.join(f'{size:,.1f} GB' for size in sizes)} |\n"


def table() -> str:
    """Returns the table."""
    head = f"| model | on | {' | '.join(METHODS)} |\n| --- | --- |{' ---: |' * len(METHODS)}\n"
    return head + "".join(row(model, ranks) for model in MODELS for ranks in DEVICES)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")
