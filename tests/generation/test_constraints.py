"""Constrained continuations: against jsonschema, `re`, partial matches of the regex library, and forward passes."""

import ast
import json
import random
import re
import sys

import jsonschema_specifications
import pytest
import regex
import tokenizers
import torch
from jsonschema import Draft202012Validator

import weft
from weft.config.model import ModelSection
from weft.data.tokenizers.tokenizer import Tokenizer
from weft.errors import UserError
from weft.generation.constraints import Constraint, compile_constraint
from weft.generation.engine import Engine
from weft.generation.settings import Sampling
from weft.models.build import build_model
from weft.models.initialize import initialize


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return Tokenizer.load(tiny_tokenizer)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """BPE on whole texts with byte fallback, as in Llama 2."""
    words = ["Kalo", "mi", "ren", "true", "name", '"', "{", "}", ":", ",", "1", "2", "\u00e9"]
    spellings = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    spellings += [*sorted(set("".join(words))), '{"', '":']
    parts = {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    content = {
        "added_tokens": [
            {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False}
            for i, text in enumerate(spellings[:3])
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": parts | {"vocab": {t: i for i, t in enumerate(spellings)}, "merges": [["{", '"'], ['"', ":"]]},
    }
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"} | content), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def model():
    section = ModelSection(
        vocab_size=520, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        initializer_range=0.5,
    )  # fmt: skip
    model = build_model(section)
    initialize(model, 3)
    return model.eval()


def texts(engine, prompt, sampling, **options):
    """Text and reason of the end of each continuation."""
    found, ends = [""] * sampling.n, [None] * sampling.n
    for piece in engine.submit(prompt, sampling, **options):
        found[piece.index] += piece.text
        ends[piece.index] = piece.finish or ends[piece.index]
    return list(zip(found, ends, strict=True))


def by_index(stream):
    pieces = list(stream)
    return [[piece.token for piece in pieces if piece.index == i] for i in {piece.index for piece in pieces}]


def accepts(constraint, tokenizer, text):
    """Whether a text is allowed, and can end."""
    ids = tokenizer.encode(text)
    return constraint.count_allowed((), ids) == len(ids) and bool(constraint.mask(ids)[tokenizer.eod_id])


SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z]", "minLength": 2, "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "\u00e9\n", None, 3.5]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "string", "format": "date-time", "maxLength": 25},
    {"$ref": "#/$defs/pair", "$defs": {"pair": {"prefixItems": [{"type": "boolean"}, {"const": {"b": [1]}}],
     "items": False, "minItems": 2, "type": "array"}}},
    {"type": "object", "patternProperties": {"^x.$": {"type": "boolean"}}, "required": ["a", "xy"],
     "properties": {"a": {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 2}},
     "additionalProperties": False, "maxProperties": 3},
    {"anyOf": [{"type": "null"}, {"type": "string", "format": "email", "maxLength": 12}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: next(iter(schema)))
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_texts_follow_the_schema(model, tokenizer, schema, temperature):
    engine = Engine(model, tokenizer, stop_ids={tokenizer.eod_id})
    for text, finish in texts(engine, "Kalo ", Sampling(250, temperature, n=2, json_schema=schema)):
        assert finish == "stop"
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        validator.validate(json.loads(text[1:]))  # the blank at the end of the prompt is generated


# A schema with each keyword, and a value that the keyword forbids.
FORBIDDEN = {
    "type": ({"type": "integer"}, "a"),
    "enum": ({"enum": [1, "b"]}, "a"),
    "const": ({"const": [1]}, [2]),
    "minimum": ({"minimum": 2.5}, 2),
    "maximum": ({"maximum": 2}, 2.5),
    "exclusiveMinimum": ({"exclusiveMinimum": 2}, 2),
    "exclusiveMaximum": ({"exclusiveMaximum": 2}, 2.0),
    "multipleOf": ({"multipleOf": 0.5}, 0.7),
    "minLength": ({"minLength": 2, "pattern": "^a"}, "a"),
    "maxLength": ({"maxLength": 6, "format": "email"}, "a@b.com"),
    "pattern": ({"pattern": "^a"}, "ba"),
    "format": ({"format": "date"}, "2021-02-29"),
    "minItems": ({"minItems": 1}, []),
    "maxItems": ({"maxItems": 1}, [1, 2]),
    "uniqueItems": ({"uniqueItems": True}, [1, 1]),
    "items": ({"items": {"type": "null"}}, [None, 1]),
    "prefixItems": ({"prefixItems": [True, {"type": "null"}]}, [1, 2]),
    "contains": ({"contains": {"type": "null"}}, [1]),
    "minContains": ({"contains": True, "minContains": 2}, [1]),
    "maxContains": ({"contains": True, "maxContains": 1}, [1, 2]),
    "unevaluatedItems": ({"unevaluatedItems": False}, [1]),
    "minProperties": ({"minProperties": 1}, {}),
    "maxProperties": ({"maxProperties": 1}, {"a": 1, "b": 1}),
    "required": ({"required": ["a"]}, {"b": 1}),
    "properties": ({"properties": {"a": {"type": "null"}}}, {"a": 1}),
    "patternProperties": ({"patternProperties": {"^a": {"type": "null"}}}, {"ab": 1}),
    "additionalProperties": ({"additionalProperties": {"type": "null"}}, {"a": 1}),
    "propertyNames": ({"propertyNames": {"maxLength": 1}}, {"ab": 1}),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, {"a": 1}),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": ({"dependentSchemas": {"a": {"maxProperties": 1}}}, {"a": 1, "b": 1}),
    "allOf": ({"allOf": [{"type": "string"}, {"maxLength": 1}]}, "ab"),
    "anyOf": ({"anyOf": [{"type": "null"}, {"maxLength": 1}]}, "ab"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1),
    "not": ({"not": {"type": "string"}}, "a"),
    "if": ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "ab"),
    "then": ({"then": {"type": "string"}}, 1),
    "else": ({"else": {"type": "string"}}, 1),
    "$ref": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, 1),
    "$dynamicRef": ({"$dynamicRef": "#a", "$defs": {"a": {"$anchor": "a", "type": "null"}}}, 1),
    "$dynamicAnchor": ({"$dynamicAnchor": "a", "type": "null"}, 1),
    "$anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, 1),
    "$id": ({"$id": "http://a.b/c", "$ref": "c#/$defs/a", "$defs": {"a": {"type": "null"}}}, 1),
    "$defs": ({"$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"}, 1),
    "$vocabulary": ({"$vocabulary": {"http://a.b/c": True}}, None),
}
ANNOTATIONS = {"title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples", "$comment"}
ANNOTATIONS |= {"$schema", "contentEncoding", "contentMediaType", "contentSchema"}
REFUSED = {
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "contains",
    "minContains",
    "maxContains",
}
REFUSED |= {"uniqueItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "oneOf", "$vocabulary"}
REFUSED |= {"$dynamicRef", "$dynamicAnchor"}


def test_every_keyword_of_the_draft_is_enforced_or_refused(tokenizer):
    vocabularies = [
        jsonschema_specifications.REGISTRY.contents(f"https://json-schema.org/draft/2020-12/meta/{name}")
        for name in ("core", "applicator", "unevaluated", "validation", "meta-data", "format-annotation", "content")
    ]
    keywords = {key for vocabulary in vocabularies for key in vocabulary["properties"]}
    assert keywords == FORBIDDEN.keys() | ANNOTATIONS
    refused = {}
    for keyword, (schema, value) in FORBIDDEN.items():
        try:
            constraint = Constraint(tokenizer, compile_constraint(json_schema=schema), {tokenizer.eod_id})
        except UserError as error:
            refused[keyword] = re.match(r"json_schema: (\S+): ", str(error)).group(1).split("/")[-1]
        else:
            assert not accepts(constraint, tokenizer, json.dumps(value))
    assert refused == {keyword: keyword for keyword in REFUSED} | {"minContains": "contains", "maxContains": "contains"}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a/b": {"items": {"uniqueItems": True}}}}, "/properties/a~1b/items/uniqueItems: this keyword"),
        ({"type": "string", "minLenght": 5}, "/minLenght: this is not a keyword .* write minLength"),
        ({"type": "string", "minLength": "5"}, '/minLength: the value is "5"; set it to an integer'),
        ({"type": "null", "minimum": "x"}, '/minimum: the value is "x"'),
        ({"type": "strin"}, '/type: the value is "strin"; set it to one of null,'),
        ({"anyOf": [{"format": "iri"}]}, '/anyOf/0/format: the value is "iri"; set it to one of date-time,'),
        ({"items": [{}]}, r"/items: \[\{\}\] is not a schema"),
        ([1], r"\[1\] is not a schema; write an object"),
        ({"properties": [1]}, "/properties: the value is .1.; set it to an object of schemas"),
        ({"$defs": {"x": {"pattern": "(?=a)"}}, "$ref": "#/$defs/x"}, "/\\$defs/x/pattern: .*look-around"),
        ({"items": {"$ref": "#/$defs/y"}}, "/items/\\$ref: this cannot be enforced .*/\\$defs/y"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"], "type": "object"}, "/properties/a/"),
        ({"minProperties": 2}, "/minProperties: this number of different keys .* list keys in `required`"),
        ({"const": 2**60}, "/const: 1152921504606846976 .* 2\\*\\*53"),
        ({"enum": ["\x01"]}, "/enum: .* control character"),
        ({"x-guidance": {"lenient": True}, "uniqueItems": True}, "/uniqueItems"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 3}, "/\\$schema: .*a draft from 6"),
        (False, "this cannot be enforced"),
        ('{"type": ', "is not JSON: .*column"),
        ({"const": {1}}, "is not JSON: .* set "),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_place(schema, said):
    with pytest.raises(UserError, match="^json_schema:? " + said) as caught:
        Sampling(5, json_schema=schema)
    assert "\n" not in str(caught.value)


def test_a_key_is_not_repeated_in_another_spelling(tokenizer):
    """{"\\u0061": "x"} has the key "a"."""
    schema = {"properties": {"a": {"type": "integer"}}}
    constraint = Constraint(tokenizer, compile_constraint(json_schema=schema), {tokenizer.eod_id})
    for text, valid in (
        ('{"a": 1}', True),
        ('{"b": "x"}', True),
        ('{"\\u0061": "x"}', False),
        ('{"a": 1, "a": 2}', False),
    ):
        assert accepts(constraint, tokenizer, text) == valid


REGEXES = [r"(ab|[0-9]{2})+-?x{2,4}", r"Kalo (mi|ren)\.", r"[^a-y]{3}", r"(?i)yes|no", r"a{5}"]


@pytest.mark.parametrize("pattern", REGEXES)
def test_texts_match_the_regex(model, tokenizer, pattern):
    engine = Engine(model, tokenizer, stop_ids={tokenizer.eod_id})
    for text, finish in texts(engine, [5, 6], Sampling(60, 1.0, n=4, seed=1, regex=pattern)):
        assert finish == "stop" or pattern.startswith("(ab")
        assert regex.fullmatch(pattern, text, partial=finish == "length")


@pytest.mark.parametrize("pattern", REGEXES)
def test_the_mask_has_the_tokens_that_can_continue_a_match(tokenizer, pattern):
    """The library `regex` decides whether a text can become a match; tokens with parts of characters are left out."""
    constraint = Constraint(tokenizer, compile_constraint(regex=pattern), {tokenizer.eod_id})
    rng, new = random.Random(pattern), []
    words = {id: tokenizer.decode([id]) for id in range(512) if id != tokenizer.eod_id}
    for _ in range(12):
        mask, text = constraint.mask(new), "".join(words[id] for id in new)
        for id, word in words.items():
            if "\ufffd" not in word:
                assert bool(mask[id]) == bool(regex.fullmatch(pattern, text + word, partial=True)), text + word
        assert bool(mask[tokenizer.eod_id]) == bool(re.fullmatch(pattern, text))
        allowed = [id for id, word in words.items() if mask[id] and "\ufffd" not in word]
        if not allowed:
            break
        new.append(rng.choice(allowed))


def test_the_state_depends_only_on_the_tokens(tokenizer):
    """Steps back, as in speculative decoding, leave no trace."""
    grammar = compile_constraint(json_schema={"type": "object", "additionalProperties": {"type": "boolean"}})
    ids = tokenizer.encode('{"Kalo": true, "mi": false}')
    kept, rng = Constraint(tokenizer, grammar, {tokenizer.eod_id}), random.Random(1)
    for _ in range(40):
        new = ids[: rng.randrange(len(ids) + 1)]
        fresh = Constraint(tokenizer, grammar, {tokenizer.eod_id})
        assert torch.equal(kept.mask(new), fresh.mask(new))
        draft = [*ids[len(new) :][: rng.randrange(5)], rng.randrange(512), *ids[:2]]
        count = kept.count_allowed(new, draft)
        for i, token in enumerate(draft[: count + 1]):
            assert bool(fresh.mask([*new, *draft[:i]])[token]) == (i < count) or token == tokenizer.eod_id
    with pytest.raises(UserError, match="failed"):
        kept.mask(ids[1:])
    assert torch.equal(kept.mask(ids[:3]), fresh.mask(ids[:3]))


def test_a_stop_token_comes_only_at_the_end_of_a_text(model, tokenizer):
    bias = {"logit_bias": {tokenizer.eod_id: 1e4}, "temperature": 0}
    engine = Engine(model, tokenizer, stop_ids={tokenizer.eod_id})
    (shortest,) = texts(engine, [5], Sampling(30, regex="(ab|cd){2,9}", **bias))
    assert re.fullmatch("(ab|cd){2}", shortest[0])
    assert shortest[1] == "stop"
    # without stop tokens, only a text that cannot become longer ends
    assert texts(engine, [5], Sampling(30, regex="a{3}", **bias), stop_ids=()) == [("aaa", "stop")]
    assert texts(engine, [5], Sampling(4, regex="a+", **bias), stop_ids=())[0][1] == "length"
    with pytest.raises(UserError, match="no token continues"):
        engine.submit([5], Sampling(3, regex="a{0}", **bias), stop_ids=())


def test_texts_follow_a_grammar(model, tokenizer):
    grammar = 'start: sum\nsum: term ("+" term)~0..2\nterm: /[1-9]/ | "(" sum ")"'
    for text, finish in texts(
        Engine(model, tokenizer, stop_ids={tokenizer.eod_id}), [5], Sampling(90, 0.7, n=4, grammar=grammar)
    ):
        if finish == "stop":
            ast.parse(text, mode="eval")
            assert text.count("(") == text.count(")")
            assert set(text) <= set("123456789+()")


def test_sentencepiece_tokens(model, sentencepiece):
    """A blank is a token's first character, and characters can be spelled by bytes."""
    schema = {"properties": {"name": {"enum": ["Kalo", "\u65e5 mi"]}}, "required": ["name"], "type": "object",
              "additionalProperties": False}  # fmt: skip
    engine = Engine(model, sentencepiece, stop_ids={sentencepiece.eod_id})
    found = set()
    for prompt in ("Kalo", "Kalo "):
        for seed in range(4):
            for text, finish in texts(engine, prompt, Sampling(300, 1.0, json_schema=schema, seed=seed)):
                assert finish == "stop"
                assert text.startswith(" ") == prompt.endswith(" ")
                found.add(json.loads(text)["name"])
    assert found == {"Kalo", "\u65e5 mi"}


def test_logprobs_are_those_of_the_model(model, tokenizer):
    prompt = [5, 6]
    pieces = list(Engine(model, tokenizer).submit(prompt, Sampling(8, 1.0, regex="[a-z ]{40}", logprobs=2)))
    ids = [*prompt, *(piece.token for piece in pieces)]
    expected = model(torch.tensor([ids]))[0].log_softmax(-1)[1:-1]
    for piece, row in zip(pieces, expected, strict=True):
        assert piece.logprob == pytest.approx(row[piece.token].item(), abs=1e-5)
        assert [token for token, _ in piece.top] == row.topk(2).indices.tolist()


def test_requests_do_not_depend_on_their_neighbours(model, tokenizer):
    requests = [Sampling(30, 1.0, seed=i, regex=r"[a-z]{3,9}\.") for i in range(3)]
    requests += [Sampling(30, 1.0, json_schema=SCHEMAS[0], n=2), Sampling(20, 1.0, top_p=0.9), Sampling(9, 0)]
    alone = [by_index(Engine(model, tokenizer).submit([5, 6], sampling)) for sampling in requests]
    engine = Engine(model, tokenizer, max_batch=4, max_cache_tokens=450)
    streams = [engine.submit([5, 6], sampling) for sampling in requests]
    with engine.submit([7], Sampling(50, json_schema=True)) as cancelled:
        next(cancelled)
    assert [by_index(stream) for stream in streams] == alone
    assert cancelled.ready()[-1].finish == "cancelled"
    assert engine.blocks.free == len(engine.blocks)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"regex": "(a"}, r"regex '\(a': unclosed group"),
        ({"regex": r"a\b"}, "regex .*lookarounds not supported"),
        ({"regex": 5}, "regex is of type int"),
        ({"grammar": 'start: "a" b'}, r'grammar .*unknown name: "b" \(line 1\)'),
        ({"grammar": 'begin: "a"'}, "grammar .*no start rule"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar are set; set only one"),
    ],
)
def test_mistakes_are_one_line(settings, said):
    with pytest.raises(UserError, match=said) as caught:
        Sampling(5, **settings)
    assert "\n" not in str(caught.value)


def test_mistakes_of_model_and_tokenizer(model, tokenizer, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="need a tokenizer"):
        Engine(model).submit([5], Sampling(5, regex="a"))
    with pytest.raises(UserError, match="unknown special token"):
        Engine(model, tokenizer).submit([5], Sampling(5, grammar="start: <|nothing|>"))
    with pytest.raises(UserError, match="no text matches"):
        Engine(model, tokenizer).submit(
            [5], Sampling(5, json_schema={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
        )
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    made.decoder = tokenizers.decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[UNK]"}')
    with pytest.raises(UserError, match="byte-level or SentencePiece"):
        Engine(model, Tokenizer.load(tmp_path)).submit([1], Sampling(5, regex="a"))
    with pytest.raises(UserError, match="cannot be enforced"):
        weft.generate("nowhere", "a", json_schema={"not": {}})  # before the model is loaded
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install 'weft-train\[constraints\]'"):
        Sampling(5, regex="not compiled yet")


@pytest.mark.parametrize("levels", [100, 300, 900])
def test_a_schema_that_is_nested_too_deeply_is_refused(levels):
    schema: dict = {}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(UserError, match="json_schema"):
        weft.Sampling(4, json_schema=schema)
