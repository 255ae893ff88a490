"""Records of every layout become the same conversations, and what is none is a reject with its reason."""

import random

import pytest
from chat_cases import ASKED, CHAT, NO, ONE, PAIR, SAID, TWICE, WORDS, chat_folder, encode, encoder, without_marks  # noqa: F401 (the fixture)

from weft.data.conversations.layouts import choose_layout, read_record
from weft.data.conversations.named_templates import NAMED
from weft.data.sources.values import Unfit
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError

TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
READ = {
    "messages": ONE,
    "text parts": {"messages": [{"role": "user", "content": ["H", {"type": "text", "text": "i"}]}, SAID]},
    "nulls": {"messages": [ASKED | {"name": None}, SAID | {"tool_calls": None}]},
    "conversation with roles": {"conversation": [ASKED, SAID], "language": "en"},
    "sharegpt": {"conversations": TURNS},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Yo"},
    "dolly": {"instruction": "Hi", "context": "", "response": "Yo", "category": "chat"},
    "input and target": {"input": "Hi", "target": "Yo"},
    "prompt and response": {"prompt": "Hi", "response": "Yo"},
    "prompt and completion": {"prompt": "Hi", "completion": "Yo"},
    "input and output": {"input": "Hi", "output": "Yo"},
    "question and answer": {"question": "Hi", "answer": "Yo"},
    "prompt and completion of messages": {"prompt": [ASKED], "completion": [SAID]},
}


@pytest.mark.parametrize("record", READ.values(), ids=list(READ))
def test_every_layout_gives_the_same_conversation(folder, record):
    documents, encoded = encode(encoder(folder, WORDS, choose_layout([record])), [record])
    assert encoded.rejects == []
    assert documents == encode(encoder(folder, WORDS), [{"messages": [ASKED, SAID]}])[0]


def test_what_layouts_hold_beside_question_and_answer():
    def messages(record):
        return read_record(record, choose_layout([record]))[0].messages

    system = {"role": "system", "content": "Be brief."}
    assert messages({"system": "Be brief.", "conversations": TURNS}) == [system, ASKED, SAID]
    assert messages(
        {
            "instruction": "Hi",
            "input": "there",
            "output": "Yo",
            "system": "Be brief.",
            "history": [["Hi", "Yo"]],
        }
    ) == [system, ASKED, SAID, {"role": "user", "content": "Hi\nthere"}, SAID]
    called = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}
    result = {"from": "observation", "value": "2"}
    record = {"conversations": [TURNS[0], called, result, TURNS[1]], "tools": '[{"name": "f"}]'}
    conversation = read_record(record, choose_layout([record]))[0]
    assert conversation.tools == [{"name": "f"}]
    assert conversation.learned == (1, 3)
    assert conversation.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert conversation.messages[2] == {"role": "tool", "content": "2"}
    weighed = {"messages": [ASKED, SAID | {"weight": 0}, ASKED, SAID]}
    assert read_record(weighed, choose_layout([weighed]))[0].learned == (3,)


BAD = {
    "no field 'messages'": {"text": "x"},
    "field 'messages' is null": {"messages": None},
    "not a list": {"messages": "Hi"},
    "no messages": {"messages": []},
    "not an object": {"messages": ["Hi"]},
    "a message without 'role'": {"messages": [ASKED, {"content": "Yo"}]},
    "unknown role": {"messages": [ASKED, {"role": "narrator", "content": "Yo"}]},
    "'content' is null": {"messages": [ASKED, {"role": "assistant", "content": None}]},
    "'content' is missing": {"messages": [{"role": "user"}, SAID]},
    "neither text nor": {"messages": [{"role": "user", "content": 7}, SAID]},
    "a part that is not text": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID]},
    "no assistant message": {"messages": [ASKED]},
    "weight 0": {"messages": [ASKED, SAID | {"weight": 0}]},
    "neither 0 nor 1": {"messages": [ASKED, SAID | {"weight": 0.5}]},
    "a weight that is": {"messages": [ASKED, SAID | {"weight": "0"}, ASKED, SAID]},
    "'tools' is not JSON": {"messages": [ASKED, SAID], "tools": "["},
}


@pytest.mark.parametrize(("reason", "record"), BAD.items(), ids=list(BAD))
def test_what_is_no_conversation_is_a_reject_with_its_reason(folder, reason, record):
    documents, encoded = encode(encoder(folder, TWICE), [{"messages": CHAT}, record, {"messages": CHAT}])
    assert len(documents) == 2
    assert [reject.line for reject in encoded.rejects] == [2]
    assert reason in encoded.rejects[0].reason


@pytest.mark.parametrize(
    ("layout", "record", "reason"),
    [
        ("alpaca", {"instruction": "Hi", "output": None}, "field 'output' is null"),
        ("alpaca", {"instruction": "Hi"}, "no field 'output'"),
        ("pairs", {"input": "Hi", "target": 7}, "not a list of messages"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "f()"}]}, "not JSON"),
        ("preferences", {"chosen": "a", "rejected": "b"}, "no prompt"),
        ("preferences", {"prompt": "Hi", "chosen": "a"}, "no field 'rejected'"),
        ("preferences", {"prompt": "Hi", "chosen": [ASKED], "rejected": [ASKED]}, "share no prompt"),
    ],
)
def test_what_other_layouts_cannot_read(layout, record, reason):
    with pytest.raises(Unfit, match=reason):
        read_record(record, choose_layout([], layout))


def test_the_assistant_may_speak_first_and_nobody_need_answer(folder):
    records = [{"messages": [SAID, ASKED, SAID]}, {"messages": [SAID]}, {"messages": [ASKED, SAID | {"content": ""}]}]
    for source in (NAMED["chatml"].source, without_marks(NAMED["chatml"].source)):
        documents, encoded = encode(encoder(folder, source), records)
        assert not encoded.rejects
        assert all(any(mask) for _, mask in documents)


def test_whatever_a_record_holds_it_is_read_or_rejected():
    chooser = random.Random(9)
    values = [None, "", "Hi", 7, True, [], {}, ["Hi"], [["Hi", "Yo"]], [ASKED, SAID], TURNS, [{"role": ["x"]}], SAID]
    keys = ["messages", "conversations", "role", "prompt", "chosen", "rejected", "instruction", "input", "output"]
    keys += ["target", "system", "history", "tools", "chat_template_kwargs", "from"]
    counts = {"read": 0, "rejected": 0}
    for layout in ("messages", "sharegpt", "alpaca", "pairs", "preferences"):
        for _ in range(2000):
            record = {key: chooser.choice(values) for key in chooser.sample(keys, chooser.randint(1, len(keys)))}
            try:
                for conversation in read_record(record, choose_layout([record], layout)):
                    assert all(conversation.messages[i]["role"] == "assistant" for i in conversation.learned)
                counts["read"] += 1
            except Unfit:
                counts["rejected"] += 1
    assert min(counts.values()) >= 100


def test_keys_can_be_stated(folder):
    record = {"q": "Hi", "a": "Yo"}
    layout = choose_layout([record], None, {"input": "q", "target": "a"})
    assert layout.name == "pairs"
    assert encode(encoder(folder, WORDS, layout), [record])[0] == encode(encoder(folder, WORDS), [ONE])[0]
    with pytest.raises(UserError, match=r"no known layout.*'q', 'a'"):
        choose_layout([record])
    with pytest.raises(UserError, match="the layout pairs has the fields input, target"):
        choose_layout([record], "pairs", {"question": "q"})


# --- Preferences ---

PREFERENCES = {
    "strings": PAIR,
    "a prompt of messages": {"prompt": [ASKED], "chosen": [SAID], "rejected": [NO]},
    "whole conversations": {"chosen": [ASKED, SAID], "rejected": [ASKED, NO]},
    "whole conversations beside the prompt": {"prompt": "Hi", "chosen": [ASKED, SAID], "rejected": [ASKED, NO]},
    "sharegpt": {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "No"}},
    "alpaca": {"instruction": "Hi", "input": "", "chosen": "Yo", "rejected": "No"},
    "question": {"system": "", "question": "Hi", "chosen": "Yo", "rejected": "No"},
}


@pytest.mark.parametrize("record", PREFERENCES.values(), ids=list(PREFERENCES))
def test_a_preference_gives_two_documents_and_only_the_answer_is_learned(folder, record):
    ours = encoder(folder, WORDS, choose_layout([record]))
    assert ours.kind == "preferences"
    documents, encoded = encode(ours, [record])
    assert not encoded.rejects
    expected = [encode(encoder(folder, WORDS), [{"messages": [ASKED, answer]}])[0][0] for answer in (SAID, NO)]
    assert documents == expected


@pytest.mark.parametrize("marked", [True, False])
def test_an_earlier_answer_in_the_prompt_is_not_learned(folder, marked):
    source = NAMED["chatml"].source if marked else without_marks(NAMED["chatml"].source)
    turns = [ASKED, NO, ASKED]
    record = {"chosen": [*turns, SAID], "rejected": [*turns, NO, ASKED, NO]}
    documents, _ = encode(encoder(folder, source, choose_layout([record])), [record])
    decode = Tokenizer.load(folder).decode
    learned = [decode([i for i, m in zip(*document, strict=True) if m]) for document in documents]
    assert learned == ["Yo<|im_end|><|endoftext|>", "No<|im_end|>No<|im_end|><|endoftext|>"]
    twice, _ = encode(encoder(folder, TWICE, choose_layout([record])), [record])
    learned = [decode([i for i, m in zip(*document, strict=True) if m]) for document in twice]
    assert learned == ["Yo<|im_end|><|endoftext|>", "No<|im_end|>No<|im_end|><|endoftext|>"]
