"""Checks that a frozen model, such as a teacher or a reference, fits the run: its vocabulary, window and head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.base_model import AnyModelSection
from weft.checkpoint.load import find_checkpoint, tokenizer_folder
from weft.config.adapter import AdapterSection
from weft.config.derive import sequence_length
from weft.config.run import RunConfig
from weft.config.transformers_model import TransformersModelSection, longest_sequence
from weft.errors import UserError
from weft.headers import read_token_ids, read_tokenizer_header


@dataclass(frozen=True)
class Source:
    """The source of a frozen model.

    Attributes:
        key: where the source is set, for messages: a config key if one is known, such as `objective.teacher`.
        section: the `model` section of the frozen model.
        path: the run, checkpoint or Hugging Face folder with the weights; None: initial weights, drawn from the run's
            seed.
        start: whether the source is "start".
        adapter: the section `adapter` of the checkpoint, if it has one.
    """

    key: str
    section: AnyModelSection
    path: Path | None
    start: bool
    adapter: AdapterSection | None = None


def check_fit(config: RunConfig, source: Source) -> None:
    """Checks that a frozen model can process the sequences of the run.

    Raises:
        UserError: the model has another vocabulary than the run, fewer positions than the run's sequences have tokens,
            or a head of scores, which no built-in objective uses.
    """
    check_vocabulary(config, source)
    section, length = source.section, sequence_length(config)
    longest = getattr(section, "max_position_embeddings", None)
    if isinstance(section, TransformersModelSection):
        longest = longest_sequence(section.config)
    if longest is not None and longest < length:
        what = f"{source.path} has {longest:,} positions, but the run's sequences have {length:,} tokens"
        raise UserError(f"{source.key}: {what}; lower data.sequence_length, or give another model")
    if getattr(section, "num_labels", None) and ":" not in config.objective.type:
        what = f"{source.path} is a reward model (num_labels: 1), which gives no probabilities of tokens"
        raise UserError(f"{source.key}: {what}; give a model with an output head")


def check_vocabulary(config: RunConfig, source: Source) -> None:
    """Checks that a frozen model has the vocabulary of the run.

    Compares the tokenizers, if both are known, and otherwise the numbers of token ids.

    Raises:
        UserError: the vocabularies differ.
    """
    assert source.path is not None
    folder = tokenizer_folder(find_checkpoint(source.path))
    if folder is not None and config.tokenizer is not None:
        if read_tokenizer_header(folder).digest == read_tokenizer_header(config.tokenizer).digest:
            return
        own, other = read_token_ids(config.tokenizer), read_token_ids(folder)
        if wrong := sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token)):
            ids = [f"{ids[wrong[0]]}" if wrong[0] in ids else "missing" for ids in (own, other)]
            raise UserError(
                f"{source.key}: {source.path} has another tokenizer than the run ({config.tokenizer}): the id of "
                f"{wrong[0]!r} is {ids[1]}, not {ids[0]}; give a model with the run's tokenizer"
            )
        return
    sizes = [getattr(section, "vocab_size", None) for section in (source.section, config.model)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise UserError(
            f"{source.key}: {source.path} has a vocabulary of {sizes[0]} ids, but the run's model has {sizes[1]} "
            "(model.vocab_size); give a model with the run's tokenizer"
        )
