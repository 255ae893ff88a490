"""Finds the token that ends an answer, and checks that a model learns to end its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from weft.data.conversations.template import ChatTemplate
from weft.data.option_names import OptionNames
from weft.data.sources.values import Unfit

FARTHEST = 256  # characters of a stop token and white space after it
SAMPLE = "weft-sample-answer"  # rendered once, to find what a template writes around an answer
Span = tuple[int, int]  # [start, end) in characters of a text


def raise_if_endless(
    text: str,
    spans: Sequence[Span],
    answers: Sequence[int],
    stops: tuple[str, ...],
    message_span: Callable[[int], Span],
    words: OptionNames,
) -> None:
    """Raises Unfit if one of the answers does not end with a learned stop token.

    A model that learned such answers would continue with the next message of the conversation. The last message of a
    conversation needs no such check, because the end-of-document token ends it.

    Args:
        text: a rendered conversation.
        spans: character spans that are trained on, in order. An answer can have several.
        answers: indices of the answers that are trained on, without the last message of the conversation.
        stops: stop tokens.
        message_span: function from the index of an answer to its span in the text.
        words: names of options in the message.
    """

    def ends(position: int) -> bool:
        return text[max(0, position - FARTHEST) : position].rstrip().endswith(stops)

    following = [start for start, _ in spans[1:]] + [len(text) + 1]
    gaps = [end for (_, end), start in zip(spans, following, strict=True) if end < start]  # ends of learned text
    if all(map(ends, gaps[:-1])) and (len(gaps) > len(answers) or all(map(ends, gaps[-1:]))):
        return
    for number in answers:
        try:
            start, stop = message_span(number)
        except Unfit:  # the template renders the answer differently when messages follow
            continue
        last = max((end for begin, end in spans if start <= begin and end <= stop), default=start)
        if not ends(last):
            raise Unfit(
                "a model would not learn to end answers: an answer before the last one has no stop token that is "
                f"trained on; use a {words.name('chat_template')} that marks the end-of-turn token with "
                f"{{% generation %}}, or set {words.setting('train_on', 'last')}"
            )


def first_token(text: str, added: Iterable[str]) -> str:
    """Returns the longest added token with which a text begins, without leading white space; "" if there is none."""
    return max((token for token in added if text.lstrip().startswith(token)), key=len, default="")


def stop_token(template: ChatTemplate, added: Iterable[str]) -> str:
    """Returns the added token that a template writes after an answer; "" if there is none."""
    messages = [{"role": "user", "content": "weft"}, {"role": "assistant", "content": SAMPLE}]
    try:
        return first_token(template.render(messages)[0].partition(SAMPLE)[2], added)
    except Unfit:  # the template renders other messages only
        return ""
