"""The schema and the reference page are made from the sections, and up to date."""

import copy
import json
from pathlib import Path

import jsonschema
import pytest
from config_cases import RUN, SHORT, load

from weft.config.components import built_ins, find_component
from weft.config.fields import descriptions, field_names, known_keys
from weft.config.reference import all_sections, examples, json_schema, markdown
from weft.config.run import RunConfig
from weft.config.tree import parse
from weft.families import presets

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_the_page_names_every_key():
    page = markdown()
    for key in known_keys(RunConfig):
        assert f"`{key.rpartition('.')[2]}`" in page or f"## {key}" in page, key
    for room in ("optimizer", "schedule", "objective", "callback", "tracker"):
        for type_ in built_ins(room):
            assert f"`type: {type_}`" in page
            for name in find_component(type_, room).arguments:
                assert f"| `{name}` |" in page
    for preset in presets():
        assert f"| `{preset}` |" in page


def test_every_key_has_a_description_that_is_a_sentence():
    for section in all_sections(RunConfig):
        described = descriptions(section)
        if section.__name__ not in ("DatasetSource", "CustomModelSection"):  # as the built-in alternative's
            lacking = [key for key in field_names(section) if key not in described]
            assert all(section is RunConfig or key == "type" for key in lacking), (section, lacking)
        for key, text in described.items():
            assert text.endswith("."), (section, key, text)
            assert not text[0].islower(), (section, key, text)


def test_every_section_has_an_example_that_loads():
    assert set(examples()) == set(RunConfig.model_fields)
    together = load("".join(examples().values()))
    assert together.origins["data.train"].startswith("run.yaml:")
    needed = {"model": "llama-tiny", "tokenizer": "tok", "data": "{train: store}", "training": "{steps: 10000}"}
    needed = {key: f"{key}: {value}\n" for key, value in needed.items()}
    for key, text in examples().items():
        alone = load("".join({**needed, key: text}.values()), name=f"{key}.yaml")
        assert getattr(alone, key) == getattr(together, key) or key in ("model", "data", "run"), key
        assert f"```yaml\n{text}```" in markdown()


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
    validator = jsonschema.Draft202012Validator(json_schema())
    for text, right in JUDGED.items():
        node = parse(text, "run.yaml", [])
        assert validator.is_valid(node.plain()) == right, text


def mappings(tree: dict, above: tuple = ()):
    """Every mapping of a tree of which the schema knows all keys, with the keys to it."""
    yield above, tree
    for key, value in tree.items():
        if isinstance(value, dict) and key != "weights":
            yield from mappings(value, (*above, key))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_schema_takes_the_examples_and_no_misspelt_key_in_them(path):
    validator = jsonschema.Draft202012Validator(json_schema())
    tree = parse(path.read_text(encoding="utf-8"), path.name, []).plain()
    assert [error.message for error in validator.iter_errors(tree)] == []
    for above, _ in list(mappings(tree)):
        broken = copy.deepcopy(tree)
        place = broken
        for key in above:
            place = place[key]
        place["zzz_misspelt"] = 1
        assert not validator.is_valid(broken), above
