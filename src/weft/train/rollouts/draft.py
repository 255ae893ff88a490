"""Defines `Draft`, a completion while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.data.tokenizers.tokenizer import Tokenizer
from weft.generation.settings import Sampling
from weft.train.rollouts.conversation import ConversationFormat
from weft.train.rollouts.prompts import RolloutPrompt
from weft.train.rollouts.rollout import Completion
from weft.train.rollouts.tools import Tools, find_call


class Draft:
    """A completion while it is generated: answers of the model and, between them, results of tools.

    Args:
        prompt: the prompt.
        seed: seed of the random numbers.
        length: maximum number of tokens of the prompt and the completion.
        new_tokens: maximum number of tokens that the model generates.

    Attributes:
        ids: token ids of the prompt and the completion.
        active: whether the model must write an answer.
    """

    def __init__(self, prompt: RolloutPrompt, seed: int, length: int, new_tokens: int):
        self.ids, self.active = list(prompt.ids), True
        self._seed, self._length, self._left = seed, length, new_tokens
        self._learned, self._logprobs = [0] * len(self.ids), [0.0] * len(self.ids)
        self._messages = [] if isinstance(prompt.given, str) else list(prompt.given)
        self._answers: list[str] = []
        self._truncated = False

    def sampling(self, settings: Sampling) -> Sampling:
        """Returns the settings of the next answer."""
        return replace(settings, seed=self._seed, max_new_tokens=min(self._left, self._length - len(self.ids)))

    def add(self, ids: Sequence[int], logprobs: Sequence[float], complete: bool, tokenizer: Tokenizer) -> None:
        """Appends an answer.

        Args:
            ids, logprobs: tokens of the answer, and their log-probabilities.
            complete: whether the answer ends with a stop token.
        """
        decoder = tokenizer.stream_decoder(self.ids, skip_special_tokens=True)
        shown = ids[:-1] if complete else ids  # the text of the stop token is not part of the answer
        text = "".join([*map(decoder.step, shown), decoder.flush()])
        self._append(ids, logprobs)
        self._left -= len(ids)
        self._answers.append(text)
        if self._messages:
            self._messages.append({"role": "assistant", "content": text})
        self._truncated, self.active = not complete, False

    def call_tool(self, answer: Sequence[int], tools: Tools, conversation: ConversationFormat) -> None:
        """If the last answer calls a tool, appends the result of the tool, after which the model writes an answer.

        A prompt of text has not shown the tools to the model, so that its answers call none.

        Args:
            answer: token ids of the last answer.
        """
        call = None if self._truncated or not self._messages else find_call(conversation.text(answer))
        if call is None:
            return
        result = tools.call(*call)
        ids = conversation.after(answer, call[0], result)
        if self._left < 1 or len(self.ids) + len(ids) >= self._length:
            self._truncated = True  # no room for another answer
            return
        self._append(ids, None)
        self._messages.append({"role": "tool", "name": call[0], "content": result})
        self.active = True

    def completion(self) -> Completion:
        """Returns the completion."""
        return Completion(
            self.ids, self._learned, self._logprobs, self._truncated or self.active, self._answers, self._messages
        )

    def _append(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        self.ids.extend(ids)
        self._learned.extend([int(logprobs is not None)] * len(ids))
        self._logprobs.extend([0.0] * len(ids) if logprobs is None else logprobs)
