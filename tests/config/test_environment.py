"""`${NAME}` and a leading `~/` in values are what the environment says, once."""

import pytest
from config_cases import SHORT, load, problems, shows, write

from weft.config.dump import dump_yaml


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("HOME", "/houses/ada")
    monkeypatch.setenv("RUNS", "/scratch/${RUNS}")
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.delenv("NOWHERE", raising=False)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("directory: ${RUNS}/x", "/scratch/${RUNS}/x"),  # what a variable holds is not expanded again
        ('directory: "${RUNS}"', "/scratch/${RUNS}"),
        ("directory: a/${STEPS}-${STEPS}", "a/12-12"),
        ("directory: ~/runs", "/houses/ada/runs"),
        ("directory: ~/${STEPS}", "/houses/ada/12"),
        ("directory: a~/b", "a~/b"),
        ("directory: ~ada/b", "~ada/b"),
        ("directory: $${RUNS}", "${RUNS}"),
        ("directory: $RUNS", "$RUNS"),
        ("directory: ${1}", None),  # no name of a variable: YAML reads it, within { } as a mistake
    ],
)
def test_values_in_a_mapping_of_either_form(written, read):
    block = f"{SHORT}run:\n  {written}\n"
    if read is None:
        assert load(block).run.directory == "${1}"
        assert shows(problems(f"{SHORT}run: {{{written}}}\n")[0], "not valid YAML")
        return
    for text in (block, f"{SHORT}run: {{{written}}}\n"):
        config = load(text)
        assert config.run.directory == read
        write(dump_yaml(config), "again.yaml")
        assert load(name="again.yaml") == config


def test_a_plain_value_is_what_it_becomes_and_a_quoted_one_is_text():
    text = SHORT.replace("steps: 10", "steps: ${STEPS}")
    assert load(text).training.steps == 12
    assert shows(
        problems(text.replace("${STEPS}", '"${STEPS}"')),
        ["run.yaml:3: training.steps: must be an integer, not '12'; remove the quotes"],
    )
    assert load(f"{SHORT}tokenizer: tok\nsamples: {{prompts: ['${{STEPS}}']}}\n").samples.prompts == ["12"]


def test_the_command_line_and_extends_too():
    write(SHORT, "12/base.yaml")
    config = load("extends: ${STEPS}/base.yaml\n", "run.directory=~/x", "training.steps=${STEPS}")
    assert (config.run.directory, config.training.steps) == ("/houses/ada/x", 12)


def test_a_variable_that_is_not_set_is_reported_with_its_place():
    text = f"{SHORT}run: {{directory: '${{NOWHERE}}/x'}}\n"
    said = (
        "${NOWHERE}: the environment has no variable NOWHERE; set the variable, or write $${NOWHERE} for the literal "
    )
    said += "text"
    assert shows(problems(text), [f"run.yaml:4: run.directory: {said}"])
    assert shows(problems(SHORT, "training.steps=${NOWHERE}"), [f"command line: training.steps: {said}"])


def test_keys_are_left_alone():
    (found,) = problems(f"{SHORT}${{STEPS}}: 3\n")
    assert shows(found, "run.yaml:4: ${STEPS}: unknown key")
