"""Resizes the vocabulary of a saved model: rows of its embedding and head."""

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
    """Writes a checkpoint, as `weft import` does, of the same model with another vocabulary size.

    Args:
        source: a run, a checkpoint, an imported folder or a Hugging Face folder.
        vocab_size: number of rows; or
        tokenizer: a folder with the new tokenizer. It replaces the model's tokenizer, and each token gets a row.
        multiple: round the number of rows up to a multiple of this.
        init: how to initialize new rows. "mean": the mean of the old rows, so that a new token is neither likely nor
            unlikely (Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021). "zero": zeros.
            "normal": drawn as for a new model.
        shrink: allow fewer rows; the last ones are dropped.

    Returns:
        Rows before and after.

    Raises:
        UserError: not the built-in decoder; fewer rows without `shrink`, or than the tokenizer has tokens; or `out`
            cannot be written.
    """
    out, console = Path(out), console or Console(speaks=False)
    weights = open_weights(source, huggingface=False)
    section = architecture(weights.path)
    if not isinstance(section, ModelSection):
        raise UserError("only the built-in decoder can be resized: the rows of other models are not known", source)
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
        raise UserError(f"the tokenizer has {tokens:,} tokens, more than the {new:,} rows; give more rows", source)
    if new < old and not shrink:
        raise UserError(
            f"the model has {old:,} rows, and {new:,} would drop the last {old - new:,}; give --shrink to allow that "
            "(more rows than tokens do no harm)",
            source,
        )


def _entry(name: str, saved: SavedTensor, section: ModelSection, rows: int, init: str) -> Entry:
    if name not in RESIZED:
        return Entry(MODEL_PREFIX + name, saved.dtype, saved.shape, saved.blocks)
    read = partial(_resized, name, saved, section, rows, init)
    return Entry(MODEL_PREFIX + name, saved.dtype, (rows, *saved.shape[1:]), read)


def _resized(name: str, saved: SavedTensor, section: ModelSection, rows: int, init: str) -> Iterator[torch.Tensor]:
    """Yields the old rows, up to `rows`, and then the new ones."""
    width, left = saved.shape[1], rows
    total = torch.zeros(width, dtype=torch.float64)
    for block in saved.blocks():
        total += block.sum(dim=0, dtype=torch.float64)
        if left > 0:
            yield block[:left]
        left -= len(block)
    mean = (total / saved.shape[0]).to(saved.dtype)
    # Keyed by name and size: the same command writes the same bytes.
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
    """Returns `read_origin` with the new vocabulary size and the special ids that a new tokenizer defines."""
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
