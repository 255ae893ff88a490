"""Defines `weft.generate`, which continues texts or token ids."""

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
from weft.generation.sample import Sampling, count_earlier, generate_steps
from weft.observe.console import Console
from weft.parallel.world import local_device

BATCH = 16  # maximum number of prompts per batch

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
    """Continues prompts, in batches of up to 16. A continuation does not depend on the other prompts of its batch.

    >>> text = weft.generate("runs/run", "Kalo mi", max_new_tokens=4)
    >>> model = weft.load_model("runs/run")
    >>> weft.generate(model, ["Kalo mi", "Ren"], max_new_tokens=4)[0] == text
    True
    >>> len(weft.generate(model, [5, 6, 7], max_new_tokens=3, temperature=0.8, seed=1, ignore_eos=True))
    3

    Args:
        model: path of a run directory, a checkpoint or a Hugging Face folder, which is loaded for this call (on a GPU
            if available); or a module that `weft.load_model` returned.
        prompts: a text or a list of token ids; or a list of several texts or of several lists of ids. Texts require
            that the model has a tokenizer.
        max_new_tokens: maximum number of new tokens per prompt.
        temperature: divisor of the logits; 0: greedy decoding.
        top_k: number of most likely tokens from which a token is drawn; None: all.
        top_p: draw from the smallest set of most likely tokens whose total probability is at least this value.
        seed: seed of the random numbers. The same seed and prompt give the same tokens; repeated prompts get different
            continuations.
        ignore_eos: whether to continue after a token that ends a text.

    Returns:
        The continuation of the prompt, without the prompt and without the token that ended the continuation: a text for
            a
        text, and a list of ids for a list of ids. For a list of prompts, a list of continuations.

    Raises:
        UserError: the model does not exist; there is no tokenizer for texts; a prompt is empty or has ids outside the
            vocabulary; a setting is out of range; or the model has too few learned positions.
    """
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)  # checked before the model is loaded
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
        encoded = [Prompt("", list(prompt), None) for prompt in prompts]
        for number, token in stream_tokens(model, encoded, sampling, stop_ids=stop_ids):
            if token is not None:
                ids[number].append(token)
        return ids
    encoded = [tokenizer.prompt(text) for text in prompts]
    written = [prompt.text for prompt in encoded]
    for number, piece, _ in stream_text(model, tokenizer, encoded, sampling, stop_ids=stop_ids):
        written[number] += piece
    # `Prompt.text` does not have the blank at the end of a prompt; the model generates the blank.
    return [full[len(text) :] for full, text in zip(written, prompts, strict=True)]


def stream_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    stop_ids: Collection[int],
    cache: bool = True,
) -> Iterator[tuple[int, str, bool]]:
    """Yields text while it is generated: (number of the prompt, piece of text, whether it is the last piece).

    Raises:
        UserError: a prompt is invalid or too long (see `generate_steps`); raised before the first piece.
    """
    decoders = [tokenizer.stream_decoder() for _ in prompts]
    for number, token in stream_tokens(model, prompts, sampling, stop_ids=stop_ids, cache=cache):
        yield number, decoders[number].flush() if token is None else decoders[number].step(token), token is None


def stream_tokens(
    model: nn.Module,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    stop_ids: Collection[int],
    cache: bool = True,
) -> Iterator[tuple[int, int | None]]:
    """Yields tokens while they are generated: (number of the prompt, token), and (number, None) at the end of each."""
    copies = count_earlier(tuple(prompt.ids) for prompt in prompts)
    for begin in range(0, len(prompts), BATCH):
        batch = prompts[begin : begin + BATCH]
        steps = generate_steps(
            model,
            [prompt.ids for prompt in batch],
            sampling,
            stop_ids=stop_ids,
            first=[prompt.first for prompt in batch],
            copies=copies[begin : begin + BATCH],
            cache=cache,
        )
        for new in steps:
            for number, token in enumerate(new, start=begin):
                if token is not None and token not in stop_ids:
                    yield number, token
        yield from ((number, None) for number in range(begin, begin + len(batch)))


def tokenizer_of(checkpoint: Path | None) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
        checkpoint: path that `weft.checkpoint.load.resolve` returned; None for a module without a path.

    Raises:
        UserError: `checkpoint` is None or has no tokenizer.
    """
    if checkpoint is None:
        raise UserError(
            "texts need a tokenizer; pass a path or a model that weft.load_model returned, or prompts of token ids"
        )
    folder = tokenizer_folder(checkpoint)
    if folder is not None:
        return Tokenizer.load(folder)
    if is_huggingface(checkpoint) or checkpoint.absolute().parent.name != "checkpoints":
        raise UserError(
            "there is no tokenizer.json with this model; put the tokenizer's files into this folder", checkpoint
        )
    raise UserError(
        "this run has no tokenizer; set `tokenizer:` in the run file and train again, or pass token ids",
        checkpoint.parent.parent,
    )


def stop_ids_of(checkpoint: Path | None) -> set[int]:
    """Returns the tokens that end a text: the tokenizer's end-of-document token, and those in generation_config.json.

    Chat models end a message with another token than the end-of-document token.
    """
    if checkpoint is None:
        return set()
    ids = (read_origin(checkpoint).get("generation_config") or {}).get("eos_token_id")
    found = set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
    folder = tokenizer_folder(checkpoint)
    return found | {Tokenizer.load(folder).eod_id} if folder is not None else found
