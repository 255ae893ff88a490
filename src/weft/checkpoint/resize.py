"""A saved model with more, or fewer, rows in its embedding and its head."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.huggingface.config_files import origin_of, special_ids, tokenizer_doubts
from weft.checkpoint.load import tokenizer_folder
from weft.checkpoint.load_model import architecture
from weft.checkpoint.new_checkpoint import write_checkpoint
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.checkpoint.weights import Saved, open_weights
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
    """Make a checkpoint as `weft import` does, of the same model with another number of tokens.

    Args:
        source: a run, a checkpoint, an imported folder or a Hugging Face folder.
        vocab_size: rows to have; or
        tokenizer: a folder, whose tokens all get a row; it is put beside the model in place of the model's own.
        multiple: rows are rounded up to a multiple of this.
        init: of new rows: "mean", all the mean of the old ones, so that a new token is neither likely nor unlikely
            (Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021); "zero"; or "normal",
            drawn as a new model's are.
        shrink: leave out rows at the end.

    Returns:
        Rows before and after.

    Raises:
        UserError: not the built-in decoder; fewer rows without `shrink`, or than the tokenizer has tokens; or `out`
            cannot be made.
    """
    out, console = Path(out), console or Console(speaks=False)
    weights = open_weights(source, huggingface=False)
    section = architecture(weights.path)
    if not isinstance(section, ModelSection):
        raise UserError(
            "only the built-in decoder can be resized: of other models it is not known what rows are", source
        )
    old = weights.tensors[RESIZED[0]].shape[0]
    beside = Path(tokenizer) if tokenizer is not None else tokenizer_folder(weights.path)
    tokens = read_tokenizer_header(beside).vocab_size if beside is not None else 0
    new = -(-(tokens if vocab_size is None else vocab_size) // multiple) * multiple
    _check(source, old, new, tokens, shrink)
    padding = None if (section.pad_token_id or 0) >= new else section.pad_token_id
    kept = {"from_": None, "load_optimizer": False, "pad_token_id": padding}
    section = section.model_copy(update={"vocab_size": new, **kept})
    origin = _origin(weights.path, section, Path(tokenizer) if tokenizer is not None else None)
    doubts = [f"{source}: {note}" for note in weights.notes]
    doubts += [
        f"{beside or source}: {doubt}"
        for doubt in tokenizer_doubts(beside, section, origin["config"] if origin else {})
    ]
    entries = [_entry(name, one, section, new, init) for name, one in weights.tensors.items()]
    documents: dict[str, Any] = {files.MODEL: section.model_dump(mode="json", by_alias=True)}
    if origin is not None:
        documents[files.ORIGIN] = origin
    write_checkpoint(out, entries, documents, beside, doubts, "resizing", console)
    return old, new


def _check(source: str | Path, old: int, new: int, tokens: int, shrink: bool) -> None:
    if new < tokens:
        raise UserError(
            f"the tokenizer has {tokens:,} tokens and {new:,} rows were asked for; ask for more",
            source,
        )
    if new < old and not shrink:
        raise UserError(
            f"the model has {old:,} rows, and {new:,} would leave out the last {old - new:,}; --shrink does that "
            "(more rows than tokens do no harm)",
            source,
        )


def _entry(name: str, saved: Saved, section: ModelSection, rows: int, init: str) -> Entry:
    if name not in RESIZED:
        return Entry(MODEL_PREFIX + name, saved.dtype, saved.shape, partial(saved.blocks, saved.rows))
    read = partial(_resized, name, saved, section, rows, init)
    return Entry(MODEL_PREFIX + name, saved.dtype, (rows, *saved.shape[1:]), read)


def _resized(name: str, saved: Saved, section: ModelSection, rows: int, init: str) -> Iterator[torch.Tensor]:
    """The old rows as they are, up to `rows`, and then the new ones."""
    width, left = saved.shape[1], rows
    total = torch.zeros(width, dtype=torch.float64)
    for block in saved.blocks(saved.rows):
        total += block.sum(dim=0, dtype=torch.float64)
        if left > 0:
            yield block[:left]
        left -= len(block)
    mean = (total / saved.shape[0]).to(saved.dtype)
    # Keyed by name and size: the same surgery gives the same bytes.
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


def _origin(path: Path, section: ModelSection, tokenizer: Path | None) -> dict[str, Any] | None:
    """What is kept of Hugging Face's files for the way back; special ids are the new tokenizer's where it has them."""
    origin = origin_of(path)
    if not origin:
        return None
    config, generation = dict(origin["config"]), origin.get("generation_config")
    config["vocab_size"] = section.vocab_size
    found = special_ids(tokenizer, section) if tokenizer is not None else {}
    for content in (config, generation):
        for key, id in found.items():
            before = content.get(key) if content is not None else None
            if content is not None and id is not None and not (isinstance(before, list) and id in before):
                content[key] = id
    return {"config": config, "generation_config": generation}
