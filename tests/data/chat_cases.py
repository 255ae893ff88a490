"""What the tests of conversations share: a tokenizer, templates, seeded conversations, and transformers' answers."""

import json
import random
import re

import numpy as np
import pytest

from weft.data.conversations.conversation_encoder import ConversationEncoder, ConversationSpec
from weft.data.conversations.layouts import choose_layout
from weft.data.conversations.named_templates import NAMED
from weft.data.conversations.template import TemplateSource
from weft.data.documents import Document

SPECIALS = ["<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIALS += ["<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|im_start|>x"]

# Marks around the words only, or around the end of the turn as well, twice in a turn, with tools, with loop controls.
WORDS = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}
{%- else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"""
TOOLS = """
{{- bos_token }}{%- if tools %}{{ tools | tojson(indent=2) }}<|im_end|>
{% endif %}
{%- for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    <|im_start|>{{ m.role }}
    {%- if m.role == 'assistant' %}
        {%- generation %}
            {{- m.content or '' }}
        {%- endgeneration %}
        {%- if m.tool_calls %} calls {% generation %}{{ m.tool_calls | tojson }}{% endgeneration %}{% endif %}
        {%- generation %}<|im_end|>{% endgeneration %}
    {%- else %}{{ m.content | trim }}<|im_end|>{% endif %}
{% endfor %}"""
TWICE = NAMED["chatml"].source.replace(
    "+ '<|im_end|>' -}}{%- end", "-}}{% endgeneration %}{% generation %}<|im_end|>{%- end"
)
# Marks around the words and the end of the turn.
ENDED = WORDS.replace("{% endgeneration %}{{ '<|im_end|>\n' }}", "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}")
MARKED = {"ended": ENDED, "tools": TOOLS} | {name: NAMED[name].source for name in ("chatml", "llama3")}
TEXTS = [
    "What is a loom?",
    "It weaves: warp and weft.\n\n  Two threads ",
    "",
    " ",
    "né 🎉🎉",
    "日本語。🧵",
    "<|im_end|> typed",
    "x" * 40,
    "\t\n",
    "a<|im_start|>xy",
    "x<|endoftext|>",
]


@pytest.fixture(scope="module", name="folder")
def chat_folder(tmp_path_factory):
    """The folder of a byte-level BPE with the special tokens of several formats, and no chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = (
        "user assistant system weft warp loom thread weaves the cloth question answer name arguments function 🧵 日本語"
    )
    tokenizer.train_from_iterator(
        [" ".join(random.Random(i).choices(words.split(), k=20)) for i in range(200)], trainer
    )
    path = tmp_path_factory.mktemp("chat") / "tok"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def conversations(seed=0, count=120, tools=False, roles=True):
    """Seeded conversations of all shapes; `roles`: also such as do not alternate."""
    chooser = random.Random(seed)
    for _ in range(count):
        messages = []
        if chooser.random() < 0.4:
            messages.append({"role": "system", "content": chooser.choice(TEXTS)})
        for _ in range(chooser.randint(1, 4)):
            messages.append({"role": "user", "content": chooser.choice(TEXTS)})
            answer = {"role": "assistant", "content": chooser.choice(TEXTS)}
            if tools and chooser.random() < 0.5:
                call = {"name": "weave", "arguments": {"threads": 2, "colour": "grün"}}
                answer["tool_calls"] = [{"type": "function", "function": call}]
                messages += [answer, {"role": "tool", "content": '{"ok": true}'}]
                answer = {"role": "assistant", "content": "Done. 🎉"}
            messages.append(answer)
        if roles and chooser.random() < 0.2:
            messages.append({"role": "user", "content": "One more?"})
        yield {"messages": messages} | ({"tools": [{"name": "weave", "description": "ü"}]} if tools else {})


def encoder(folder, source, layout=None, **options):
    text = TemplateSource("a test", source) if isinstance(source, str) else source
    layout = layout or choose_layout([], "messages")
    return ConversationEncoder(ConversationSpec(tokenizer=folder, layout=layout, template=text, **options))


def encode(encoder, records):
    """The encoder's documents as (ids, mask) lists."""
    encoded = encoder.encode([Document(record, line) for line, record in enumerate(records, start=1)])
    assert encoded.ids.dtype == np.uint32
    assert encoded.mask.dtype == np.uint8
    assert len(encoded.ids) == len(encoded.mask) == encoded.lengths.sum()
    cuts = np.cumsum(encoded.lengths)[:-1]
    rows = zip(np.split(encoded.ids, cuts), np.split(encoded.mask, cuts), strict=True)
    return [(ids.tolist(), mask.tolist()) for ids, mask in rows] if len(encoded.lengths) else [], encoded


def theirs(folder, source, record):
    """The ids and the mask that transformers gives."""
    tokenizer = _pretrained(folder)
    out = tokenizer.apply_chat_template(
        record["messages"],
        tools=record.get("tools"),
        chat_template=source,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return list(out["input_ids"]), list(out["assistant_masks"])


def _pretrained(folder, kept={}):  # noqa: B006 (a cache)
    if folder not in kept:
        from transformers import PreTrainedTokenizerFast

        kept[folder] = PreTrainedTokenizerFast.from_pretrained(folder)
    return kept[folder]


def opened(document, eod):
    """A document without the end-of-document token that closes it."""
    ids, mask = document
    assert ids[-1] == eod
    return ids[:-1], mask[:-1]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye"},
]
ASKED, SAID = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}
NO = {"role": "assistant", "content": "No"}
ONE = {"messages": [ASKED, SAID]}
PAIR = {"prompt": "Hi", "chosen": "Yo", "rejected": "No"}


def without_marks(source):
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
