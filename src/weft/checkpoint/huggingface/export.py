"""A checkpoint -> a folder that AutoModelForCausalLM and AutoTokenizer load, streamed tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from weft.checkpoint import files
from weft.checkpoint.huggingface.folder import groups
from weft.checkpoint.huggingface.foreign import foreign_documents, foreign_entries
from weft.checkpoint.huggingface.import_ import Made
from weft.checkpoint.huggingface.making import in_threads, new_folder, tokenizer_doubts
from weft.checkpoint.load import read_json, resolve, tokenizer_folder
from weft.checkpoint.model import architecture
from weft.checkpoint.tensor_file import Entry, cut, dtype_name, write_safetensors
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.config.errors import UserError
from weft.config.foreign import ForeignModelSection
from weft.config.headers import copy_tokenizer, read_tokenizer
from weft.config.huggingface import CONFIG, INDEX, SINGLE, is_huggingface
from weft.config.model import ModelSection
from weft.models.huggingface import Transform, config_of, invert, saved_as
from weft.models.mapping import spelled_as
from weft.observe.console import Console

SHARD_BYTES = 5_000_000_000
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def export(
    source: str | Path,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    console: Console | None = None,
) -> Made:
    """Write the model of a run's newest checkpoint, of one checkpoint or of an imported folder, for transformers.

    Sharded checkpoints are put together one tensor at a time. `out` appears whole, by one rename, or not at all.

    Args:
        dtype: of the weights; default: each as it was saved.
        shard_bytes: the most that one file holds (a tensor is never divided).

    Raises:
        UserError: no checkpoint, a damaged one, or a model that no family of Hugging Face's can be.
    """
    out, console = Path(out), console or Console(speaks=False)
    checkpoint = resolve(source)
    if is_huggingface(checkpoint):
        raise UserError(
            "this is a Hugging Face folder already, which transformers takes as it is; to change its dtype or the kind "
            "of its files, `weft import` it first",
            source,
        )
    section = architecture(checkpoint)
    foreign = isinstance(section, ForeignModelSection)
    if not foreign and not isinstance(section, ModelSection):
        raise UserError(
            f"a model of your own ({section.type}) is none that transformers knows; only the built-in decoder and "
            "type: hf can be exported",
            checkpoint / files.MODEL,
        )
    entries = _foreign(checkpoint, section, dtype) if foreign else their_entries(checkpoint, section, dtype)
    tokenizer = tokenizer_folder(checkpoint)
    documents = foreign_documents(section, entries) if foreign else _documents(checkpoint, section, tokenizer, entries)
    doubts = tokenizer_doubts(tokenizer, section, documents[CONFIG])
    needed = sum(entry.bytes for entry in entries)
    with new_folder(out, needed) as made, console.progress(needed, "exporting", unit="B") as progress:
        for doubt in doubts:
            console.warning(f"{checkpoint}: {doubt}")
        shards = cut(entries, shard_bytes)

        def write(name: str, shard: list[Entry], on_bytes: Callable[[int], None]) -> None:
            write_safetensors(made / name, shard, {"format": "pt"}, on_bytes)

        several = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
        names = several if len(shards) > 1 else [SINGLE]
        in_threads(write, names, shards, progress=progress, total=needed)
        if len(shards) > 1:
            weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
            documents[INDEX] = {"metadata": {"total_size": needed}, "weight_map": dict(sorted(weight_map.items()))}
        for name, content in documents.items():
            files.write_json(made / name, content)
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, made)
    return Made(section, len(entries), len(shards), needed)


def _foreign(checkpoint: Path, section: ForeignModelSection, dtype: torch.dtype | None) -> list[Entry]:
    """The tensors of a model of transformers, as it would save them."""
    index = read_json(checkpoint, files.INDEX)
    saved = {
        name.removeprefix(MODEL_PREFIX): dtype or getattr(torch, entry["dtype"])
        for name, entry in index["tensors"].items()
        if name.startswith(MODEL_PREFIX)
    }
    return foreign_entries(section, saved, lambda name: _whole(checkpoint, index, MODEL_PREFIX + name))


def their_entries(checkpoint: Path, section: ModelSection, dtype: torch.dtype | None) -> list[Entry]:
    """Hugging Face's tensors, each to be put together from the checkpoint's files."""
    index = read_json(checkpoint, files.INDEX)
    saved = {name: entry for name, entry in index["tensors"].items() if name.startswith(MODEL_PREFIX)}
    entries = []
    for theirs, ours in groups(section).items():
        found = []
        for name, _ in ours:
            if MODEL_PREFIX + name not in saved:
                raise UserError(f"it lacks {name}, which its model.json means; it is damaged", checkpoint)
            found.append(saved[MODEL_PREFIX + name])
        transform = ours[0][1]
        one = transform is not None and transform.expert is not None
        shape = invert(transform, [torch.empty(entry["shape"][one:], device="meta") for entry in found]).shape
        kind = getattr(torch, found[0]["dtype"])
        read = partial(_read, checkpoint, index, [MODEL_PREFIX + name for name, _ in ours], transform)
        entries.append(Entry(theirs, saved_as(ours[0][0], dtype, kind), tuple(shape), read))
    return entries


def _read(checkpoint: Path, index: dict, names: list[str], transform: Transform | None) -> torch.Tensor:
    expert = None if transform is None else transform.expert
    if expert is not None:
        return invert(transform, [_expert(checkpoint, index, name, expert) for name in names])
    return invert(transform, [_whole(checkpoint, index, name) for name in names])


def _expert(checkpoint: Path, index: dict, name: str, expert: int) -> torch.Tensor:
    """One expert's part of a stack, out of the pieces that it is in."""
    entry = index["tensors"][name]
    tensor = torch.empty(entry["shape"][1:], dtype=getattr(torch, entry["dtype"]))
    for number, offset, shape in entry["pieces"]:
        if offset[0] <= expert < offset[0] + shape[0]:
            place = tuple(slice(start, start + length) for start, length in zip(offset[1:], shape[1:], strict=True))
            with safe_open(checkpoint / index["files"][number], framework="pt") as file:
                here = expert - offset[0]
                tensor[place] = file.get_slice(name)[here : here + 1][0]
    return tensor


def _whole(checkpoint: Path, index: dict, name: str) -> torch.Tensor:
    """A tensor out of its pieces in the ranks' files."""
    entry = index["tensors"][name]
    if len(entry["pieces"]) == 1:
        with safe_open(checkpoint / index["files"][entry["pieces"][0][0]], framework="pt") as file:
            return file.get_tensor(name)
    tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    for number, offset, shape in entry["pieces"]:
        place = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
        with safe_open(checkpoint / index["files"][number], framework="pt") as file:
            tensor[place] = file.get_tensor(name)
    return tensor


def _documents(
    checkpoint: Path, section: ModelSection, tokenizer: Path | None, entries: list[Entry]
) -> dict[str, dict[str, Any]]:
    """config.json and generation_config.json."""
    try:
        config = config_of(section)
    except UserError as error:
        raise UserError(error.what, checkpoint / files.MODEL) from None
    origin = read_json(checkpoint, files.ORIGIN) if (checkpoint / files.ORIGIN).is_file() else {}
    if origin:
        special = {key: origin["config"][key] for key in _SPECIAL if key in origin["config"]}
        config = spelled_as(config, origin["config"])
    else:
        special = special_ids(tokenizer, section)
    kind = dtype_name(max((entry.dtype for entry in entries), key=lambda one: sum(e.dtype == one for e in entries)))
    generation = origin.get("generation_config") or {key: id for key, id in special.items() if id is not None}
    return {CONFIG: config | special | {"dtype": kind, "torch_dtype": kind}, "generation_config.json": generation}


def special_ids(tokenizer: Path | None, section: ModelSection) -> dict[str, int | None]:
    """The ids of the special tokens that the tokenizer names; without one null, not the family's defaults."""
    found: dict[str, int | None] = dict.fromkeys(_SPECIAL)
    if tokenizer is None:
        return found
    header, content = read_tokenizer(tokenizer)
    found["eos_token_id"] = header.eod_id
    ids = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    settings = read_json(tokenizer, "tokenizer_config.json") if (tokenizer / "tokenizer_config.json").exists() else {}
    for key in ("bos", "pad"):
        token = settings.get(f"{key}_token")
        found[f"{key}_token_id"] = ids.get(token.get("content") if isinstance(token, dict) else token)
    return {key: id if id is not None and id < (section.vocab_size or 0) else None for key, id in found.items()}


def _copy_tokenizer(tokenizer: Path, made: Path) -> None:
    """The tokenizer's files, beside the weights as AutoTokenizer expects them."""
    copy_tokenizer(tokenizer, made / "tokenizer")
    for path in (made / "tokenizer").iterdir():
        path.rename(made / path.name)
    (made / "tokenizer").rmdir()
    stated = made / "tokenizer_config.json"
    settings = read_json(made, stated.name) if stated.exists() else {}
    if "tokenizer_class" not in settings:  # else one is taken that the model's family is known to have
        files.write_json(stated, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
