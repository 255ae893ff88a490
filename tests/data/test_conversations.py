"""Ids and masks of conversations are those of `transformers.apply_chat_template`; their ends, lengths and stores."""

import json
import pickle

import pytest
from chat_cases import (  # noqa: F401 (the fixture)
    ASKED,
    CHAT,
    ENDED,
    MARKED,
    NO,
    ONE,
    PAIR,
    SAID,
    TWICE,
    WORDS,
    chat_folder,
    conversations,
    encode,
    encoder,
    opened,
    theirs,
    without_marks,
)

from weft.cli.main import main
from weft.data.conversations.layouts import choose_layout
from weft.data.conversations.named_templates import NAMED
from weft.data.conversations.template import ChatTemplate, TemplateSource, find_template
from weft.data.stores.operations.text_bytes import TextBytes
from weft.data.stores.store import TokenStore
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError

# --- Parity with transformers ---


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("name", MARKED)
def test_ids_and_masks_are_those_of_transformers(folder, name, exact):
    records = list(conversations(tools=name == "tools"))
    ours = encoder(folder, MARKED[name], exact=exact)
    documents, encoded = encode(ours, records)
    eod = Tokenizer.load(folder).eod_id
    assert not encoded.rejects
    assert ours._spans.fast is not exact
    for record, document in zip(records, documents, strict=True):
        expected = theirs(folder, MARKED[name], record)
        # A text that ends with the end-of-document token is closed already.
        assert (document if expected[0][-1:] == [eod] else opened(document, eod)) == expected


ALTERNATING = ("llama2", "gemma", "mistral", "vicuna", "zephyr")


@pytest.mark.parametrize("name", ALTERNATING)
def test_formats_by_name_render_as_transformers_renders_them(folder, name):
    records = list(conversations(seed=1, roles=False))
    eod = Tokenizer.load(folder).eod_id
    documents, encoded = encode(encoder(folder, find_template(folder, name)), records)
    assert not encoded.rejects
    for record, document in zip(records, documents, strict=True):
        expected = theirs(folder, NAMED[name].source, record)
        assert (document if expected[0][-1:] == [eod] else opened(document, eod)) == expected


# What each format is known to look like; « and » around what the assistant writes.
KNOWN = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "«Yo<|im_end|>»\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]« Yo </s>»<s>[INST] Bye [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«Yo<|eot_id|>»"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n«Yo<end_of_turn>»\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] Be brief.\n\nHi[/INST]« Yo</s>»[INST] Bye[/INST]",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n«Yo</s>»\n<|user|>\nBye</s>\n"
    "<|assistant|>\n",
    "vicuna": "<s>Be brief. USER: Hi ASSISTANT:« Yo</s>»USER: Bye ASSISTANT:",
    "plain": "Be brief.Hi«Yo»\nBye",
}


@pytest.mark.parametrize("name", NAMED)
def test_formats_by_name_are_what_their_models_know(name):
    template = ChatTemplate(TemplateSource(name, NAMED[name].source), {"bos_token": "<s>", "eos_token": "</s>"})
    text, spans = template.render(CHAT, prompt=True)
    for start, end in reversed(spans):
        text = f"{text[:start]}«{text[start:end]}»{text[end:]}"
    assert text == KNOWN[name]


def test_formats_by_name_refuse_what_they_would_leave_out(folder):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    records = [{"messages": [*CHAT[:2], call]}, {"messages": CHAT, "tools": [{"name": "f"}]}]
    for name in NAMED:
        _, encoded = encode(encoder(folder, find_template(folder, name)), records)
        assert [reject.line for reject in encoded.rejects] == [1, 2]
        assert all("tool" in reject.reason for reject in encoded.rejects)


@pytest.mark.parametrize("train_on", ["assistant", "last"])
@pytest.mark.parametrize("name", NAMED)
def test_turns_found_by_comparing_prefixes_are_those_that_marks_show(folder, name, train_on):
    records = list(conversations(seed=2, roles=name not in ALTERNATING))
    if name == "plain":  # it refuses an answer that does not end and is not the last message
        records = [record for record in records if all(m["role"] != "assistant" for m in record["messages"][:-1])]
        assert len(records) > 3
    marked, _ = encode(encoder(folder, NAMED[name].source, train_on=train_on), records)
    found, encoded = encode(encoder(folder, without_marks(NAMED[name].source), train_on=train_on), records)
    assert not encoded.rejects
    assert found == marked


REASONING = """
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}
        {%- if loop.index0 > last.user %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
        {{- m.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{ m.content + '<|im_end|>' }}{% endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{{ stub or '' }}{% endif %}"""


@pytest.mark.parametrize("stub", ["", "<think>\n", "<|channel>none"])
def test_turns_are_found_in_templates_that_drop_earlier_reasoning(folder, stub):
    records = [record for record in conversations(seed=6) if "<|im_end|>" not in json.dumps(record)]
    found, encoded = encode(encoder(folder, without_marks(REASONING), variables={"stub": stub}), records)
    assert not encoded.rejects
    marked, _ = encode(encoder(folder, REASONING), records)
    if stub != "<think>\n":
        assert found == marked
        return
    # What opens the turn is given to the model, not learned from it.
    opening = Tokenizer.load(folder).encode(stub)
    for (ids, mask), (same, other) in zip(found, marked, strict=True):
        assert ids == same
        differs = [i for i, (a, b) in enumerate(zip(mask, other, strict=True)) if a != b]
        assert [ids[i] for i in differs] == (opening if differs else [])


def test_a_template_that_rewrites_what_was_before_a_turn_is_refused(folder):
    rewriting = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'user' and not loop.last %}{{ 'Hm. ' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
    _, encoded = encode(encoder(folder, rewriting), [{"messages": CHAT[:3]}])
    assert [(reject.line, "--train-on last" in reject.reason) for reject in encoded.rejects] == [(1, True)]
    growing = rewriting.replace("m.role == 'user' and not loop.last", "loop.length > 4 and loop.first")
    records = [{"messages": CHAT[:3]}, {"messages": [*CHAT, CHAT[2]]}]
    documents, encoded = encode(encoder(folder, growing), records)
    assert [reject.line for reject in encoded.rejects] == [2]
    assert len(documents) == 1


def test_a_tokenizer_that_drops_white_space_does_not_mark_the_users_words(folder, tmp_path):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    record = {"messages": [CHAT[1], {"role": "assistant", "content": "Yo "}, *CHAT[3:], CHAT[2]]}
    spaced = ENDED.replace("{{ '<|im_end|>' }}", "{{ '<|im_end|> ' }}")
    ours = encoder(tmp_path, spaced)
    ((ids, mask),), _ = encode(ours, [record])
    assert not ours._spans.fast
    decode = Tokenizer.load(folder).decode
    assert decode([i for i, m in zip(ids, mask, strict=True) if m]) == "Yo <|im_end|>Yo<|im_end|><|endoftext|>"
    assert "Bye" in decode([i for i, m in zip(*theirs(tmp_path, spaced, record), strict=True) if m])


# --- What is learned, ends and lengths ---


def test_train_on_all_learns_every_token_and_last_only_the_last_turn(folder):
    record = {"messages": [*CHAT, NO]}
    decode = Tokenizer.load(folder).decode
    whole, _ = encode(encoder(folder, WORDS, train_on="all"), [record])
    assert all(whole[0][1])
    last, _ = encode(encoder(folder, WORDS, train_on="last"), [record])
    assert decode([i for i, m in zip(*last[0], strict=True) if m]) == "No<|endoftext|>"
    with pytest.raises(UserError, match="--train-on all"):
        encoder(folder, WORDS, choose_layout([], "preferences"), train_on="all")


def test_one_end_of_document_token_closes_each_document_and_is_learned_where_it_closes_an_answer(folder):
    eod = Tokenizer.load(folder).eod_id
    ends = "{% for m in messages %}{{ m.content }}{% generation %}<|endoftext|>{% endgeneration %}{% endfor %}"
    ((ids, mask),), _ = encode(encoder(folder, ends), [{"messages": [ASKED, SAID]}])
    assert ids.count(eod) == 2
    assert (ids[-1], mask[-1]) == (eod, 1)
    for messages, learned in (([ASKED, SAID], 1), ([ASKED, SAID, ASKED], 0)):
        ((ids, mask),), _ = encode(encoder(folder, ENDED), [{"messages": messages}])
        assert (ids.count(eod), ids[-1], mask[-1]) == (1, eod, learned)
    # The turn ends with the end-of-document token already, and white space follows: it is closed, not ended again.
    blank = (
        "{% for m in messages %}{{ m.content }}{% generation %}<|endoftext|>{% endgeneration %}{{ '\n' }}{% endfor %}"
    )
    ((ids, mask),), _ = encode(encoder(folder, blank), [{"messages": [ASKED, SAID]}])
    assert (ids[-1], mask[-3:]) == (eod, [1, 0, 0])


def test_long_documents_are_left_out_cut_or_kept_and_counted(folder):
    long = {"messages": [ASKED, {"role": "assistant", "content": "loom " * 50}]}
    asked = {"messages": [{"role": "user", "content": "loom " * 50}, SAID]}
    records = [ONE, long, asked, ONE]
    (full, _), limit = encode(encoder(folder, WORDS), records), 30
    dropping = encoder(folder, WORDS, max_tokens=limit)
    documents, encoded = encode(dropping, records)
    assert documents == [full[0], full[3]]
    assert [(r.line, r.reason) for r in encoded.rejects] == [(line, "longer than 30 tokens") for line in (2, 3)]
    assert "longer than 30 tokens" in dropping.drops
    documents, encoded = encode(encoder(folder, WORDS, max_tokens=limit, overlong="truncate"), records)
    decode = Tokenizer.load(folder).decode
    assert encoded.bytes == sum(len(decode(ids[:-1]).encode()) for ids, _ in documents)
    assert documents == [
        full[0],
        (full[1][0][: limit - 1] + full[1][0][-1:], [*full[1][1][: limit - 1], 0]),
        full[3],
    ]
    assert [(r.line, r.reason) for r in encoded.rejects] == [(3, "nothing to learn within 30 tokens")]
    assert encoded.notes == {"truncated to 30 tokens": 1}
    documents, encoded = encode(encoder(folder, WORDS, max_tokens=limit, overlong="keep"), records)
    assert documents == full
    assert encoded.notes == {"longer than 30 tokens, kept": 2}
    pair = {"prompt": "Hi", "chosen": "Yo", "rejected": "loom " * 50}
    documents, encoded = encode(encoder(folder, WORDS, choose_layout([pair]), max_tokens=limit), [PAIR, pair])
    assert len(documents) == 2
    assert [reject.line for reject in encoded.rejects] == [2]


def test_batches_and_a_trip_to_another_process_change_nothing(folder):
    records = list(conversations(seed=3, count=40))
    whole, _ = encode(encoder(folder, NAMED["chatml"].source), records)
    sent = pickle.loads(pickle.dumps(encoder(folder, NAMED["chatml"].source)))
    assert sent.identity() == encoder(folder, NAMED["chatml"].source).identity()
    assert [encode(sent, [record])[0][0] for record in records] == whole
    assert encode(sent, [])[0] == []


# --- Templates ---


def test_a_folders_templates_are_found_as_transformers_finds_them(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    with pytest.raises(UserError, match=r"no chat template in this folder; .*chatml"):
        find_template(tmp_path)

    def found(tools=None):
        text = find_template(tmp_path)
        used = text.source if tools is None else text.with_tools or text.source
        from transformers import AutoTokenizer

        assert AutoTokenizer.from_pretrained(tmp_path).get_chat_template(tools=tools) == used
        return used

    config["chat_template"] = "a"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert found() == "a"
    config["chat_template"] = [{"name": "default", "template": "b"}, {"name": "tool_use", "template": "c"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert (found(), found([{}])) == ("b", "c")
    assert find_template(tmp_path, "tool_use").source == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    assert (found(), found([{}])) == ("d", "d")
    with pytest.raises(UserError, match="--chat-template chatlm: not found; use a file, or one of chatml"):
        find_template(tmp_path, "chatlm")
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"chat_template.jinja:1: not a valid chat template"):
        find_template(tmp_path)


def test_templates_run_in_a_sandbox_and_what_they_refuse_is_a_reject(folder):
    refusing = {
        "{{ raise_exception('only weavers') }}": "the chat template cannot render the messages: only weavers",
        "{{ messages.append(1) }}": "SecurityError",
        "{{ ''.__class__.__mro__ }}": "cannot render",
        "{% set n = namespace(__class__=1) %}{{ n }}": "SecurityError",
        "{{ messages[0].content.missing.more }}": "UndefinedError",
        "{{ 1 // 0 }}": "ZeroDivisionError",
    }
    for source, reason in refusing.items():
        _, encoded = encode(encoder(folder, source + WORDS), [{"messages": CHAT}])
        assert len(encoded.rejects) == 1
        assert reason in encoded.rejects[0].reason


def test_a_template_gets_its_tokens_variables_reasoning_and_the_day(folder):
    source = """{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ colour }}{{ messages[1].reasoning_content }}
    {%- generation %}{{ messages[1].content }}{% endgeneration %}"""
    record = {"messages": [ASKED, SAID | {"reasoning": "Hm."}], "chat_template_kwargs": {"colour": "red"}}
    ours = encoder(folder, source, variables={"colour": "blue"}, date="2026-01-31")
    ((ids, _),), _ = encode(ours, [record])
    assert Tokenizer.load(folder).decode(ids) == "<s>31 Jan 2026redHm.Yo<|endoftext|>"
    assert ours.template_date == ours.identity()["date"] == "2026-01-31"
    assert encoder(folder, WORDS, date="2026-01-31").identity()["date"] is None


def test_a_format_whose_tokens_the_tokenizer_lacks_is_reported(tiny_tokenizer):
    ours = encoder(tiny_tokenizer, find_template(tiny_tokenizer, "chatml"))
    assert ours.warnings()[0].startswith("<|im_start|>, <|im_end|>: not in this tokenizer's vocabulary")


@pytest.mark.parametrize("name", ["llama2", "llama3", "gemma", "mistral", "vicuna"])
def test_a_format_writes_nothing_for_a_token_that_the_tokenizer_does_not_name(tiny_tokenizer, name):
    ours = encoder(tiny_tokenizer, find_template(tiny_tokenizer, name))
    assert sum(line.startswith("bos_token: not defined by this tokenizer") for line in ours.warnings()) == 1
    ((ids, _),), encoded = encode(ours, [ONE])
    assert not encoded.rejects
    told = encoder(tiny_tokenizer, find_template(tiny_tokenizer, name), variables={"bos_token": "<s>"})
    assert not any("bos_token" in line for line in told.warnings())
    ((more, _),), _ = encode(told, [ONE])
    decode = Tokenizer.load(tiny_tokenizer).decode
    assert decode(more) == "<s>" + decode(ids)


def test_a_template_that_needs_a_token_without_a_name_says_so(tiny_tokenizer):
    _, encoded = encode(encoder(tiny_tokenizer, "{{ bos_token + messages[0].content }}"), [ONE])
    assert [reject.reason for reject in encoded.rejects] == [
        "the chat template uses bos_token, which the tokenizer does not define; add it to tokenizer_config.json"
    ]


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
def test_plain_teaches_nothing_of_the_next_user(folder, exact):
    ended = SAID | {"content": "we</s>"}
    record = {"messages": [ASKED, ended, ASKED | {"content": "ft"}, SAID]}
    ours = encoder(folder, find_template(folder, "plain"), exact=exact)
    ((ids, mask),), _ = encode(ours, [record])
    decode = Tokenizer.load(folder).decode
    assert decode([id for id, learned in zip(ids, mask, strict=True) if learned]) == "we</s>Yo<|endoftext|>"
    assert decode(ids) == "Hiwe</s>\nftYo<|endoftext|>"
    lines = {"messages": [ASKED, SAID | {"content": "we</s>\n"}, ASKED, ended, ASKED | {"content": "\nft"}, SAID]}
    ((ids, _),), _ = encode(ours, [lines])
    assert decode(ids) == "Hiwe</s>\nHiwe</s>\nftYo<|endoftext|>"  # none is added where one is


# A turn without an end; with an end that is not learned; the words, calls and end of which are learned separately.
TOLD = "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
NO_END = TOLD + "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
BARE = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
PARTS = NO_END.replace("m.content }}{% endg", "m.content }}{% endgeneration %}, {% generation %}</s>{% endg")


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize(
    ("template", "last_only"),
    [(WORDS, True), (NO_END, True), (BARE, True), (NAMED["plain"].source, True), (PARTS, False), (TWICE, False)],
)
def test_an_answer_that_a_model_would_not_end_is_refused_unless_it_is_the_last_message(
    folder, template, last_only, exact
):
    said = [SAID | {"content": "one"}, SAID | {"content": "two"}]
    records = [[ASKED, said[0]], [ASKED, said[0], ASKED, said[1]], [ASKED, said[0], ASKED]]
    records = [{"messages": messages} for messages in records]
    documents, encoded = encode(encoder(folder, template, exact=exact), records)
    assert [reject.line for reject in encoded.rejects] == ([2, 3] if last_only else [])
    for reject in encoded.rejects:
        assert "no stop token" in reject.reason
        assert "--train-on last" in reject.reason
    assert all(sum(mask) for _, mask in documents)
    _, encoded = encode(encoder(folder, template, exact=exact, train_on="last"), records)
    assert [reject.line for reject in encoded.rejects] == ([3] if last_only else [])
    _, encoded = encode(encoder(folder, template, exact=exact, train_on="all"), records)
    assert not encoded.rejects


# --- weft data pack ---


def pack(folder, tmp_path, records, *options):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = ["data", "pack", tmp_path / "in.jsonl", "--tokenizer", folder, "--out", tmp_path / "store"]
    return main([str(part) for part in (*command, *options)])


def test_packing_conversations_makes_a_store_with_a_mask(folder, tmp_path, capsys):
    records = [*conversations(seed=4, count=30), {"messages": []}, {"messages": CHAT}]
    options = ("--conversations", "--chat-template", "chatml")
    assert pack(folder, tmp_path, records, *options) == 2
    assert "in.jsonl:31: no messages" in capsys.readouterr().err
    assert pack(folder, tmp_path, records, *options, "--on-error", "skip") == 0
    told = capsys.readouterr()
    assert "records: messages (messages, role, content); template: the built-in template chatml" in told.err
    store = TokenStore(tmp_path / "store")
    assert store.info.kind == "conversations"
    assert store.info.rejected == {"no messages": 1}
    expected, _ = encode(encoder(folder, NAMED["chatml"].source), records)
    assert store.tokens.tolist() == [i for ids, _ in expected for i in ids]
    assert store.loss_mask.tolist() == [m for _, mask in expected for m in mask]
    counted = TextBytes(folder, store.info.tokenizer_digest, store.info.vocab_size).count(store.tokens, store.lengths)
    assert store.info.bytes == counted
    assert f"{store.loss_mask.mean():.1%} of the tokens are trained on" in told.err
    assert main(["data", "inspect", str(tmp_path / "store"), "--tokenizer", str(folder), "--samples", "99"]) == 0
    shown = capsys.readouterr().out
    assert r"Hi<|im_end|>\n<|im_start|>assistant\n{+Yo<|im_end|>+}\n<|im_start|>user\nBye" in shown


def test_packing_preferences_and_leaving_out_long_ones_is_no_error(folder, tmp_path, capsys):
    long = {"prompt": "Hi", "chosen": "Yo", "rejected": "loom " * 50}
    records = [PAIR, long, PAIR]
    assert pack(folder, tmp_path, records, "--chat-template", "chatml", "--max-tokens", "40") == 0
    store = TokenStore(tmp_path / "store")
    assert (store.info.kind, store.num_documents) == ("preferences", 4)
    chosen, rejected = store.lengths[0], store.lengths[1]
    told = f"chosen have {chosen} to {chosen} tokens, median {chosen}; rejected have {rejected} to {rejected} tokens"
    assert told in capsys.readouterr().err
    assert store.info.rejected == {"longer than 40 tokens": 1}
    note = json.loads((tmp_path / "store" / "rejects.jsonl").read_text())
    assert (note["line"], note["reason"]) == (2, "longer than 40 tokens")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--conversations",), "no chat template in this folder"),
        (("--chat-template", "chatml", "--field", "body"), "--field applies only to texts"),
        (("--chat-template", "chatml", "--fields", "input"), "NAME=KEY"),
        (("--chat-template", "chatml", "--overlong", "drop"), "--overlong drop has no effect without --max-tokens"),
        (("--chat-template", "chatml", "--date", "today"), "--date today"),
        (("--chat-template", "chatml", "--template-variables", "[1]"), "not a JSON object"),
        (("--chat-template", "chatml", "--max-tokens", "1"), "--max-tokens 1: must be at least 2"),
    ],
)
def test_mistakes_are_one_line(folder, tmp_path, capsys, options, told):
    assert pack(folder, tmp_path, [{"messages": CHAT}], *options) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert told in lines[0]
