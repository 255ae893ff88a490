"""`training:` how long, in which batches, in which precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.config.section import Section, Spelled

EveryOrBudget = Annotated[
    str,
    Spelled(
        pattern=r"^(every-([2-9]|[1-9][0-9]+)|budget-0?\.[0-9]*[1-9][0-9]*)$",
        words="every-N (as every-2) or budget-F (as budget-0.5, more than 0 and less than 1)",
    ),
]


class TrainingSection(Section):
    """Exactly one of `steps`, `tokens`, `epochs` says how long the run is."""

    steps: int | None = Field(None, ge=1, description="optimizer updates")
    tokens: int | None = Field(None, ge=1, description="tokens to train on, rounded up to whole steps")
    epochs: float | None = Field(
        None, gt=0, le=1e9, description="passes over the training store, rounded up to whole steps"
    )
    batch_tokens: int | None = Field(None, ge=1, description="tokens per step over all ranks; default: 32 sequences")
    micro_batch_size: int | None = Field(
        None, ge=1, description="sequences per forward and rank; default: up to 8,192 tokens"
    )
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of computing; state is float32 (float64 if that). auto: bfloat16 where the device is faster in "
        "it. With float16 the loss is scaled",
    )
    reduce_dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of gradients while they are summed over micro-batches and ranks: fewer bits are fewer bytes to "
        "send. auto: float32, float64 for float64",
    )
    initial_loss_scale: float | None = Field(
        None,
        ge=1,
        description="float16: what the loss is multiplied by at first; halved when gradients overflow. Default: 65536",
    )
    loss_scale_window: int | None = Field(
        None, ge=1, description="float16: steps without overflow before the scale is doubled. Default: 2000"
    )
    fp8: bool = Field(
        False,
        description="multiply by the layers' matrices in 8 bits (torchao; NVIDIA from compute capability 8.9 on)",
    )
    compile: bool = Field(False, description="compile each block with torch.compile")
    grad_clip: float | None = Field(1.0, gt=0, description="largest norm of the gradient; null: no clipping")
    activation_checkpointing: Literal["none", "full", "selective"] | EveryOrBudget = Field(
        "none",
        description="what backward computes again in place of keeping it. full: each block; every-N: every N-th block; "
        "selective: all but matrix products, attention and communication; budget-F: so much that about the share F is "
        "kept (docs/memory.md)",
    )
    only_rows_from: int | None = Field(
        None,
        ge=1,
        description="train only rows from this one on of embedding and head (new tokens); default: train everything",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads per rank; default: what was found fastest")


class ValidationSection(Section):
    """When to measure the loss on `data.validation`."""

    every: int | None = Field(
        None, ge=1, description="steps between; default: a tenth of the run, and always at the end"
    )
    tokens: int | None = Field(
        None, ge=1, description="while training, measure on the first so many tokens; default and at the end: all"
    )
    micro_batch_size: int | None = Field(None, ge=1, description="sequences per forward; default: training's")


class SamplesSection(Section):
    """Text written by the model while it trains."""

    prompts: list[str] = Field(default=[], description="what to continue; none: no samples")
    every: int | None = Field(None, ge=1, description="steps between; default: with validation, and always at the end")
    max_new_tokens: int = Field(64, ge=1, description="length of each")
    temperature: float = Field(0.8, ge=0, description="0: always the likeliest token")
