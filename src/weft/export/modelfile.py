"""Writes an Ollama Modelfile for a GGUF file."""

from __future__ import annotations

import itertools

from weft.checkpoint.gguf.special import SpecialTokens
from weft.data.conversations.template import ChatTemplate
from weft.data.sources.values import Unfit

_TEXTS = {"system": "weft-system", "user": "weft-user", "assistant": "weft-assistant"}


def modelfile(tokens: SpecialTokens, context: int) -> str:
    """Returns the lines of a Modelfile after FROM: the template of messages, stop tokens and the context length.

    Ollama has Go templates. A chat template is translated if it writes each message independently of the others;
    otherwise Ollama looks for a known template in the GGUF file.
    """
    lines = []
    template = None if tokens.template is None else go_template(tokens.template)
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    elif tokens.template is not None:
        lines.append("# The chat template cannot be translated for Ollama, which uses a similar one if it knows one.")
    lines += [f"PARAMETER stop {_quoted(token)}" for token in tokens.stops]
    return "\n".join([*lines, f"PARAMETER num_ctx {context}", ""])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def go_template(template: ChatTemplate) -> str | None:
    """Translates a chat template to a Go template of Ollama; None if the messages are not written independently.

    The text around each message is found by rendering messages. The result is compared with the chat template for
    several conversations.
    """
    try:
        start, around, prompt = _find_parts(template)
        turns = ["user", "assistant", "user"]
        for roles in (["user"], ["system", "user"], turns, ["system", *turns]):
            messages = [{"role": role, "content": f"{_TEXTS[role]}-{n}"} for n, role in enumerate(roles)]
            texts = (around[one["role"]][0] + one["content"] + around[one["role"]][1] for one in messages)
            if template.render(messages, prompt=True)[0] != "".join(itertools.chain([start], texts, [prompt])):
                return None
    except (Unfit, ValueError):
        return None
    if any(mark in text for text in (start, prompt, *itertools.chain(*around.values())) for mark in ("{{", '"""')):
        return None
    cases = "".join(
        f'{{{{ {"else if" if n else "if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        for n, (role, (before, after)) in enumerate(around.items())
    )
    return f"{start}{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}{prompt}"


def _find_parts(template: ChatTemplate) -> tuple[str, dict[str, tuple[str, str]], str]:
    """Returns the text at the start, the texts before and after a message of each role, and the text before an answer.

    Raises:
        ValueError: a message's text is changed.
    """
    messages = [{"role": role, "content": _TEXTS[role]} for role in ("system", "user", "assistant", "user")]
    plain, _ = template.render(messages)
    full, _ = template.render(messages, prompt=True)
    if not full.startswith(plain):
        raise ValueError
    once, twice = (template.render([messages[1]] * n)[0] for n in (1, 2))
    user = len(twice) - len(once)  # length of a message of the user
    start = once[: len(once) - user]
    before, after = twice[len(once) :].split(_TEXTS["user"])
    around = {"user": (before, after)}
    # The text between two messages ends with the beginning of the message of the user, which is known.
    rest = plain.removeprefix(start)
    system, rest = _cut(rest, _TEXTS["system"], before + _TEXTS["user"] + after)
    around = {"system": system, "user": (before, after)}
    around["assistant"], _ = _cut(rest, _TEXTS["assistant"], before + _TEXTS["user"] + after)
    return start, around, full[len(plain) :]


def _cut(text: str, content: str, following: str) -> tuple[tuple[str, str], str]:
    """Splits a text at a message and the message that follows. Returns the texts around the first, and the rest."""
    own, sign, rest = text.partition(following)
    if not sign:
        raise ValueError
    before, after = own.split(content)
    return (before, after), rest
