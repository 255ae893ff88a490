"""What is found before any work: what this device, this PyTorch or this model cannot do."""

from __future__ import annotations

from torch import nn

from weft.config.model import ModelSection
from weft.config.transformers_model import TransformersModelSection, notices
from weft.errors import UserError
from weft.kernels.flash import flash_usable
from weft.kernels.masks import flex_usable
from weft.models.trial import try_components
from weft.train.auto_settings import DTYPES
from weft.train.job import Job


def examine_decoder(job: Job) -> None:
    """Say what the chosen attention cannot do on this device; try the parts that are the user's own, each alone.

    Raises:
        UserError: flash-attn cannot be called here, or a part gives what the decoder cannot use.
    """
    config, world, model = job.config, job.world, job.config.model
    if not isinstance(model, ModelSection):
        return
    device, dtype = world.device, DTYPES[config.training.dtype]
    if model.attention_implementation == "flash":
        world.agree(lambda: flash_usable(device, dtype))
    if model.attention_implementation == "flex" and not flex_usable(device, dtype, model.qk_head_dim):
        job.console.warning(
            "model.attention_implementation: flex attention is for GPUs, with 16 or 32 bits and heads of 16 or more; "
            "here the same masks are applied whole"
        )
    documents, seq = config.data.document_attention, config.data.sequence_length or 16
    world.agree(
        lambda: try_components(model, seed=config.run.seed, seq=seq, documents=documents, dtype=dtype, device=device)
    )


def examine_transformers_model(job: Job, model: nn.Module) -> None:
    """Say once what a model of transformers does without here, and try whether it can be trained on these batches.

    Raises:
        UserError: it looks ahead, or documents are to be kept apart and it cannot.
    """
    config = job.config
    if not isinstance(config.model, TransformersModelSection):
        return
    from weft.models.transformers_model import missing_capability

    name = type(model).__name__.removeprefix("FSDP")
    for line in notices(config.model, name):
        job.console.line(line)
    lacks = missing_capability(model, documents=config.data.document_attention or config.data.packing == "best_fit")

    def tell() -> None:
        if lacks is not None:
            raise UserError(f"model: {name}: {lacks}")

    job.world.agree(tell)
