"""The sections `training`, `validation` and `samples` of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.config.section import Section, TextPattern

DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]
EveryOrBudget = Annotated[
    str,
    TextPattern(
        pattern=r"^(every-([2-9]|[1-9][0-9]+)|budget-0?\.[0-9]*[1-9][0-9]*)$",
        words="every-N (such as every-2) or budget-F (such as budget-0.5, more than 0 and less than 1)",
    ),
]


class QatSection(Section):
    """Quantization-aware training (QAT; Jacob et al., 2018): products use weights that are rounded to 4 bits, and the
    optimizer updates the weights before rounding. It rounds linear layers, stacked experts and the output head, except
    routers. It needs torchao.
    """

    type: Literal["int4", "int8_int4"] = "int4"
    """What is rounded. `int4`: weights, exactly as `--quantize int4` of `weft generate` and `weft evaluate` rounds
    them, with a scale for 32 columns of a row. `int8_int4`: weights to 4 bits and activations to 8 bits per token, as
    torchao's quantization to int8 dynamic activations and int4 weights.
    """
    group_size: int = Field(32, ge=2)
    """Number of columns of a row with a common scale; other values than 32 are for `int8_int4` only."""


class TrainingSection(Section):
    """Length, batches and precision of the run. Exactly one of `steps`, `tokens` and `epochs` sets the length."""

    steps: int | None = Field(None, ge=1)
    """Number of optimizer updates."""
    tokens: int | None = Field(None, ge=1)
    """Number of training tokens, rounded up to complete steps."""
    epochs: float | None = Field(None, gt=0, le=1e9)
    """Number of passes over the training data, rounded up to complete steps."""
    batch_tokens: int | None = Field(None, ge=1)
    """Number of tokens in the global batch of all ranks. Default: the tokens of 32 sequences."""
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Number of sequences per forward pass and rank. `auto`: the fastest size that fits in memory, which is tried with
    real steps at the start of the run (docs/planning.md); the global batch stays, and a resumed run reuses the size.
    Default: as many as fit into 8,192 tokens, at least one. With pipeline parallelism, the default is smaller if a step
    would otherwise have fewer micro-batches than pipeline stages, or a number of micro-batches that the schedule does
    not support.
    """
    dtype: DType = "auto"
    """Compute dtype. Parameters and optimizer state are float32 (with `float64`, float64). `auto`: bfloat16 on devices
    where it is faster, otherwise float32. `float16` uses loss scaling.
    """
    reduce_dtype: DType = "auto"
    """Dtype in which gradients are accumulated over micro-batches and reduced over ranks; a smaller dtype needs less
    communication. `auto`: float32 (with `dtype: float64`, float64).
    """
    initial_loss_scale: float | None = Field(None, ge=1)
    """Initial loss scale for float16, which is halved when gradients overflow. Default: 65536."""
    loss_scale_window: int | None = Field(None, ge=1)
    """Number of steps without overflow after which the loss scale for float16 is doubled. Default: 2000."""
    fp8: bool | Literal["rowwise"] = False
    """Whether the matrix products of the layers are computed in 8 bits. It needs torchao and an NVIDIA GPU of compute
    capability 8.9 or higher. `true`: with a scale for each tensor. `rowwise`: with a scale for each row, which loses
    less to outliers; and FSDP2 gathers the weights of these layers in 8 bits (docs/precision.md).
    """
    qat: QatSection | None = Field(None)
    """Quantization-aware training. Default: no rounding."""
    compile: bool | Literal["reduce-overhead"] = False
    """Whether each block is compiled with `torch.compile`. `reduce-overhead`: also records the kernels of a block as a
    CUDA graph, which the GPU starts without the host. This helps small models, whose kernels take less time than their
    launches. It needs a model on one GPU (or `dp_replicate`) and a 16-bit dtype; on CPUs it is the same as `true`.
    """
    grad_clip: float | None = Field(1.0, gt=0)
    """Maximum gradient norm; larger gradients are scaled down. `null`: no clipping."""
    activation_checkpointing: Literal["none", "full", "selective"] | EveryOrBudget = "none"
    """Which activations are recomputed in backward. `none`: no activations; `full`: all activations of each block;
    `every-N`: all activations of every N-th block; `selective`: all but the outputs of matrix products, attention and
    communication (with `tp`, the inputs of layers are gathered again); `budget-F`: keeps at most about the fraction F
    of the bytes of all activations, and recomputes the rest at the lowest cost (docs/memory.md).
    """
    only_rows_from: int | None = Field(None, ge=1)
    """Index of the first trained row of the embedding and of the output head, counted from 0. This row and all later
    rows are trained; all other parameters are frozen. Use it to train newly added tokens. Default: all parameters are
    trained.
    """
    freeze: list[str] = Field(default=[])
    """Parameters that are not trained, as patterns of their full names, such as `embed_tokens` or `layers.[0-5].*`.
    Patterns have the syntax of Python's `fnmatch`; the full name of a module stands for all its parameters. Unlike a
    name in `adapter.targets`, a pattern must match a name from its beginning: `*.q_proj`, not `q_proj`. A pattern that
    matches no parameter is an error. `weft profile --structure` shows the names.
    """
    sync_every: int = Field(1, ge=1, le=1000)
    """When the host waits for the loss and the gradient norm, which is the only wait of a step for a GPU. `1`: in each
    step, before the update, so that `watch` can skip it. With an integer N above 1, every N-th step waits for the steps
    before it, and steps that need their numbers (metrics, validation, checkpoint) wait for themselves. `watch` then
    finds a bad step up to N steps after its update: `skip` and float16 are refused, `stop` ends without a new
    checkpoint, and callbacks see the loss that was last read (docs/performance.md).
    """
    threads: int | None = Field(None, ge=1, le=1024)
    """Number of CPU threads per rank. Default: `OMP_NUM_THREADS`, or the usable cores divided by the local ranks."""
    determinism: Literal["exact", "order"] | None = None
    """What is equal when a run is repeated (docs/reproducibility.md). `exact`: the losses, bit for bit, on one mesh and
    hardware; Weft then uses deterministic kernels only, and an operation without one is an error. `order`: samples,
    their order and all random numbers, on any mesh; losses can differ by rounding. Default: `exact` on CPUs, `order` on
    GPUs.
    """
    hang_timeout: float | None = Field(None, gt=0)
    """Number of seconds without progress of a rank after which `weft train` writes the Python stacks of all ranks to
    `logs/stacks-N.txt` and kills them. With `--max-restarts`, they are then started again, and the default is 10 times
    the longest recent step, at least 60; without it, ranks that hang are not killed by default. Each micro-batch is
    progress. The first two steps of an attempt may take 30 minutes, and a save, a validation or the end of the run 10,
    whatever the value is. Under torchrun and in programs of your own, each rank watches itself in the same way, and a
    rank that hangs exits with code 3. torchrun's `--max-restarts` then starts all ranks again.
    """

    @property
    def micro_batch(self) -> int | None:
        """`micro_batch_size` if it is a number; None by default, and for `auto` before a size is chosen."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None


class ValidationSection(Section):
    """Settings of the validation, which measures the loss on `data.validation`.

    With an objective that generates its training data, the validation measures the rewards of completions of held-out
    prompts instead.
    """

    every: int | None = Field(None, ge=1)
    """Number of steps between validations. A validation also follows the last step. Default: a tenth of the run's
    steps.
    """
    tokens: int | None = Field(None, ge=1)
    """Number of tokens of each validation during training; the validation at the end of the run always uses all tokens.
    These are the first tokens of the validation data. Default: all tokens.
    """
    micro_batch_size: int | None = Field(None, ge=1)
    """Number of sequences per forward pass and rank. Default: `training.micro_batch_size`."""
    prompts: int | None = Field(None, ge=1)
    """Number of held-out prompts of each validation during training, of each set; the validation at the end of the run
    uses all. These are the first prompts. Only with an objective that generates its training data. Default: all.
    """
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature of the completion of each held-out prompt; 0: the most likely tokens. Only with an objective
    that generates its training data. Default: 0.
    """


class SamplesSection(Section):
    """Text that the model generates during training."""

    prompts: list[str] = Field(default=[])
    """Prompts that the model continues. With an empty list, no text is generated."""
    every: int | None = Field(None, ge=1)
    """Number of steps between two generations of text. Text is also generated after the last step. Default:
    `validation.every`.
    """
    max_new_tokens: int = Field(64, ge=1)
    """Number of tokens to generate for each prompt."""
    temperature: float = Field(0.8, ge=0)
    """Sampling temperature; 0 is greedy decoding."""
