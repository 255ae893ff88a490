"""Supervised fine-tuning: next-token prediction of the answers."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge

from weft.objectives.pretrain import Pretrain


class SFT(Pretrain):
    """The cross-entropy of the learned tokens, such as the answers of conversations, given the tokens before them.

    The loss mask of a token store says which tokens are learned. A batch without learned tokens has the loss 0.

    Args:
        loss: how tokens are averaged. `tokens`: all learned tokens of the global batch count equally. `sequences`: all
            documents (records) with learned tokens count equally: the loss is each document's mean over its learned
            tokens, averaged over the documents of the global batch. A document that is split over several sequences
            counts once for each sequence in which it has learned tokens.
        neftune: magnitude alpha of the noise on the embeddings in training (NEFTune; Jain et al., 2023), such as 5;
            0: no noise. The noise of each value is uniform in [-a, a] with a = alpha / sqrt(n d), for n tokens in the
            document and the hidden size d. It is off in validation and in generation.
        z_loss: as in `objective: {type: pretrain}`.
        mtp_loss_factor: as in `objective: {type: pretrain}`.
    """

    def __init__(
        self,
        *,
        loss: Literal["tokens", "sequences"] = "tokens",
        neftune: Annotated[float, Ge(0)] = 0.0,
        z_loss: Annotated[float, Ge(0)] = 0.0,
        mtp_loss_factor: Annotated[float, Ge(0)] = 0.1,
    ):
        super().__init__(z_loss=z_loss, mtp_loss_factor=mtp_loss_factor)
        self.weigh_documents = loss == "sequences"
        self.embedding_noise = neftune
