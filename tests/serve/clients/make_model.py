"""Writes the tiny chat model of the tests, with a chat template that knows tools, to the folder FOLDER/tiny."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3] / "src")]
from chat_model import make_chat_model  # noqa: E402

from weft.cli.main import main  # noqa: E402

# Tools and calls as Hermes and Qwen write them.
TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|im_start|>system\\nTools: ' + tools | tojson -}}
{{- ' Call one: <tool_call>\\n{"name": NAME, "arguments": {}}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set made = {'name': call.function.name, 'arguments': call.function.arguments} -%}
{{- '<tool_call>\\n' + made | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

folder = Path(sys.argv[1])
(folder / "corpus").mkdir()
text = "hello good morning add name age Kalo Ren Be short. What is 2 + 3? tools call arguments Tools: {} [] né 日本"
(folder / "corpus" / "a.txt").write_text("\n".join(f"{text} {number}" for number in range(400)), encoding="utf-8")
main(["data", "train-tokenizer", str(folder / "corpus"), "--vocab-size", "320", "--out", str(folder / "tok")])
made = make_chat_model(folder / "tok", folder / "tiny")
(made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
