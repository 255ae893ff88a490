"""Defines `Choice`, which collects the text of one continuation of a request."""

from __future__ import annotations

from collections.abc import Sequence

from weft.generation.stream import Finish, Piece


class Choice:
    """The text of a continuation, while its pieces arrive.

    Args:
        lead: text that is not part of the choice if the continuation begins with it.
        whole_characters: whether an incomplete character at the end of an incomplete text is dropped, as in a chat.

    Attributes:
        text: the text so far.
        tokens: number of tokens so far, with the token that ends the text.
        pieces: the pieces so far.
        finish: why the text ended; None: it has not ended.
    """

    def __init__(self, lead: str = "", *, whole_characters: bool = False):
        self._lead, self._held, self._whole = lead, "", whole_characters
        self.text, self.tokens = "", 0
        self.pieces: list[Piece] = []
        self.finish: Finish | None = None

    def add(self, pieces: Sequence[Piece]) -> str:
        """Adds pieces. Returns the new text."""
        new = ""
        for piece in pieces:
            self.tokens += piece.token is not None
            self.finish = piece.finish
            ends = self._whole and piece.finish in ("length", "cancelled")
            new += piece.text.rstrip("\ufffd") if ends else piece.text
        self.pieces += pieces
        if self._lead:
            self._held += new
            if self.finish is None and self._lead.startswith(self._held):
                return ""  # it may still become the lead
            new, self._lead = self._held.removeprefix(self._lead), ""
        self.text += new
        return new
