"""Preferences as tokens: one prompt, masked in both documents; equal answers and too long pairs are left out."""

import json

import pytest
from chat_cases import ASKED, PAIR, SAID, _pretrained, chat_folder, encode, encoder, without_marks  # noqa: F401

from weft.cli.main import main
from weft.data.conversations.items import EQUAL, OTHER_PROMPT
from weft.data.conversations.layouts import choose_layout
from weft.data.conversations.named_templates import NAMED
from weft.data.stores.store import TokenStore
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError

CHATML = NAMED["chatml"].source
ANSWERS = ["Yo", "loom " * 30, "日本語。🧵", " leading space", "weft\n\nwarp"]


def pairs_of(answers):
    return [{"prompt": "What is a loom?", "chosen": a, "rejected": b} for a in answers for b in answers if a != b]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_the_prompt_is_transformers_prompt_in_both_documents_and_masked(folder, name, marked):
    source = NAMED[name].source if marked else without_marks(NAMED[name].source)
    records = pairs_of(ANSWERS)
    documents, encoded = encode(encoder(folder, source, choose_layout(records)), records)
    assert not encoded.rejects
    asked = [{"role": "user", "content": "What is a loom?"}]
    tokenizer = _pretrained(folder)
    prompt = tokenizer.apply_chat_template(asked, chat_template=NAMED[name].source, add_generation_prompt=True)
    prompt = list(prompt["input_ids"] if hasattr(prompt, "keys") else prompt)
    for ids, mask in documents:
        assert ids[: len(prompt)] == prompt
        assert not any(mask[: len(prompt)])
        assert mask[len(prompt)]
    texts = [tokenizer.decode(ids[len(prompt) :]) for ids, _ in documents]
    for record, chosen, rejected in zip(records, texts[::2], texts[1::2], strict=True):
        assert chosen.startswith(record["chosen"].strip() if name == "llama3" else record["chosen"])
        assert rejected.startswith(record["rejected"].strip() if name == "llama3" else record["rejected"])


def test_pairs_without_a_difference_are_left_out_and_counted(folder, tmp_path, capsys):
    same = {"chosen": [ASKED, SAID], "rejected": [ASKED, SAID]}
    equal = PAIR | {"rejected": "Yo"}
    ours = encoder(folder, CHATML, choose_layout([PAIR]))
    documents, encoded = encode(ours, [PAIR, same, PAIR, equal])
    assert documents == encode(ours, [PAIR, PAIR])[0]
    assert [(r.line, r.reason) for r in encoded.rejects] == [(2, EQUAL), (4, EQUAL)]
    assert encoded.bytes == encode(ours, [PAIR, PAIR])[1].bytes
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (PAIR, same, equal)))
    command = ["data", "pack", path, "--tokenizer", folder, "--out", tmp_path / "store", "--chat-template", "chatml"]
    assert main(list(map(str, command))) == 0  # without --on-error skip
    assert f"rejected 2 pairs: {EQUAL} (see " in capsys.readouterr().err
    assert TokenStore(tmp_path / "store").info.rejected == {EQUAL: 2}
    assert main(["data", "verify", str(tmp_path / "store")]) == 0


def test_a_prompt_whose_end_merges_with_one_answer_is_left_out(folder):
    # the template ends the prompt with white space, which becomes one token with that of an answer
    source = (
        "{% for m in messages %}{{ m.role + ':' + ('\n' if m.role == 'assistant' else ' ') + m.content }}{% endfor %}"
    )
    ours = encoder(folder, without_marks(source), choose_layout([PAIR]))
    merged = PAIR | {"rejected": "\n\t\nNo"}
    documents, encoded = encode(ours, [PAIR, merged, PAIR | {"rejected": "Nope"}])
    prompts = [ids[: mask.index(1)] for ids, mask in documents]
    assert len(documents) in (4, 6)
    assert all(a == b for a, b in zip(prompts[::2], prompts[1::2], strict=True))
    if len(documents) == 4:
        assert [(r.line, r.reason) for r in encoded.rejects] == [(2, OTHER_PROMPT)]


def test_truncated_pairs_keep_one_prompt_and_lose_the_ends_of_both_answers_alike(folder):
    records = [
        PAIR,
        PAIR | {"rejected": "loom " * 50},
        {"prompt": "Hi", "chosen": "weft " * 60, "rejected": "loom " * 70},
        {"prompt": "warp " * 80, "chosen": "Yo", "rejected": "No"},
        {"prompt": "Hi", "chosen": "loom " * 60 + "a", "rejected": "loom " * 60 + "b"},
    ]
    layout, limit = choose_layout(records), 60
    full, _ = encode(encoder(folder, CHATML, layout), records)
    kept, encoded = encode(encoder(folder, CHATML, layout, max_tokens=limit, overlong="truncate"), records)
    assert [(r.line, r.reason) for r in encoded.rejects] == [(4, "nothing to learn within 60 tokens"), (5, EQUAL)]
    assert encoded.notes == {"truncated to 60 tokens": 3}
    assert kept[:2] == full[:2]
    assert kept[2] == full[2]
    totals = [len(kept[2 * n][0]) + len(kept[2 * n + 1][0]) for n in range(3)]
    assert totals == [totals[0], limit, limit]
    for (ids, mask), (whole, whole_mask) in zip(kept[3:], full[3:6], strict=True):
        assert ids == [*whole[: len(ids) - 1], whole[-1]]
        assert mask == [*whole_mask[: len(ids) - 1], 0]  # the cut does not end the answer
        assert any(mask)
    assert len(kept[4][0]) == len(kept[5][0]) == limit // 2
    prompts = [ids[: mask.index(1)] for ids, mask in kept]
    assert prompts[::2] == prompts[1::2]
    decode = Tokenizer.load(folder).decode
    assert encoded.bytes == sum(len(decode(ids[:-1]).encode()) for ids, _ in kept)


@pytest.mark.parametrize("overlong", ["drop", "keep"])
def test_the_limit_is_that_of_both_documents(folder, overlong):
    pair = PAIR | {"rejected": "loom " * 10}
    layout = choose_layout([pair])
    full, _ = encode(encoder(folder, CHATML, layout), [pair])
    total = sum(len(ids) for ids, _ in full)
    exact, encoded = encode(encoder(folder, CHATML, layout, max_tokens=total, overlong=overlong), [pair])
    assert exact == full
    assert not encoded.notes
    less, encoded = encode(encoder(folder, CHATML, layout, max_tokens=total - 1, overlong=overlong), [pair])
    reason = f"longer than {total - 1} tokens"
    if overlong == "keep":
        assert less == full
        assert encoded.notes == {f"{reason}, kept": 1}
    else:
        assert less == []
        assert [r.reason for r in encoded.rejects] == [reason]
    with pytest.raises(UserError, match="must be at least 4"):
        encoder(folder, CHATML, layout, max_tokens=3)


def test_stores_show_pairs(folder, tmp_path, capsys):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(PAIR | {"rejected": f"No {n}"}) + "\n" for n in range(9)))
    command = ["data", "pack", path, "--tokenizer", folder, "--out", tmp_path / "store", "--chat-template", "chatml"]
    assert main(list(map(str, command))) == 0
    capsys.readouterr()
    show = ["data", "show", str(tmp_path / "store"), "--tokenizer", str(folder), "--masks"]
    assert main([*show, "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    heads = [line.partition(" (")[0] for line in shown.splitlines() if line.startswith("---")]
    assert heads == [
        f"--- document {2 * pair + n}: pair {pair}, {which} answer"
        for pair in (0, 8)
        for n, which in enumerate(("chosen", "rejected"))
    ]
    assert shown.count("assistant\n{+Yo<|im_end|>+}") == 2
    assert "assistant\n{+No 8<|im_end|>+}" in shown
    assert main([*show, "--document", "3"]) == 0
    assert "document 3: pair 1, rejected answer" in capsys.readouterr().out
