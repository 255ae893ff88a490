"""Rollouts of several turns: the model calls tools, and their results are appended to the tokens."""

import json
import shutil

import pytest
from rollout_runs import settings, write_inputs
from running import metrics, train

from weft.cli.main import main
from weft.data.conversations.template import ChatTemplate, find_template
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.train.rollouts.conversation import ConversationFormat
from weft.train.rollouts.draft import Draft
from weft.train.rollouts.prompts import RolloutPrompt
from weft.train.rollouts.tools import Tools, find_call

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
# As the template chatml, with tools.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = [{"role": "user", "content": "ka 2 + 3?"}]


@pytest.fixture(autouse=True)
def _inputs(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def chat_tokenizer(tiny_corpus, tmp_path_factory):
    """The folder of a tokenizer with the special tokens of its chat template."""
    folder = tmp_path_factory.mktemp("chat") / "tok"
    special = [part for token in ("<|im_start|>", "<|im_end|>") for part in ("--special", token)]
    command = ["data", "train-tokenizer", tiny_corpus / "train", "--vocab-size", "512", *special, "--out", folder]
    assert main([*map(str, command)]) == 0
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def tools():
    return Tools(["rollout_rewards:add"], 5.0)


@pytest.fixture
def conversation(chat_tokenizer, tools):
    template = ChatTemplate.for_tokenizer(find_template(chat_tokenizer), chat_tokenizer)
    return ConversationFormat(Tokenizer.load(chat_tokenizer), template, tools.schemas)


def draft_of(conversation, length=1024, new_tokens=128):
    return Draft(RolloutPrompt(conversation.prompt(QUESTION), QUESTION, {}, "p.jsonl:1"), 0, length, new_tokens)


def add(draft, conversation, tools, text, complete=True):
    tokenizer = conversation.tokenizer
    ids = tokenizer.encode(text) + [tokenizer.added_tokens["<|im_end|>"]] * complete
    draft.add(ids, [-0.5] * len(ids), complete, tokenizer)
    draft.call_tool(ids, tools, conversation)


def test_the_result_of_a_tool_is_appended_as_the_template_writes_it(conversation, tools):
    draft = draft_of(conversation)
    add(draft, conversation, tools, CALL)
    assert draft.active
    add(draft, conversation, tools, "5")
    assert not draft.active
    answers = [{"role": "assistant", "content": text} for text in (CALL, "5")]
    done, messages = (
        draft.completion(),
        [*QUESTION, answers[0], {"role": "tool", "name": "add", "content": "5"}, answers[1]],
    )
    assert done.messages == messages
    assert done.answers == [CALL, "5"]
    text, _ = conversation.template.render(messages, tools.schemas)
    assert conversation.tokenizer.decode(done.ids) == text.rstrip()
    # The tokens of the whole conversation, encoded at once, and the learned ones: answers with their ends.
    assert done.ids == conversation.tokenizer.encode(text.rstrip())
    learned = conversation.tokenizer.decode([i for i, on in zip(done.ids, done.learned, strict=True) if on])
    assert learned == f"{CALL}<|im_end|>5<|im_end|>"
    assert [p == -0.5 for p in done.logprobs] == [bool(on) for on in done.learned]
    assert not done.truncated


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('{"name": "add", "parameters": {"a": 1, "b": 1}}', "2"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "Error: TypeError"),
        ('<tool_call>{"name": "drop", "arguments": {}}</tool_call>', "Error: there is no tool 'drop'"),
    ],
)
def test_wrong_calls_get_their_error_as_the_result(text, result, conversation, tools):
    draft = draft_of(conversation)
    add(draft, conversation, tools, text)
    assert draft.completion().messages[-1]["content"].startswith(result)


def test_what_calls_no_tool_or_has_no_room_ends(conversation, tools):
    full = len(conversation.prompt(QUESTION)) + len(conversation.tokenizer.encode(CALL)) + 9  # no room for the result
    for text, complete, length in (("ka", True, 1024), (CALL, False, 1024), (CALL, True, full)):
        draft = draft_of(conversation, length=length)
        add(draft, conversation, tools, text, complete)
        assert not draft.active
        assert draft.completion().truncated == (text == CALL)
        assert len(draft.ids) <= length
    text = Draft(RolloutPrompt([5, 6], "ka 2 + 3?", {}, "p.jsonl:1"), 0, 1024, 128)  # has not shown the tools
    add(text, conversation, tools, CALL)
    assert not text.active
    assert text.completion().messages == []
    assert find_call("<tool_call>{broken</tool_call>") is None
    assert find_call('{"name": 3}') is None
    assert find_call("[" * 100_000) is None


def test_a_tool_that_ends_the_process_or_returns_an_odd_value_gives_an_error():
    tools = Tools(["rollout_rewards:leave"], 5.0)
    assert tools.call("leave", {}) == "Error: RuntimeError: SystemExit: 3"
    loop = []
    loop.append(loop)
    tools.functions["leave"].function = lambda: loop
    assert tools.call("leave", {}).startswith("Error: ValueError: Circular")


def test_schemas_describe_the_functions(tools):
    (schema,) = tools.schemas
    assert schema["function"] == {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }


def test_functions_whose_arguments_are_not_known_are_refused(tmp_path):
    code = "from __future__ import annotations\nclass Add:\n    def __call__(self, a: int): return a\nadd = Add()\n"
    (tmp_path / "odd_tools.py").write_text(code + "def late(a: Decimal): return a\n")
    (schema,) = Tools(["odd_tools:add"], 5.0).schemas
    assert schema["function"]["parameters"]["properties"] == {"a": {"type": "integer"}}
    with pytest.raises(UserError, match=r"odd_tools.py:5: tools odd_tools:late has type hints .* 'Decimal' is not def"):
        Tools(["odd_tools:late"], 5.0)
    with pytest.raises(UserError, match="does not know the arguments of 'builtins:min'; name a Python function"):
        Tools(["builtins:min"], 5.0)


def test_a_run_with_tools_trains_on_messages(chat_tokenizer, run_yaml, tmp_path, capsys):
    lines = [json.dumps({"messages": [{"role": "user", "content": f"ka {n}"}], "number": n}) for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copytree(chat_tokenizer, tmp_path / "tok")
    several = {"tools": ["rollout_rewards:add"], "max_turns": 2, "reward": "rollout_rewards:each"}
    sections = settings(
        several, model={"max_position_embeddings": 512}, training={"steps": 1}, data={"sequence_length": 512}
    )
    assert train(run_yaml(**sections, tokenizer=str(tmp_path / "tok"))) == 0
    assert metrics(tmp_path / "runs" / "demo")[0]["reward"] == 0.5
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ka", "number": 1}\n')
    assert train(run_yaml(**sections, tokenizer=str(tmp_path / "tok")), "--fresh") == 2
    assert "tools need prompts of messages" in capsys.readouterr().err
