"""Defines `RewardModel`, a model trained with the objective `reward` that scores completions of a rollout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.base_model import source_digest
from weft.checkpoint.load import architecture, find_checkpoint, resolve, tokenizer_folder
from weft.checkpoint.load_model import load_model
from weft.data.conversations.conversation_encoder import ConversationEncoder, ConversationSpec
from weft.data.conversations.layouts import LAYOUTS, RecordLayout
from weft.data.conversations.template import find_template
from weft.data.documents import Document
from weft.errors import UserError
from weft.generation.limits import check_length
from weft.models.decoder import Decoder
from weft.models.forward import forward_of
from weft.observe.status import alive
from weft.train.auto_settings import DTYPES
from weft.train.job import Job

MOST_TOKENS = 8192  # per forward pass, with padding
KEYS = {name: keys[0] for name, keys in LAYOUTS["messages"].items()}


class RewardModel:
    """A reward model: scores messages by its head `score` at the last token.

    The messages are rendered with the chat template of the reward model and encoded with its tokenizer, as in its
    training data, so its architecture and vocabulary can differ from those of the trained model. Each rank has an
    unsharded copy without gradients, in the compute dtype of the run.

    Args:
        reference: path of a run, checkpoint or Hugging Face folder.

    Attributes:
        name: name in metrics: the last part of the path.

    Raises:
        UserError: the path has no reward model, or the model has no tokenizer or chat template.
    """

    def __init__(self, reference: str):
        self.label, self.name = f"objective.reward: {reference}", Path(reference).absolute().name
        try:
            self.checkpoint = resolve(reference)
            self._section = architecture(self.checkpoint)
            if getattr(self._section, "num_labels", None) is None:
                raise UserError("not a reward model: it has no num_labels: 1; train one with objective: {type: reward}")
            folder = tokenizer_folder(find_checkpoint(reference))
            if folder is None:
                raise UserError("the reward model has no tokenizer; give the path of its run or Hugging Face folder")
            spec = ConversationSpec(folder, RecordLayout("messages", KEYS), find_template(folder))
            self._encoder = ConversationEncoder(spec)
            self._encoder.open()
        except UserError as error:
            raise UserError(f"{self.label}: {error}") from None
        self._model: Decoder | None = None

    def digest(self) -> str:
        """Returns the digest of the weights. Every rank must call it."""
        return source_digest(self._section, self.checkpoint)

    def load(self, job: Job) -> None:
        """Loads the weights, if they are not loaded. Every rank must call it."""
        if self._model is None:
            dtype = DTYPES[job.config.training.dtype]
            loaded = load_model(self.checkpoint, device=job.world.device, dtype=dtype)
            assert isinstance(loaded, Decoder)
            self._model = loaded.requires_grad_(False)

    def __call__(self, conversations: Sequence[list[dict[str, Any]]], places: Sequence[str]) -> list[float]:
        """Returns the score of each conversation, after `load`.

        Args:
            places: description of each conversation, for messages.

        Raises:
            UserError: a conversation cannot be rendered, is too long for the model, or its score is not finite.
        """
        assert self._model is not None
        encoded = self._encoder.encode([Document({"messages": one}, n) for n, one in enumerate(conversations)])
        for reject in encoded.rejects:
            raise UserError(f"{self.label}: {places[reject.line or 0]} cannot be rendered: {reject.message}")
        documents = torch.from_numpy(encoded.ids.astype("int64")).split(encoded.lengths.tolist())
        try:
            longest = max(map(len, documents))
            check_length(self._model, longest, "the completions need", "lower objective.max_new_tokens")
        except UserError as error:
            raise UserError(f"{self.label}: {error}") from None
        scores = [0.0] * len(documents)
        for indices in _batches([len(one) for one in documents]):
            alive()
            for index, score in zip(indices, self._score([documents[n] for n in indices]), strict=True):
                if not math.isfinite(score):
                    raise UserError(f"{self.label}: the score of {places[index]} is {score}; check the reward model")
                scores[index] = score
        return scores

    @torch.no_grad()
    def _score(self, documents: Sequence[torch.Tensor]) -> list[float]:
        """Returns the score at the last token of each document. Padding on the right does not change earlier tokens."""
        assert self._model is not None
        device = next(self._model.parameters()).device
        tokens = torch.nn.utils.rnn.pad_sequence(list(documents), batch_first=True).to(device)
        outputs = forward_of(self._model)({"tokens": tokens})
        last = torch.tensor([len(one) - 1 for one in documents], device=device)
        return outputs.gather(1, last[:, None])[:, 0].to(torch.float64).tolist()


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yields the indices of documents of similar lengths, with at most `MOST_TOKENS` tokens or one document each."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda n: (lengths[n], n)):
        if batch and (len(batch) + 1) * lengths[index] > MOST_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
