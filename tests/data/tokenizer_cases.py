"""Tokenizers of many kinds, made here, and texts that tell libraries apart."""

import json
import random
import sys
import unicodedata
from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from weft.data.tokenizers.exactness import PATTERNS, spell_bytes

SPECIAL = "<|endoftext|>"
ALPHABETS = [
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    " \t\n\r\x0b\x0c",
    "  \n",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    "'s't're've'm'll'd'S'LL",
    "\0\1\x07\x1b\x1c\x1d\x1e\x1f\x7f\x80\x85\x9f\xa0\xad",
    "éèêñßœÆÅÄöøłşİıſǅǆµªº",
    "\u0300\u0301\u0302\u0323\u0338\u0345\u20dd",
    "\u200b\u200c\u200d\u200e\u2028\u2029\u202f\u205f\u2060\u3000\ufeff\ufffd\ufe0f\ufffe",
    "αβγΩάϊ\u1fef\u037e\u212a\u2126\u212b",
    "абвгдеёжЯ",
    "אבגשׁ",
    "ابتثء\u064b\u0660\u06f3",
    "कखग\u093c\u094dज़०१",
    "กขคงั้",
    "\u1100\u1161\u11a8\u11ff각힣",
    "日本語漢字々〇一二\u3041ア・ー\uf900\U0002f800\U00020000",
    "½²³¹٣Ⅷ①㊿\U0001d7d8",
    "🎉👩👨👧‍🇩🇪👍🏽\U0001fae8\U0001fbf0",
    "\ue000\uf8ff\U000f0000\U0010fffd",
    "\u0378\u0c5c\u1c89\u2fef\ua7cb\U00010d40\U00011bc0\U00016ebb\U0002ebf0\U00031350\U000323b0\U0003347a\U000e0fff",
    "▁Ġ",
]


def nasty_texts(seed: int, number: int, longest: int = 120) -> list[str]:
    """Seeded texts of runs from a few alphabets each."""
    chooser = random.Random(seed)
    texts = []
    for _ in range(number):
        alphabets = [*chooser.sample(ALPHABETS, chooser.randint(1, 5)), ALPHABETS[0], " "]
        text = ""
        while len(text) < chooser.randint(0, longest):
            alphabet = chooser.choice(alphabets)
            run = chooser.choice([1, 1, 1, 2, 3, 8])
            same = chooser.random() < 0.2
            text += chooser.choice(alphabet) * run if same else "".join(chooser.choices(alphabet, k=run))
        texts.append(text)
    return texts


def characters() -> list[str]:
    """Every assigned character, but of the large blocks of one class, and of what is not assigned, a few only."""
    large = [(0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0xE000, 0xF8FF), (0x17000, 0x18CFF), (0x20000, sys.maxunicode)]
    codes = set(range(0x20000)) - set(range(0xD800, 0xE000))
    for low, high in large:
        codes -= set(range(low + 3, high - 3))
        codes |= set(range(low, high, 997))
    return [chr(code) for code in sorted(codes) if code % 37 == 0 or unicodedata.category(chr(code)) != "Cn"]


def in_contexts(character: str) -> str:
    """A character beside others of each class, and beside itself."""
    c = character
    return f"{c}a{c} {c}1{c}{c}'{c}S{c}!{c}\n{c}  {c}\t{c}"


def spelling() -> dict[int, str]:
    """How byte-level tokenizers spell each byte."""
    return {byte: spell_bytes(bytes([byte])) for byte in range(256)}


def byte_pairs(seed: int = 0) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary and merges in which every two bytes merge, in random order: where words end shows in the ids."""
    alphabet = [*spelling().values()]
    pairs = [(a, b) for a in alphabet for b in alphabet]
    random.Random(seed).shuffle(pairs)
    return {token: id for id, token in enumerate([*alphabet, *map("".join, pairs)])}, pairs


def by_pairs(pattern: str, *, nfc: bool = False, seed: int = 0) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with one of PATTERNS."""
    vocabulary, merges = byte_pairs(seed)
    made = _byte_level(tokenizers.Tokenizer(models.BPE(vocabulary, merges)), pattern, nfc)
    made.add_special_tokens([SPECIAL])
    return made


def trained(pattern: str, texts: list[str], *, nfc: bool = False, size: int = 1500) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with one of PATTERNS, trained on texts."""
    made = tokenizers.Tokenizer.from_str(_trained(pattern, tuple(texts), nfc, size))
    made.add_special_tokens([SPECIAL])
    return made


@cache
def _trained(pattern: str, texts: tuple[str, ...], nfc: bool, size: int) -> str:
    made = _byte_level(tokenizers.Tokenizer(models.BPE()), pattern, nfc)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    return made.to_str()


def _byte_level(made: tokenizers.Tokenizer, pattern: str, nfc: bool) -> tokenizers.Tokenizer:
    if pattern == "gpt2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    made.decoder = decoders.ByteLevel()
    if nfc:
        made.normalizer = normalizers.NFC()
    return made


@cache
def _trained_with_fallback(texts: tuple[str, ...]) -> str:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    # Trained on words, as sentencepiece does.
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False),
    )
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in byte_tokens]
    return json.dumps(content)


def llama2_like(texts: list[str], shape: str) -> tokenizers.Tokenizer:
    """BPE on whole texts with byte fallback; `shape`: "prepend", "gemma", or Metaspace's "always", "first", "never"."""
    made = tokenizers.Tokenizer.from_str(_trained_with_fallback(tuple(texts)))
    if shape == "prepend":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = None
    elif shape == "gemma":
        made.normalizer = normalizers.Replace(" ", "▁")
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        made.add_tokens(
            [tokenizers.AddedToken(text, normalized=False) for text in ("\n\n", "\n\n\n", "▁▁", "▁▁▁", "\t")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=shape, split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def save(made: tokenizers.Tokenizer | str, folder, eod: str = SPECIAL):
    """Write a tokenizer's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(made if isinstance(made, str) else made.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eod}))
    return folder


def prose(seed: int = 5) -> list[str]:
    """Texts to train on: words of many scripts, numbers, code."""
    chooser = random.Random(seed)
    words = [
        "the",
        "and",
        "tokens",
        "it's",
        "don't",
        "Größe",
        "naïve",
        "русский",
        "слово",
        "日本語",
        "漢字",
        "한국어",
        "हिन्दी",
        "def",
        "return",
        "self",
        "123",
        "2024",
        "3.14",
        "==",
        "->",
        "f(x)",
        "العربية",
        "עברית",
        "🎉",
        "  ",
        "\n",
        "\n\n",
    ]
    return [" ".join(chooser.choices(words, k=40)) for _ in range(300)] + nasty_texts(seed, 50)
