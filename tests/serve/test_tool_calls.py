"""Tool calls are read from the text that chat templates of other libraries write, however the text is cut."""

import importlib.util
import json
import random
import time
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer as TheirTokenizer
from tokenizers import decoders, models, pre_tokenizers

import weft
from weft.data.conversations.template import ChatTemplate, TemplateSource
from weft.errors import UserError
from weft.generation.constraints import Constraint
from weft.serve.tool_calls import Call, ToolCallParser, join_deltas
from weft.serve.tool_format import find_tool_format, plain_arguments
from weft.serve.tool_grammar import tool_grammar

# Mistral's template of version 3 (with an id of exactly 9 characters), and the way of writing calls of version 11.
MISTRAL = """\
{%- for message in messages %}
{%- if message.role == 'user' %}[INST] {{ tools | tojson if tools }} {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('9 characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}]</s>
{%- else %} {{ message.content }}</s>{% endif %}
{%- endfor %}"""
MISTRAL_11 = """\
{%- for message in messages %}
{%- if message.role == 'user' %}[INST]{{ tools | tojson if tools }}{{ message.content }}[/INST]
{%- else %}{{ message.content }}
{%- for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}</s>{% endif %}
{%- endfor %}"""
SPECIAL = ("<eos>", "[TOOL_CALLS]", "[ARGS]")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = {"weather": CITY, "get-time": {"type": "object", "properties": {}, "additionalProperties": False}}
HARD = {"city": '}"]</tool_call>\\', "list": [{"a": "\n]"}, None, 1.5e3], "empty": {}, "name": "é日"}
ONE, TWO = [Call("a", "weather", json.dumps(HARD))], [Call("a", "weather", json.dumps(HARD)), Call("b", "get-time")]
LIBRARY = ("qwen2_5", "qwen3", "llama3_1", "deepseekv3")


def source(name):
    if name in (texts := {"mistral": MISTRAL, "mistral_11": MISTRAL_11}):
        return texts[name]
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations
    return (Path(folder) / "chat_templates" / f"{name}.jinja").read_text()


def template(name):
    return ChatTemplate(TemplateSource(name, source(name)), {"bos_token": "<s>", "eos_token": "</s>"})


def written(chat, form, calls):
    """What the template writes for an assistant message with these calls."""
    tools = [
        {"type": "function", "function": {"name": n, "parameters": p, "description": ""}} for n, p in TOOLS.items()
    ]
    function = [{"name": call.name, "arguments": call.arguments or "{}"} for call in calls]
    given = [{"id": f"{i:09}", "type": "function", "function": one} for i, one in enumerate(function)]
    user = {"role": "user", "content": "Hi"}
    (message,) = plain_arguments([{"role": "assistant", "content": "", "tool_calls": given}], form.text_arguments)
    full, plain = (chat.render([user, m], tools)[0] for m in (message, {"role": "assistant", "content": "SAMPLE"}))
    head, _, tail = plain.rpartition("SAMPLE")
    return full[next(i for i, (a, b) in enumerate(zip(full, head + "\0", strict=False)) if a != b) :].removesuffix(tail)


def read(form, text, seed=None):
    """The content and the calls of a text, which arrives in one piece or is cut at random places."""
    parser, parts = ToolCallParser(form, set(TOOLS)), [text]
    if seed is not None:
        cuts = sorted(random.Random(seed).choices(range(len(text) + 1), k=min(20, len(text))))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    deltas = [delta for part in parts for delta in parser.feed(part)] + parser.finish()
    return join_deltas(deltas)


@pytest.mark.parametrize("name", [*LIBRARY, "mistral", "mistral_11"])
def test_calls_are_read_as_the_template_writes_them(name):
    chat = template(name)
    form = find_tool_format(chat)
    for calls in (ONE, TWO)[: 1 if name == "llama3_1" else 2]:  # Llama's template refuses two calls
        text = written(chat, form, calls)
        for seed in (None, *range(20)):
            content, found = read(form, text, seed)
            assert content == ""
            assert [call.name for call in found] == [call.name for call in calls]
            assert [json.loads(call.arguments) for call in found] == [json.loads(c.arguments or "{}") for c in calls]
            assert len({call.id for call in found}) == len(found)
            assert all(len(call.id) == 9 for call in found) == (name == "mistral")


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3_5_think"])
def test_a_template_that_writes_no_json_calls_has_no_format(name):
    assert find_tool_format(template(name)) is None


CASES = [
    ("qwen2_5", 'Yes.\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>\n', "Yes.", "{}"),
    ("qwen2_5", '<tool_call>{"arguments":{"a":1},"name":"weather"}</tool_call>', "", '{"a":1}'),
    ("qwen2_5", '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>', "", '{"a": 1}'),
    ("qwen2_5", '<tool_call>{"name": "weather"}</tool_call>', "", "{}"),
    ("qwen2_5", '<tool_call>{"name": "other", "arguments": {"a": 1}}', "", '{"a": 1}'),
    ("qwen2_5", "a <tool_call>junk</tool_call> b\n", "a <tool_call>junk</tool_call> b\n", None),
    ("qwen2_5", '<tool<tool_call>[] <tool_call>{"name":"weather","arguments":{}}', "<tool<tool_call>[]", "{}"),
    ("qwen2_5", '<tool_call>{"city": "Oslo"}</tool_call>', '<tool_call>{"city": "Oslo"}</tool_call>', None),
    ("qwen2_5", '{"name": "weather", "arguments": {}}', '{"name": "weather", "arguments": {}}', None),
    ("qwen2_5", " \n kept \n", " \n kept \n", None),
    # The text ends within a call.
    ("qwen2_5", '<tool_call>{"name": "weather", "arguments": {"a": "b', "", '{"a": "b'),
    ("qwen2_5", '<tool_call>{"name": "weather", "arguments": {"a": 1}, "id"', "", '{"a": 1}'),
    ("qwen2_5", '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_', "", '{"a": 1}'),
    ("qwen2_5", '<tool_call>{"name": "weather", "argu', '<tool_call>{"name": "weather", "argu', None),
    ("mistral_11", "[TOOL_CALLS]weather[AR", "[TOOL_CALLS]weather[AR", None),
    # Llama has no marker: only a call of a known tool at the beginning is no content.
    ("llama3_1", '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"a": 1}}', "", '{"a": 1}'),
    ("llama3_1", '\n{"name": "weather", "parameters": {"a": 1}} Done.', " Done.", '{"a": 1}'),
    ("llama3_1", '{"name": "Bob", "parameters": {"a": 1}}', '{"name": "Bob", "parameters": {"a": 1}}', None),
    ("llama3_1", '{"name": "weather", "age": 3}', '{"name": "weather", "age": 3}', None),
    ("llama3_1", 'Call {"name": "weather", "parameters": {}}', 'Call {"name": "weather", "parameters": {}}', None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "arguments"), CASES)
def test_texts_that_are_no_calls_stay_content(name, text, content, arguments):
    form = find_tool_format(template(name))
    for seed in (None, *range(10)):
        found, calls = read(form, text, seed)
        assert (found, [call.arguments for call in calls]) == (content, [] if arguments is None else [arguments])


def test_parts_are_returned_as_soon_as_they_are_certain():
    parser = ToolCallParser(find_tool_format(template("qwen2_5")), TOOLS)
    steps = [
        ("Yes <tool_", [("Yes", None, None, "")]),
        ('call>{"name": "weather", "argu', []),
        ('ments": ', []),
        ("{", [("", 0, "weather", ""), ("", 0, None, "{")]),
        ('"a": "}', [("", 0, None, '"a": "}')]),
        ('"}', [("", 0, None, '"}')]),
        ('}</tool_call>\n<tool_call>{"name": "x", "arguments": {}}', [("", 1, "x", ""), ("", 1, None, "{}")]),
    ]
    for text, expected in steps:
        assert [(d.content, d.index, d.name, d.arguments) for d in parser.feed(text)] == expected


LONG = json.dumps({"text": 'né " }] ' * 15_000, "list": [1, None, {"a": True}] * 3_000})
LONG_TEXTS = [  # characters per piece, text, content and arguments
    (5, '<tool_call>{"name": "weather", "arguments": ' + LONG + "}</tool_call>", "", LONG),
    (10**6, '<tool_call>{"arguments": ' + LONG + ', "name": "weather"}</tool_call>', "", LONG),
    (5, " " * 200_000 + "a", " " * 200_000 + "a", None),
    # Each marker could begin a call that lasts up to the end of the text.
    (10**6, *('<tool_call>{"arguments": {"<tool_call>{"arguments": {"' * 2_000,) * 2, None),
    (5, *('<tool_call>{"arguments": {' * 4_000,) * 2, None),
]


@pytest.mark.parametrize("number", range(len(LONG_TEXTS)))
def test_long_texts_are_read_in_linear_time(number):
    """In quadratic time, this test would take minutes."""
    size, text, content, arguments = LONG_TEXTS[number]
    parser = ToolCallParser(find_tool_format(template("qwen2_5")), TOOLS)
    deltas = [delta for at in range(0, len(text), size) for delta in parser.feed(text[at : at + size])]
    found, calls = join_deltas(deltas + parser.finish())
    assert (found, [call.arguments for call in calls]) == (content, [] if arguments is None else [arguments])


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """A tokenizer whose tokens are bytes, special tokens of Mistral, and a token that is not special."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = TheirTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    made.add_tokens(["<tool_call>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0]}))
    return weft.Tokenizer.load(folder)


@pytest.mark.parametrize("name", [*LIBRARY, "mistral", "mistral_11"])
def test_a_grammar_accepts_only_calls_that_follow_the_schemas(name, byte_tokenizer):
    form = find_tool_format(template(name))
    for several in (False, True):
        grammar = tool_grammar(form, TOOLS, byte_tokenizer, several=several)
        sampling = weft.Sampling(max_new_tokens=1, grammar=grammar)
        generator = random.Random(5)
        for _ in range(3):  # random texts of the grammar
            constraint = Constraint(byte_tokenizer, sampling.constraint, [byte_tokenizer.eod_id])
            ids = []
            while len(ids) < 600:
                allowed = constraint.mask(ids).nonzero().flatten().tolist()
                ids.append(byte_tokenizer.eod_id if byte_tokenizer.eod_id in allowed else generator.choice(allowed))
                if ids[-1] == byte_tokenizer.eod_id or constraint.advance(ids):
                    break
            content, calls = read(form, byte_tokenizer.decode([id for id in ids if id != byte_tokenizer.eod_id]))
            assert content == ""
            assert len(calls) == 1 or (several and form.separator is not None)
            for call in calls:
                jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])


def test_a_schema_of_a_tool_that_cannot_be_enforced_is_refused(byte_tokenizer):
    form = find_tool_format(template("qwen2_5"))
    bad = {"properties": {"city": {"not": {"type": "string"}}}}
    with pytest.raises(UserError, match=r"'weather'.*/properties/city/not.*remove"):
        tool_grammar(form, {"weather": bad}, byte_tokenizer, several=False)


def test_text_without_calls_is_read_fast():
    """The server reads a complete answer between two events, so a slow parser would hold up other requests."""
    form, text = find_tool_format(template("qwen2_5")), "A long answer, with <b>tags</b>.\n" * 3_000

    def seconds(pieces):
        parser, begin = ToolCallParser(form, set(TOOLS)), time.process_time()
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
        taken = time.process_time() - begin
        assert join_deltas(deltas) == (text, [])
        return taken

    # Relative to the same text in pieces of one character, so that the speed of the processor does not count.
    assert min(seconds([text]) for _ in range(3)) < 0.3 * min(seconds(text) for _ in range(2))
