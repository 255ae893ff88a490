"""`weft.generate`: text for text, token ids for token ids."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from weft.checkpoint.huggingface.config_files import read_origin
from weft.checkpoint.load import resolve, tokenizer_folder
from weft.checkpoint.load_model import checkpoint_of, load_model
from weft.data.tokenizers.tokenizer import Prompt, Tokenizer
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.generation.sample import Sampling, earlier, generate_steps
from weft.observe.console import Console
from weft.parallel.world import local_device

TOGETHER = 16  # prompts that are continued at once


Prompts = TypeVar("Prompts", str, list[str], list[int], list[list[int]])


def generate(
    model: nn.Module | str | Path,
    prompts: Prompts,
    max_new_tokens: int = 32,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    ignore_eos: bool = False,
) -> Prompts:
    """Continue prompts, at most 16 at once. What a prompt gets does not depend on its neighbours.

    >>> text = weft.generate("runs/run", "Kalo mi", max_new_tokens=4)
    >>> model = weft.load_model("runs/run")
    >>> weft.generate(model, ["Kalo mi", "Ren"], max_new_tokens=4)[0] == text
    True
    >>> len(weft.generate(model, [5, 6, 7], max_new_tokens=3, temperature=0.8, seed=1, ignore_eos=True))
    3

    Args:
        model: a run directory, a checkpoint or a Hugging Face folder, which is loaded for this call, on a GPU if
            there is one; or a module as `weft.load_model` gives it.
        prompts: a text or a list of token ids; or a list of either. Texts need a model with a tokenizer: a path, or
            what `weft.load_model` has loaded.
        max_new_tokens: the most tokens to add to each prompt.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the smallest set of likeliest tokens with together at least this probability.
        seed: the same seed and prompt give the same tokens; a prompt that stands twice gets two continuations.
        ignore_eos: go on after tokens that end a text.

    Returns:
        What follows each prompt, without the prompt and without the token that ended it: a text for a text, a list of
        ids for ids, and a list of these for a list of prompts.

    Raises:
        UserError: no model there, no tokenizer for texts, an empty list of ids, ids that the model does not have,
            settings out of range, or more tokens than the model has learned positions for.
    """
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)  # before a large model is read
    single = isinstance(prompts, str) or isinstance(next(iter(prompts), None), int)
    found: Any = _generate(model, [prompts] if single else list(prompts), sampling, ignore_eos)
    return found[0] if single else found


def _generate(model: nn.Module | str | Path, prompts: list, sampling: Sampling, ignore_eos: bool) -> list:
    if not prompts:
        return []
    checkpoint = checkpoint_of(model) if isinstance(model, nn.Module) else resolve(model)
    tokenizer = tokenizer_of(checkpoint) if isinstance(prompts[0], str) else None
    if not isinstance(model, nn.Module):
        model = load_model(checkpoint or model, local_device(Console()))
    stop_ids = set() if ignore_eos else stop_ids_of(checkpoint)
    if tokenizer is None:
        ids: list[list[int]] = [[] for _ in prompts]
        for number, token in tokens(model, [Prompt("", list(p), None) for p in prompts], sampling, stop_ids=stop_ids):
            if token is not None:
                ids[number].append(token)
        return ids
    asked = [tokenizer.prompt(text) for text in prompts]
    written = [prompt.text for prompt in asked]
    for number, piece, _ in stream(model, tokenizer, asked, sampling, stop_ids=stop_ids):
        written[number] += piece
    # Of a prompt that ends with a blank, the blank was left to the model.
    return [whole[len(text) :] for whole, text in zip(written, prompts, strict=True)]


def stream(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    stop_ids: Collection[int],
    cache: bool = True,
) -> Iterator[tuple[int, str, bool]]:
    """Text as it is generated: the number of its prompt, the next piece, and whether that was the last one.

    Raises:
        UserError: as `generate_steps`, when the first piece is asked for.
    """
    decoders = [tokenizer.stream_decoder() for _ in prompts]
    for number, token in tokens(model, prompts, sampling, stop_ids=stop_ids, cache=cache):
        yield number, decoders[number].flush() if token is None else decoders[number].step(token), token is None


def tokens(
    model: nn.Module,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    stop_ids: Collection[int],
    cache: bool = True,
) -> Iterator[tuple[int, int | None]]:
    """Tokens as they are generated: the number of their prompt, and the token; None when some prompts have ended."""
    copies = earlier(tuple(prompt.ids) for prompt in prompts)
    for begin in range(0, len(prompts), TOGETHER):
        some = slice(begin, begin + TOGETHER)
        first = [prompt.first for prompt in prompts[some]]
        ids = [prompt.ids for prompt in prompts[some]]
        for new in generate_steps(
            model, ids, sampling, stop_ids=stop_ids, first=first, copies=copies[some], cache=cache
        ):
            for number, token in enumerate(new, start=begin):
                if token is not None and token not in stop_ids:
                    yield number, token
        yield from ((number, None) for number in range(begin, begin + len(ids)))


def tokenizer_of(checkpoint: Path | None) -> Tokenizer:
    """The tokenizer of what `resolve` gave. Raises UserError if there is none."""
    if checkpoint is None:
        raise UserError(
            "texts need the model's tokenizer; give a path, a model of weft.load_model, or token ids in place of texts"
        )
    folder = tokenizer_folder(checkpoint)
    if folder is not None:
        return Tokenizer.load(folder)
    if is_huggingface(checkpoint) or checkpoint.absolute().parent.name != "checkpoints":
        raise UserError("there is no tokenizer.json with this model; put its tokenizer's files there", checkpoint)
    raise UserError("this run has no tokenizer of its own; train with `tokenizer:` set", checkpoint.parent.parent)


def stop_ids_of(checkpoint: Path | None) -> set[int]:
    """The tokens that end a text: the tokenizer's, and those that Hugging Face's files state besides.

    Chat models end a turn with another token than a text.
    """
    if checkpoint is None:
        return set()
    ids = (read_origin(checkpoint).get("generation_config") or {}).get("eos_token_id")
    found = set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
    folder = tokenizer_folder(checkpoint)
    return found | {Tokenizer.load(folder).eod_id} if folder is not None else found
