"""Defines `ChatFormat`, which renders the messages of a conversation as a prompt for an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.data.conversations.endings import SAMPLE, first_token
from weft.data.conversations.template import ChatTemplate
from weft.data.option_names import COMMAND, OptionNames
from weft.data.sources.values import Unfit
from weft.data.tokenizers.tokenizer import Prompt, Tokenizer
from weft.errors import UserError
from weft.generation.settings import Sampling

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class ChatPrompt:
    """Messages, rendered as a prompt.

    Attributes:
        prompt: the prompt.
        lead: text with which the continuation begins, but which is not part of the answer.
        stop_ids: tokens that end the answer, besides the engine's.
        stop: strings that end the answer.
    """

    prompt: Prompt
    lead: str
    stop_ids: frozenset[int]
    stop: tuple[str, ...]

    def sampling(self, sampling: Sampling, room: int | None) -> Sampling:
        """Returns the settings with which an answer is generated.

        Args:
            room: maximum number of tokens for which the model's window has room; None: any.
        """
        most = sampling.max_new_tokens
        return replace(
            sampling,
            max_new_tokens=most if room is None else min(room, most),
            stop=(*sampling.stop, *self.stop),
            skip_special_tokens=True,
        )


class ChatFormat:
    """Renders messages as prompts, with a chat template.

    Args:
        template: the chat template.
        tokenizer: the tokenizer of the model.
        remedy: what to do about messages that the template cannot render, for error messages.

    Raises:
        UserError: the template writes no assistant messages.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, remedy: str):
        self.template, self.tokenizer, self._remedy = template, tokenizer, remedy

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        prompt: bool = False,
    ) -> str:
        """Returns the text of messages. See `ChatTemplate.render`. Raises UserError if the template raises an error."""
        try:
            return self.template.render(messages, tools, variables, prompt=prompt)[0]
        except Unfit as bad:
            raise UserError(f"{bad.reason}; {self._remedy}") from None

    def frame(
        self, question: Messages, tools: list[Any] | None = None, variables: Mapping[str, Any] | None = None
    ) -> tuple[str, str, str]:
        """Returns what the template writes around the answer to a question. See `answer_frame`."""

        def render(messages: Messages, *, prompt: bool = False) -> str:
            return self.render(messages, tools, variables, prompt=prompt)

        return answer_frame(render, question, self.template.source.origin)

    def prompt(
        self,
        messages: Messages,
        frame: tuple[str, str, str],
        tools: list[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Returns the prompt for an answer to messages.

        Args:
            frame: the result of `frame`.

        Raises:
            UserError: the template cannot render the messages.
        """
        header, lead, end = frame
        text = self.render(messages, tools, variables, prompt=True) + header
        prompt = self.tokenizer.prompt(text, special=False)  # the template writes special tokens
        lead = text[len(prompt.text) :] + lead
        if token := first_token(end, self.tokenizer.added_tokens):
            return ChatPrompt(prompt, lead, frozenset({self.tokenizer.added_tokens[token]}), ())
        return ChatPrompt(prompt, lead, frozenset(), (end,) if end else ())


def answer_frame(
    render: Callable[..., str], question: Messages, origin: str, words: OptionNames = COMMAND
) -> tuple[str, str, str]:
    """Finds what a chat template writes around an answer.

    Args:
        render: function that renders messages, with the beginning of an answer if `prompt` is True.
        question: messages to answer.
        origin: file or name of the template, for messages.
        words: names of options in messages.

    Returns:
        Three texts: what is missing between the rendered question (with `prompt`) and an answer, without white space at
        its end; this white space, if it is not part of answers; and the text after an answer.

    Raises:
        UserError: the template writes no assistant messages.
    """
    before, full = render(question), render([*question, {"role": "assistant", "content": SAMPLE}])
    start = render(question, prompt=True)
    if SAMPLE not in full:
        remedy = f"choose another with {words.name('chat_template')}"
        raise UserError(f"this chat template writes no assistant messages; {remedy}", origin)
    header, _, end = full.partition(SAMPLE)
    between = header[len(start) :] if header.startswith(start) else ""
    # A template without `add_generation_prompt` writes the header of an answer only together with the answer.
    header = between.rstrip(" ") if start == before else ""
    lead = between[len(header) :]
    return header, "" if lead.strip() else lead, end.rstrip()
