"""Changes the vocabulary size of a saved model: the number of rows of its embedding and its head."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.config_files import read_origin, special_ids, tokenizer_warnings
from weft.checkpoint.load import architecture, tokenizer_folder
from weft.checkpoint.shard_files import write_checkpoint
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.checkpoint.weights import SavedTensor, open_weights
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.headers import read_tokenizer_header
from weft.observe.console import Console

RESIZED = ("embed_tokens.weight", "lm_head.weight")


def resize(
    source: str | Path,
    out: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer: str | Path | None = None,
    multiple: int = 1,
    init: str = "mean",
    shrink: bool = False,
    console: Console | None = None,
) -> tuple[int, int]:
    """Writes a checkpoint of the same model with another vocabulary size. The checkpoint has no optimizer state.

    Args:
        source: a run, a checkpoint, an imported folder or a Hugging Face folder.
        vocab_size: new number of rows of the embedding and head. Default: the number of tokens of the tokenizer.
        tokenizer: a folder with a tokenizer that replaces the model's tokenizer.
        multiple: the number of rows is rounded up to a multiple of this number.
        init: how to initialize new rows. "mean": the mean of the old rows, so that a new token is neither likely nor
            unlikely (Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021). "zero": zeros.
            "normal": random values with the standard deviation of a new model.
        shrink: whether the number of rows can become smaller. The last rows are then dropped.

    Returns:
        The numbers of rows before and after.

    Raises:
        UserError: the model is not the built-in decoder, has more rows than requested and `shrink` is false, or the
            tokenizer has more tokens than rows were requested; or `out` cannot be written.
    """
    out, console = Path(out), console or Console(prints=False)
    weights = open_weights(source, huggingface=False)
    section = architecture(weights.path)
    if not isinstance(section, ModelSection):
        raise UserError(
            "only the built-in decoder can be resized; use a run or an imported model of the built-in decoder", source
        )
    old = weights.tensors[RESIZED[0]].shape[0]
    new_tokenizer = Path(tokenizer) if tokenizer is not None else None
    folder = new_tokenizer or tokenizer_folder(weights.path)
    tokens = read_tokenizer_header(folder).vocab_size if folder is not None else 0
    new = -(-(tokens if vocab_size is None else vocab_size) // multiple) * multiple
    _check_rows(source, old, new, tokens, shrink)
    padding = None if (section.pad_token_id or 0) >= new else section.pad_token_id
    section = section.model_copy(
        update={"vocab_size": new, "from_": None, "load_optimizer": False, "pad_token_id": padding}
    )
    contents: dict[str, Any] = {files.MODEL: section.model_dump(mode="json", by_alias=True)}
    origin = _resized_origin(weights.path, section, new_tokenizer)
    if origin:
        contents[files.ORIGIN] = origin
    warnings = [f"{source}: {warning}" for warning in weights.warnings]
    warnings += [
        f"{folder or source}: {warning}" for warning in tokenizer_warnings(folder, section, origin.get("config", {}))
    ]
    entries = [_entry(name, saved, section, new, init) for name, saved in weights.tensors.items()]
    write_checkpoint(out, entries, contents, folder, warnings, "resizing", console)
    return old, new


def _check_rows(source: str | Path, old: int, new: int, tokens: int, shrink: bool) -> None:
    if new < tokens:
        raise UserError(
            f"the tokenizer has {tokens:,} tokens, more than the {new:,} rows requested; request more rows", source
        )
    if new < old and not shrink:
        raise UserError(
            f"the model has {old:,} rows, and a resize to {new:,} drops the last {old - new:,}; use --shrink to allow "
            "this, or keep the rows (a model can have more rows than tokens)",
            source,
        )


def _entry(name: str, saved: SavedTensor, section: ModelSection, rows: int, init: str) -> Entry:
    if name not in RESIZED:
        return Entry(MODEL_PREFIX + name, saved.dtype, saved.shape, saved.blocks)
    read = partial(_resized, name, saved, section, rows, init)
    return Entry(MODEL_PREFIX + name, saved.dtype, (rows, *saved.shape[1:]), read)


def _resized(name: str, saved: SavedTensor, section: ModelSection, rows: int, init: str) -> Iterator[torch.Tensor]:
    """Yields the saved tensor, resized to `rows` rows, in blocks: first the old rows, then initialized new rows."""
    width, left = saved.shape[1], rows
    total = torch.zeros(width, dtype=torch.float64)
    for block in saved.blocks():
        total += block.sum(dim=0, dtype=torch.float64)
        if left > 0:
            yield block[:left]
        left -= len(block)
    mean = (total / saved.shape[0]).to(saved.dtype)
    # The seed depends only on the name and the size, so the same command writes the same bytes.
    key = hashlib.sha256(f"resize {name} {saved.shape[0]}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    while left > 0:
        count = min(left, saved.rows)
        if init == "mean":
            yield mean.expand(count, width)
        elif init == "zero":
            yield torch.zeros(count, width, dtype=saved.dtype)
        else:
            yield torch.empty(count, width).normal_(0.0, section.initializer_range, generator=generator).to(saved.dtype)
        left -= count


def _resized_origin(path: Path, section: ModelSection, tokenizer: Path | None) -> dict[str, Any]:
    """Returns the model's original config files (`read_origin`), with the new vocabulary size and special token ids."""
    origin = read_origin(path)
    if not origin:
        return {}
    config, generation = dict(origin["config"]), origin.get("generation_config")
    config["vocab_size"] = section.vocab_size
    found = special_ids(tokenizer, section) if tokenizer is not None else {}
    for content in (config, generation):
        for key, id in found.items():
            before = content.get(key) if content is not None else None
            if content is not None and id is not None and not (isinstance(before, list) and id in before):
                content[key] = id
    return {"config": config, "generation_config": generation}
