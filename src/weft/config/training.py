"""`training:`, `validation:` and `samples:`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.config.section import Section, TextPattern

DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]
EveryOrBudget = Annotated[
    str,
    TextPattern(
        pattern=r"^(every-([2-9]|[1-9][0-9]+)|budget-0?\.[0-9]*[1-9][0-9]*)$",
        words="every-N (as every-2) or budget-F (as budget-0.5, more than 0 and less than 1)",
    ),
]


class TrainingSection(Section):
    """Length, batches and precision of the run. Exactly one of `steps`, `tokens` and `epochs` sets the length."""

    steps: int | None = Field(None, ge=1)
    """Number of optimizer updates."""
    tokens: int | None = Field(None, ge=1)
    """Number of training tokens, rounded up to complete steps."""
    epochs: float | None = Field(None, gt=0, le=1e9)
    """Passes over the training data, rounded up to complete steps."""
    batch_tokens: int | None = Field(None, ge=1)
    """Tokens of the global batch, over all ranks. Default: 32 sequences."""
    micro_batch_size: int | None = Field(None, ge=1)
    """Sequences per forward and rank. Default: as many as fit into 8,192 tokens, at least one."""
    dtype: DType = "auto"
    """Compute dtype. Parameters and optimizer state are float32 (with `float64`, float64). `auto`: bfloat16 on devices
    where it is faster, otherwise float32. `float16` uses loss scaling.
    """
    reduce_dtype: DType = "auto"
    """Dtype of gradients that are accumulated over micro-batches and reduced over ranks; smaller dtypes need less
    communication. `auto`: float32 (with `dtype: float64`, float64).
    """
    initial_loss_scale: float | None = Field(None, ge=1)
    """Initial loss scale for float16, which is halved when gradients overflow. Default: 65536."""
    loss_scale_window: int | None = Field(None, ge=1)
    """Number of steps without overflow after which the loss scale for float16 is doubled. Default: 2000."""
    fp8: bool = False
    """Whether the matrix products of the layers run in 8 bits. It needs torchao and an NVIDIA GPU of compute capability
    8.9 or higher.
    """
    compile: bool = False
    """Whether each block is compiled with `torch.compile`."""
    grad_clip: float | None = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down. `null`: no clipping."""
    activation_checkpointing: Literal["none", "full", "selective"] | EveryOrBudget = "none"
    """Which activations are recomputed in backward. `full`: all of each block; `every-N`: those of every N-th block;
    `selective`: all but the outputs of matrix products, attention and communication; `budget-F`: as many as leave about
    the fraction F in memory (docs/memory.md).
    """
    only_rows_from: int | None = Field(None, ge=1)
    """First row of the embedding and the output head that is trained; no other parameter is. It serves to train new
    tokens. Default: all parameters are trained.
    """
    threads: int | None = Field(None, ge=1)
    """CPU threads per rank. Default: the fastest number in a short measurement."""


class ValidationSection(Section):
    """When the loss on `data.validation` is measured."""

    every: int | None = Field(None, ge=1)
    """Steps between validations; there is one at the end too. Default: a tenth of the run."""
    tokens: int | None = Field(None, ge=1)
    """Number of tokens of each validation during training, from the start of the data. Default, and always at the end:
    all tokens.
    """
    micro_batch_size: int | None = Field(None, ge=1)
    """Sequences per forward and rank. Default: `training.micro_batch_size`."""


class SamplesSection(Section):
    """Text that the model generates during training."""

    prompts: list[str] = Field(default=[])
    """Prompts to continue. With an empty list there are no samples."""
    every: int | None = Field(None, ge=1)
    """Steps between samples; there are some at the end too. Default: `validation.every`."""
    max_new_tokens: int = Field(64, ge=1)
    """Number of tokens to generate for each prompt."""
    temperature: float = Field(0.8, ge=0)
    """Sampling temperature; 0 is greedy decoding."""
