"""Defines named chat templates, which mark the assistant's text with `{% generation %}`, for `--chat-template`."""

from __future__ import annotations

from typing import NamedTuple


class NamedTemplate(NamedTuple):
    """A built-in chat template that can be chosen by name.

    Attributes:
        source: Jinja source code of the template.
        markers: special tokens in the source, which the tokenizer should have.
    """

    source: str
    markers: tuple[str, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        """The names of the special-token variables in the template: `bos_token` and `eos_token`, if it uses them."""
        return tuple(name for name in ("bos_token", "eos_token") if name in self.source)


# Formats that do not support tools refuse records with tools.
_NO_TOOLS = """\
{%- if tools -%}{{- raise_exception('this chat template does not support tools') -}}{%- endif -%}
{%- for message in messages if message['tool_calls'] -%}
    {{- raise_exception('this chat template does not support tool calls') -}}
{%- endfor -%}
"""

# White space after the end of a message is outside the marks, because a model stops before that white space.
_CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] | trim + '<|eot_id|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

_ZEPHYR = """\
{%- for message in messages -%}
    {{- '<|' + message['role'] + '|>\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + eos_token -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""

# Formats without system messages: the system text is part of the first message, and user and assistant must alternate.
_ALTERNATE = """\
{%- set system = messages[0]['content'] if messages and messages[0]['role'] == 'system' else none -%}
{%- set turns = messages if system is none else messages[1:] -%}
{%- for message in turns -%}
    {%- if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
        {{- raise_exception('questions and answers must alternate, the first being the user\\'s') -}}
    {%- endif -%}
{%- endfor -%}
"""

_LLAMA2 = (
    _ALTERNATE
    + """\
{%- for message in turns -%}
    {%- if message['role'] == 'user' -%}
        {{- bos_token + '[INST] ' -}}
        {%- if loop.first and system is not none -%}
            {{- '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' -}}
        {%- endif -%}
        {{- message['content'] | trim + ' [/INST]' -}}
    {%- else -%}
        {%- generation -%}{{- ' ' + message['content'] | trim + ' ' + eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""
)

_MISTRAL = (
    _ALTERNATE
    + """\
{{- bos_token -}}
{%- for message in turns -%}
    {%- if message['role'] == 'user' -%}
        {{- '[INST] ' -}}
        {%- if loop.first and system is not none -%}{{- system + '\\n\\n' -}}{%- endif -%}
        {{- message['content'] + '[/INST]' -}}
    {%- else -%}
        {%- generation -%}{{- ' ' + message['content'] + eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""
)

_GEMMA = (
    _ALTERNATE
    + """\
{{- bos_token -}}
{%- for message in turns -%}
    {%- if message['role'] == 'user' -%}
        {{- '<start_of_turn>user\\n' -}}
        {%- if loop.first and system is not none -%}{{- system + '\\n\\n' -}}{%- endif -%}
        {{- message['content'] | trim + '<end_of_turn>' -}}
    {%- else -%}
        {{- '<start_of_turn>model\\n' -}}
        {%- generation -%}{{- message['content'] | trim + '<end_of_turn>' -}}{%- endgeneration -%}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
)

_VICUNA = (
    _ALTERNATE
    + """\
{{- bos_token -}}
{%- if system is not none -%}
    {{- system -}}
{%- else -%}
    {{- 'A chat between a curious user and an artificial intelligence assistant. ' -}}
    {{- 'The assistant gives helpful, detailed, and polite answers to the user\\'s questions.' -}}
{%- endif -%}
{{- ' ' -}}
{%- for message in turns -%}
    {%- if message['role'] == 'user' -%}
        {{- 'USER: ' + message['content'] + ' ' -}}
    {%- else -%}
        {{- 'ASSISTANT:' -}}
        {%- generation -%}{{- ' ' + message['content'] + eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""
)

# Contents only, for messages that already contain markers. Adds a line end between an answer and the next message if
# there is no line end. Otherwise a token could span both, and training on it would train on the user's text.
_PLAIN = """\
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + '' -}}{%- endgeneration -%}
        {%- if not loop.last and message['content'][-1:] != '\\n' and loop.nextitem['content'][:1] != '\\n' -%}
            {{- '\\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- message['content'] + '' -}}
    {%- endif -%}
{%- endfor -%}
"""

_FORMATS = {
    "chatml": (_CHATML, "<|im_start|>", "<|im_end|>"),
    "llama2": (_LLAMA2,),
    "llama3": (_LLAMA3, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": (_GEMMA, "<start_of_turn>", "<end_of_turn>"),
    "mistral": (_MISTRAL, "[INST]", "[/INST]"),
    "zephyr": (_ZEPHYR,),
    "vicuna": (_VICUNA,),
    "plain": (_PLAIN,),
}
NAMED = {name: NamedTemplate(_NO_TOOLS + source, tuple(markers)) for name, (source, *markers) in _FORMATS.items()}
