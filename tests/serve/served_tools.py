"""A conversation with tool calls, which a tiny model learns by heart (fixture `tools_model`)."""

TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}<|im_start|>system
{% for tool in tools -%}{{- tool.function | tojson -}}{%- endfor -%}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{- message.role -}}
{{- '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
PLACE = {
    "type": "object",
    "properties": {"ka": {"type": "string"}, "lo": {"type": "integer"}},
    "required": ["ka", "lo"],
}
TOOLS = [
    {"type": "function", "function": {"name": "ren", "parameters": PLACE | {"additionalProperties": False}}},
    {"type": "function", "function": {"name": "tu", "parameters": {"type": "object", "additionalProperties": False}}},
]
CALLS = [("ren", {"ka": "né 日本", "lo": 3}), ("tu", {})]
FUNCTIONS = [{"name": name, "arguments": arguments} for name, arguments in CALLS]
USER = {"role": "user", "content": "Kalo mi ren?"}
CALLING = {
    "role": "assistant",
    "content": "Mi vo.",
    "tool_calls": [{"id": f"c{i}", "type": "function", "function": one} for i, one in enumerate(FUNCTIONS)],
}
RESULT = {"role": "tool", "content": "7 shi", "tool_call_id": "c0"}
ANSWER = {"role": "assistant", "content": "Sta tu 7 shi."}
SCHEMA = {
    "type": "object",
    "properties": {"ka": {"enum": ["lo", "mi"]}, "tu": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["ka", "tu"],
    "additionalProperties": False,
}
