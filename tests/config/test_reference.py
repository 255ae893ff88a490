"""The schema and the reference page are made from the sections, and up to date."""

import json
from pathlib import Path

import pytest
from config_cases import RUN, SHORT

from weft.config.components import built_ins, find_part
from weft.config.draft import known_keys
from weft.config.presets import presets
from weft.config.reference import json_schema, markdown
from weft.config.tree import parse_mapping

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_the_page_names_every_key():
    page = markdown()
    for key in known_keys():
        assert f"`{key.rpartition('.')[2]}`" in page or f"## {key}" in page, key
    for room in ("optimizer", "schedule", "objective", "tracker"):
        for type_ in built_ins(room):
            assert f"`type: {type_}`" in page
            for name in find_part(type_, room).arguments:
                assert f"| `{name}` |" in page
    for preset in presets():
        assert f"| `{preset}` |" in page


def test_the_schema_is_json_and_resolves():
    schema = json.loads(json.dumps(json_schema()))

    def check(node):
        if isinstance(node, dict):
            if "$ref" in node:
                assert node["$ref"].removeprefix("#/$defs/") in schema["$defs"]
            for below in node.values():
                check(below)
        elif isinstance(node, list):
            for below in node:
                check(below)

    check(schema)
    optimizer = schema["$defs"]["OptimizerSection"]
    (muon,) = [rule for rule in optimizer["allOf"] if rule["if"]["properties"]["type"]["const"] == "muon"]
    assert muon["if"]["required"] == ["type"]
    assert muon["then"]["properties"]["momentum"] == {
        "type": "number", "minimum": 0, "exclusiveMaximum": 1, "default": 0.95,
    }  # fmt: skip
    assert muon["then"]["additionalProperties"] is False
    assert "no_decay" in muon["then"]["properties"]


JUDGED = {
    RUN: True,
    SHORT: True,
    "extends: base.yaml\ntraining: {dtype: float32}\n": True,
    "extends: [a.yaml]\noptimizer: {type: 'own:Thing', anything: 1}\n": True,
    "optimizer: {type: muon, momentum: 0.9}\n": True,
    "log: {trackers: [tensorboard, {type: wandb, project: x}]}\n": True,
    "optimizer: {momentum: 0.9}\n": False,
    "optimizer: {type: muon, momentum: 1.9}\n": False,
    "optimizer: {type: nothing}\n": False,
    "log: {trackers: [{type: wandb, projet: x}]}\n": False,
    "model: llama-61m\n": False,
    "run: {nam: x}\n": False,
    "zzz: 1\n": False,
}


def test_the_schema_judges_as_the_check_does():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json_schema())
    for text, right in JUDGED.items():
        node = parse_mapping(text, "run.yaml", [])
        assert validator.is_valid(node.plain()) == right, text
