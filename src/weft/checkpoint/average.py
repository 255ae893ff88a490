"""Defines `weft.average_models`, which averages the weights of several models tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import checkpoint_files as files
from weft.checkpoint.base_model import AnyModelSection
from weft.checkpoint.huggingface.config_files import read_origin
from weft.checkpoint.huggingface.import_model import WrittenModel, parse_dtype
from weft.checkpoint.load import architecture, checkpoints, find_checkpoint, tokenizer_folder
from weft.checkpoint.shard_files import write_checkpoint
from weft.checkpoint.tensor_file import Entry
from weft.checkpoint.tensors import MODEL_PREFIX
from weft.checkpoint.weights import SavedTensor, checkpoint_tensors, open_weights
from weft.errors import UserError
from weft.files import refuse_existing
from weft.formatting import counted
from weft.headers import read_tokenizer_header
from weft.models.huggingface_weights import NOT_ARCHITECTURE, saved_dtype
from weft.observe.console import Console

EMA = "callback/ema/weights/"  # prefix of the averages of the callback `ema` in a checkpoint
_FREE = NOT_ARCHITECTURE - {"type"} | {"weights", "path", "attn_implementation"}  # keys of `model` that may differ


@dataclass(frozen=True)
class _Source:
    """A model to average: its checkpoint or Hugging Face folder, `model` section, tensors and weight in the average."""

    path: Path
    section: AnyModelSection
    tensors: Mapping[str, SavedTensor]
    weight: float


def average_models(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    last: int | None = None,
    ema: bool = False,
    dtype: str | torch.dtype | None = None,
    console: Console | None = None,
) -> WrittenModel:
    """Writes a checkpoint whose weights are the average of those of several models with the same architecture.

    Examples are model soups (Wortsman et al., 2022) and averages of the last checkpoints of a run (Izmailov et al.,
    2018). Sums are computed in float64. The checkpoint has no optimizer state.

    >>> made = weft.average_models(["runs/run", "runs/run"], "averaged", weights=[3, 1])
    >>> made.files
    1

    Args:
        sources: runs (their newest checkpoints), checkpoints, imported or Hugging Face folders of the built-in decoder.
        out: the folder to write, as `import_model` does. It appears only when it is complete.
        weights: a positive number for each model; they are divided by their sum. Default: all models count equally.
        last: average the last `last` checkpoints of the run in `sources`.
        ema: use the averages that the callback `ema` saved in the checkpoints, in place of the weights.
        dtype: dtype of the averages, such as "bfloat16". Default: the dtypes of the models; of different ones, the
            wider.
        console: prints warnings and progress. Default: no output.

    Returns:
        An object with the numbers of `tensors`, `files` and `bytes`, and the model's `section`.

    Raises:
        UserError: the models differ in architecture, tensors or tokenizer, one of them is an adapter, a weight is
            infinite or NaN, or `out` cannot be written.
    """
    out, console, kind = Path(out), console or Console(prints=False), parse_dtype(dtype)
    refuse_existing(out)
    paths = _last_checkpoints(sources, last) if last is not None else [Path(source) for source in sources]
    if len(paths) < 2 and not ema:
        raise UserError("sources: one model has no average; give several, or --last N, or --ema for that of `ema`")
    numbers = _check_weights([1.0] * len(paths) if weights is None else weights, len(paths))
    found = [_open(path, number, ema) for path, number in zip(paths, numbers, strict=True)]
    first = found[0]
    for other in found[1:]:
        _check_same(first, other)
    tokenizer = _common_tokenizer(found)
    entries = []
    for name, saved in first.tensors.items():
        tensors = [source.tensors[name] for source in found]
        mixed = reduce(torch.promote_types, [one.dtype for one in tensors])
        chosen = saved_dtype(name, kind, mixed)
        entries.append(Entry(MODEL_PREFIX + name, chosen, saved.shape, partial(_average, name, found, chosen)))
    section = first.section.model_copy(update={"from_": None, "load_optimizer": False})
    contents: dict[str, Any] = {files.MODEL: section.model_dump(mode="json", by_alias=True)}
    if origin := read_origin(first.path):
        contents[files.ORIGIN] = origin
    number = write_checkpoint(out, entries, contents, tokenizer, [], "averaging", console)
    return WrittenModel(section, len(entries), number, sum(entry.bytes for entry in entries))


def _last_checkpoints(sources: Sequence[str | Path], last: int) -> list[Path]:
    if len(sources) != 1:
        raise UserError(f"--last {last} is for the checkpoints of one run, but {len(sources)} models are given")
    find_checkpoint(sources[0])
    found = checkpoints(sources[0])
    if not 0 < last <= len(found):
        raise UserError(
            f"--last {last}: the run has {counted(len(found), 'checkpoint')}; use a smaller positive number "
            "(checkpoint.keep_last sets how many checkpoints a run keeps)",
            sources[0],
        )
    return found[-last:]


def _check_weights(weights: Sequence[float], count: int) -> Sequence[float]:
    """Returns the weights of `count` models. Raises UserError if there are not as many, or one is not positive."""
    if len(weights) != count:
        raise UserError(f"--weights: {len(weights)} numbers for {count} models; give a number for each model")
    if wrong := [weight for weight in weights if not (weight > 0 and math.isfinite(weight))]:
        raise UserError(f"--weights: {wrong[0]} is not a positive number; leave out models that should not count")
    return weights


def _open(path: Path, weight: float, ema: bool) -> _Source:
    weights = open_weights(path, huggingface=False)
    tensors = dict(weights.tensors)
    if ema:
        in_checkpoint = (weights.path / files.INDEX).is_file()
        averages = dict(checkpoint_tensors(weights.path, EMA)) if in_checkpoint else {}
        if not averages:
            raise UserError(
                "--ema: the checkpoint has no averages of the callback ema; train with `callbacks: [{type: ema}]`, or "
                "omit --ema",
                weights.path,
            )
        tensors |= averages
    return _Source(weights.path, architecture(weights.path), tensors, weight)


def _check_same(first: _Source, other: _Source) -> None:
    """Raises UserError if two models differ in their sections, or in names or shapes of tensors."""
    remedy = "average only models with the same architecture"
    one, two = ({k: v for k, v in source.section.model_dump().items() if k not in _FREE} for source in (first, other))
    for key in sorted(one.keys() | two.keys()):
        if one.get(key) != two.get(key):
            what = f"model.{key} is {two.get(key)}, but {one.get(key)} in {first.path}"
            raise UserError(f"{what}; {remedy}", other.path)
    for name in sorted(first.tensors.keys() | other.tensors.keys()):
        shapes = [str(list(one.tensors[name].shape)) if name in one.tensors else "missing" for one in (first, other)]
        if shapes[0] != shapes[1]:
            raise UserError(f"{name} is {shapes[1]}, but {shapes[0]} in {first.path}; {remedy}", other.path)


def _common_tokenizer(sources: Sequence[_Source]) -> Path | None:
    """Returns the tokenizer's folder of the first model that has a tokenizer; None if no model has one.

    Raises:
        UserError: models have different tokenizers.
    """
    found = [(source, folder) for source in sources if (folder := tokenizer_folder(source.path)) is not None]
    digests = {read_tokenizer_header(folder).digest: source for source, folder in found}
    if len(digests) > 1:
        one, two = list(digests.values())[:2]
        what = f"the tokenizer differs from that of {one.path}, so the rows of the embeddings are of other tokens"
        raise UserError(f"{what}; average only models with the same tokenizer", two.path)
    return found[0][1] if found else None


def _average(name: str, sources: Sequence[_Source], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields blocks of rows of the weighted average of a tensor.

    Raises:
        UserError: a value is infinite or NaN, or integers differ.
    """
    rows, divisor = sources[0].tensors[name].rows, math.fsum(source.weight for source in sources)
    for blocks in zip(*(source.tensors[name].blocks(rows) for source in sources), strict=True):
        if not blocks[0].is_floating_point():
            for source, block in zip(sources, blocks, strict=True):
                if not torch.equal(block, blocks[0]):
                    what = f"{name} has other integers than in {sources[0].path}, which have no average"
                    raise UserError(f"{what}; leave this model out", source.path)
            yield blocks[0]
            continue
        total = torch.zeros(blocks[0].shape, dtype=torch.float64)
        for source, block in zip(sources, blocks, strict=True):
            if not torch.isfinite(block).all():
                raise UserError(f"{name} has an infinite value or NaN; leave this model out", source.path)
            total.add_(block, alpha=source.weight)
        yield total.div_(divisor).to(dtype)
