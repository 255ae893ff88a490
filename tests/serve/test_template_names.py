"""Keys of messages and variables that a chat template does not use are refused, with the names that it uses."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from weft.data.conversations.messages import REASONING
from weft.data.conversations.template import ChatTemplate, TemplateSource
from weft.serve.template_names import names_of

USER = {"role": "user", "content": "Kalo mi ren?"}
# The keys that the classes of `openai`, `langchain-openai` and `litellm` have in messages.
CALLS = [{"id": "a", "type": "function", "function": {"name": "ren", "arguments": "{}"}, "index": 0}]
CLIENTS = [
    USER | {"name": "Ana"},
    {"role": "assistant", "content": "Sta.", "refusal": None, "annotations": [], "audio": None, "function_call": None},
    USER | {"tool_calls": None, "cache_control": None},
    {"role": "assistant", "content": None, "tool_calls": CALLS, "provider_specific_fields": None},
    {"role": "tool", "content": "7 shi", "tool_call_id": "a", "name": "ren"},
]


class Recorder(dict):
    """A message that records which of its keys are read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.read.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_6", "llama3_1", "gptoss", "gemma4", "lfm2_2_5", "deepseekv3"])
def test_all_keys_that_a_template_reads_are_known(name):
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations
    source = (Path(folder) / "chat_templates" / f"{name}.jinja").read_text()
    messages = [Recorder(USER), Recorder({"role": "assistant", "content": "Sta."}), Recorder(USER)]
    ChatTemplate(TemplateSource(name, source), {"bos_token": "<s>"}).render(messages, prompt=True)
    read = {key for message in messages for key in message.read}.difference(REASONING)  # which Weft reads, too
    assert {"role", "content"} <= read <= names_of(source).keys
    assert "thinking_effort" not in names_of(source).variables | names_of(source).keys


@pytest.mark.parametrize(
    ("source", "variables", "keys"),
    [
        ("{% for m in messages %}{{ m['a'] }}{{ m.b }}{{ m.get('c') }}{{ 'd' in m }}{{ m | attr('e') }}{% endfor %}",
         {"messages"}, {"a", "b", "c", "d", "e"}),
        ("{{ messages[0].a.split('x')[0] }}{% set ns = namespace(b=1) %}{% set ns.b = 2 %}{{ ns.b }}{{ loop.first }}",
         {"messages", "loop"}, {"a"}),
        ("{% set a = a | default(1) %}{% set b = 2 %}{{ a }}{{ b }}{% if c is defined %}{{ d }}{% endif %}",
         {"a", "c", "d"}, set()),
        ("{% if messages %}{% set e = 1 %}{% endif %}{{ e }}{{ raise_exception('x') }}", {"messages"}, set()),
        ("{% for m in messages[1:] | list %}{{ m | tojson }}{% endfor %}", {"messages"}, None),
        ("{% set first = messages[0] %}{{ first }}", {"messages"}, None),
        ("{% for m in messages %}{% for k, v in m.items() %}{{ v }}{% endfor %}{% endfor %}", {"messages"}, None),
        ("{% for m in messages %}{% for c in m.calls %}{{ c | tojson }}{% endfor %}{% endfor %}{{ messages | length }}",
         {"messages"}, {"calls"}),
    ],
)  # fmt: skip
def test_names_of_small_templates(source, variables, keys):
    found = names_of(source)
    assert (found.variables, found.keys) == (variables, keys)


def test_names_without_effect_are_refused(serve, tools_model):
    async def test(client):
        answer = await client.post("/v1/chat/completions", json={"messages": CLIENTS, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        for path in ("/v1/chat/completions", "/tokenize"):
            for body, param, said in (
                ({"messages": [USER, USER | {"prefix": True}]}, "messages.1.prefix", "tool_calls"),
                ({"messages": [USER | {"audio": {"id": "a"}}]}, "messages.0.audio", "tool_calls"),
                ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking",
                 "bos_token"),
                ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "bos_token"),
                ({"messages": [{"role": "assistant", "tool_calls": [CALLS[0] | {"kind": 1}]}]},
                 "messages.0.tool_calls.0.kind", "kind"),
            ):  # fmt: skip
                response = await client.post(path, json={"messages": [USER]} | body)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, "unknown_parameter"), error
                assert error["param"] == param
                assert said in error["message"]
        kept = {"messages": [USER], "chat_template_kwargs": {"bos_token": "Ka"}}
        tokens = (await client.post("/tokenize", json=kept)).json()["tokens"]
        assert client.models[0].tokenizer.decode(tokens).startswith("Ka")

    serve(test, folder=tools_model)


def test_the_tokenizer_is_described(serve, tools_model):
    async def test(client):
        info = (await client.get("/tokenizer_info", params={"model": "tiny"})).json()
        theirs = AutoTokenizer.from_pretrained(tools_model)
        assert (info["bos_token"], info["eos_token"]) == (theirs.bos_token, theirs.eos_token)
        assert info["chat_template"] == theirs.chat_template
        assert info["model_max_length"] == 512
        assert (await client.get("/tokenizer_info", params={"model": "no"})).json()["error"]["param"] == "model"

    serve(test, folder=tools_model)
