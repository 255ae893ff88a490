"""Defines `Stream`, the continuations of a prompt while they are generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weft.data.tokenizers.tokenizer import Tokenizer
from weft.generation.sampler import Choice
from weft.generation.settings import Sampling
from weft.generation.stops import StopStrings

if TYPE_CHECKING:
    from weft.generation.engine import Engine

Finish = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a continuation.

    Attributes:
        token: id of the new token; None in the last piece of a cancelled continuation, which can have held-back text.
        text: the new text. It is empty if there is no tokenizer, if the token does not complete a character, or if the
            text may be the beginning of a stop string.
        logprob: the token's log-probability in nats, if `Sampling.logprobs` is set.
        top: (id, log-probability) of the most likely tokens.
        finish: why the continuation ends with this piece: "stop" (a stop token, a stop string, or a complete text of a
            schema, regex or grammar), "length" (`max_new_tokens` or the maximum length is
            reached) or "cancelled"; None: the
            continuation goes on.
        index: index of this continuation among the `Sampling.n` continuations of its prompt.
        prompt: in the first piece of a continuation, if `Sampling.prompt_logprobs` is set: the tokens of the prompt, as
            pieces without a text. The first token has no log-probability.
    """

    token: int | None
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    index: int = 0
    prompt: tuple[Piece, ...] = ()


class Stream:
    """The continuations of one prompt. Iterating over the stream runs the engine until the next piece is ready.

    Can be used as a context manager: at the end of the `with` block, unfinished continuations are cancelled.

    Attributes:
        error: the exception that ended the continuations, or None.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], sampling: Sampling, tokenizer: Tokenizer | None):
        self._engine = engine
        self._pieces: deque[Piece] = deque()
        self._open = sampling.n  # continuations that have not ended
        skip = {"skip_special_tokens": sampling.skip_special_tokens}
        self._decoders = [tokenizer and tokenizer.stream_decoder(prompt, **skip) for _ in range(sampling.n)]
        self._stops = [StopStrings(sampling.stop) for _ in range(sampling.n)]
        self.error: Exception | None = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        while True:
            with self._engine.lock:  # of several threads that wait, each runs steps for all
                if self._pieces:
                    return self._pieces.popleft()
                if self.error is not None:
                    raise self.error
                if not self._open:
                    raise StopIteration
                self._engine.step()

    @property
    def finished(self) -> bool:
        """Whether all continuations have ended, also by an error. Unread pieces can be left."""
        return self._open == 0 or self.error is not None

    def ready(self) -> list[Piece]:
        """Returns the unread pieces that are ready, without running the engine."""
        with self._engine.lock:
            pieces = list(self._pieces)
            self._pieces.clear()
            return pieces

    def cancel(self) -> None:
        """Ends the unfinished continuations of the stream, and frees their cache blocks.

        Can be called at any time, from any thread. The last piece of each of these continuations has the finish
        "cancelled" and the text that was held back. A finished stream does not change.
        """
        self._engine.cancel(self)

    def put(
        self,
        index: int,
        choice: Choice,
        finish: Finish | None,
        *,
        complete: bool = False,
        prompt: Sequence[Choice] = (),
    ) -> bool:
        """Adds a continuation's new token to the stream. Returns whether the continuation has ended.

        Args:
            index: index of the continuation.
            choice: the new token.
            finish: why the continuation ends with this token; None: the continuation goes on.
            complete: whether the token completes a constrained text. `finish` is then "stop", but the token is not a
                stop token, so its text is part of the continuation.
            prompt: the scored tokens of the prompt, with the first new token.
        """
        text = ""
        decoder, stops = self._decoders[index], self._stops[index]
        ends = finish == "stop" and not complete  # the text of a stop token is not part of the continuation
        if decoder is not None:
            text = stops.feed("" if ends else decoder.step(choice.token))
            if stops.found is None and finish is not None:
                text += stops.feed(decoder.flush())
        if stops.found is not None:
            finish = "stop"
        elif finish is not None:
            text += stops.flush()
        scored = tuple(Piece(one.token, "", one.logprob, one.top, index=index) for one in prompt)
        self._pieces.append(Piece(choice.token, text, choice.logprob, choice.top, finish, index, scored))
        self._open -= finish is not None
        return finish is not None

    def end(self, index: int) -> None:
        """Adds the last piece of a cancelled continuation to the stream."""
        decoder, stops = self._decoders[index], self._stops[index]
        text = "" if decoder is None else stops.feed(decoder.flush()) + stops.flush()
        self._pieces.append(Piece(None, text, finish="cancelled", index=index))
        self._open -= 1
