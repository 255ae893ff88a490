"""Defines `ConversationFormat`, which renders prompts of messages, and the results of tools after an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.data.conversations.endings import SAMPLE, first_token
from weft.data.conversations.template import ChatTemplate
from weft.data.option_names import RUN_FILE
from weft.data.sources.values import Unfit
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.generation.chat_format import answer_frame

Messages = list[dict[str, Any]]
RESULT = "weft-sample-result"  # rendered once, to check that the template can render the result of a tool


class ConversationFormat:
    """Renders conversations for a model that continues them. Tokens are only appended, never encoded again.

    Args:
        tools: JSON schemas of tools.

    Attributes:
        stop_ids: the token that ends an answer, if the template writes one.

    Raises:
        UserError: the template cannot render answers or, if there are tools, their results.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, tools: Sequence[Any] = ()):
        self.tokenizer, self.template, self.tools = tokenizer, template, list(tools) or None
        question = [{"role": "user", "content": "weft"}]
        self._header, _, self._end = answer_frame(self._render, question, template.source.origin, RUN_FILE)
        self._question: Messages = question
        token = first_token(self._end, tokenizer.added_tokens)
        self.stop_ids = {tokenizer.added_tokens[token]} if token else set()
        if self.tools and RESULT not in self._following("", RESULT):
            raise UserError(
                "this chat template does not write the results of tools; choose another with data.chat_template",
                template.source.origin,
            )

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the token ids of messages, to which the model's answer is appended.

        Raises:
            Unfit: the template cannot render the messages.
        """
        return self.tokenizer.encode(self.template.render(messages, self.tools, prompt=True)[0] + self._header)

    def text(self, answer: Sequence[int]) -> str:
        """Returns the text of an answer, with special tokens, but without its stop token."""
        return self.tokenizer.decode(answer[:-1] if answer and answer[-1] in self.stop_ids else answer)

    def after(self, answer: Sequence[int], name: str, result: str) -> list[int]:
        """Returns the token ids after an answer: the result of a tool, and the beginning of the next answer.

        Args:
            answer: token ids of the answer that called the tool, with its stop token.
        """
        text = self._following(name, result)
        if answer and answer[-1] in self.stop_ids:
            text = text.lstrip().removeprefix(first_token(self._end, self.tokenizer.added_tokens))
        return self.tokenizer.encode(text)

    def _following(self, name: str, result: str) -> str:
        """Returns what the template writes after an answer if the result of a tool follows."""
        messages = [
            *self._question,
            {"role": "assistant", "content": SAMPLE},
            {"role": "tool", "name": name, "content": result},
        ]
        return self._render(messages, prompt=True).partition(SAMPLE)[2] + self._header

    def _render(self, messages: Messages, *, prompt: bool = False) -> str:
        try:
            return self.template.render(messages, self.tools, prompt=prompt)[0]
        except Unfit as bad:
            raise UserError(
                f"{bad.reason}; choose another with data.chat_template", self.template.source.origin
            ) from None
