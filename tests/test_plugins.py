"""Plugins: what an installed package adds is found by its entry points, and a broken one is named."""

import importlib
import os
import re
import subprocess
import sys

import pytest

from weft import plugins
from weft.cli.main import main
from weft.config.components import load_class
from weft.errors import UserError


def install(folder, name, points, **modules):
    """A distribution as pip leaves it: a .dist-info with entry points, and modules beside it."""
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    lines = "".join(f"{point} = {value}\n" for point, value in points.items())
    (info / "entry_points.txt").write_text(f"[weft.plugins]\n{lines}")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    plugins._installed.cache_clear()
    yield tmp_path / "site"
    plugins._installed.cache_clear()


def test_plugins_are_found_by_kind_and_imported_when_loaded(site):
    install(
        site,
        "lions",
        {"optimizer.lion": "weft_lion_test : Lion", "verb.roar": "weft_lion_test"},
        weft_lion_test="class Lion: pass",
    )
    assert list(plugins.plugins("optimizer")) == ["lion"]
    assert list(plugins.plugins("verb")) == ["roar"]
    assert plugins.plugins("export") == {}
    assert "weft_lion_test" not in sys.modules
    assert plugins.plugins("optimizer")["lion"].load().__name__ == "Lion"
    assert plugins.plugins("verb")["roar"].load() is sys.modules["weft_lion_test"]


def test_a_part_that_is_no_class_is_named_with_its_package(site):
    install(site, "lions", {"optimizer.lion": "lion"}, lion="class Lion: pass")
    with pytest.raises(UserError, match=r"optimizer\.lion of lions 1\.2 is 'lion', .* to module:Class"):
        load_class("lion", "optimizer")


def test_two_packages_with_one_name_are_a_mistake(site):
    install(site, "one", {"verb.roar": "one"})
    install(site, "two", {"verb.roar": "two", "verb.other": "two"})
    with pytest.raises(UserError, match=r"(one|two) 1.2 and (one|two) 1.2 both provide the plugin verb.roar"):
        plugins.plugins("verb")


@pytest.mark.parametrize(
    ("value", "text", "message"),
    [
        ("weft_no_such_module", "", "no module 'weft_no_such_module'"),
        ("weft_broken_test:Nothing", "", "has no 'Nothing'"),
        ("weft_broken_test", "1 / 0", "weft_broken_test.py:1: ZeroDivisionError: division by zero; update"),
        ("weft_broken_test", "\nfrom json import nothing", "weft_broken_test.py:2: ImportError: cannot import name"),
        ("weft_broken_test", "def", "SyntaxError: "),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named_with_its_package(site, value, text, message):
    sys.modules.pop("weft_broken_test", None)
    install(site, "broken", {"verb.bad": value}, weft_broken_test=text)
    with pytest.raises(UserError, match=r"the plugin verb\.bad of broken 1\.2 cannot be imported") as told:
        plugins.plugins("verb")["bad"].load()
    assert message in str(told.value)
    assert "UserError" not in str(told.value)
    assert str(told.value).count(";") == 1


@pytest.mark.parametrize("missing", ["HELP", "add_arguments", "run"])
def test_a_verb_that_lacks_a_function_is_named_with_its_package(site, capsys, missing):
    lines = {"HELP": "HELP = ''", "add_arguments": "def add_arguments(parser): pass", "run": "def run(args): pass"}
    sys.modules.pop("weft_half_test", None)
    install(
        site, "half", {"verb.half": "weft_half_test"}, weft_half_test="\n".join(lines[n] for n in {*lines} - {missing})
    )
    assert main(["half"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"the plugin verb.half of half 1.2: weft_half_test has no {missing}; ")
    assert said.count("\n") == 1


def test_a_name_is_a_file_a_plugin_or_a_module_and_class(site):
    import weft.optim.schedules as schedules

    install(site, "waves", {"schedule.wave": "weft_wave_test:Wave"}, weft_wave_test="class Wave: pass")

    def find(name):
        return plugins.find("schedule", name, schedules, "annotations")

    assert plugins.find("schedule", "cosine", schedules, "Cosine").__name__ == "weft.optim.schedules.cosine"
    assert find("wave").__name__ == "Wave"
    assert find("weft_wave_test:Wave").__name__ == "Wave"
    with pytest.raises(UserError, match=r"there is no schedule 'wav'; did you mean 'wave'\?"):
        find("wav")
    with pytest.raises(UserError, match="no module 'nowhere'"):
        find("nowhere:Wave")


def test_an_entry_point_of_an_unknown_kind_is_reported_where_its_name_is_unknown(site):
    from weft.config.components import find_component
    from weft.config.model import ModelSection
    from weft.config.model_rules import model_mistakes
    from weft.families import presets
    from weft.optim import schedules

    install(site, "strays", {"family.stray": "stray", "scheduler.stray": "stray:Stray", "pattern.dots": "stray:Dots"})
    (found, *_) = model_mistakes(ModelSection(**presets()["llama-tiny"] | {"family": "stray"}))
    declared = r"strays 1.2 .*(family|scheduler).stray.* verb, source, export, "
    assert re.search(declared, found.what)
    with pytest.raises(UserError, match=declared):
        plugins.find("schedule", "stray", schedules, "annotations")
    with pytest.raises(UserError, match=r"strays 1.2 .*pattern.dots.* verb, source"):
        find_component("dots", "attention_pattern")


def test_the_kinds_are_those_whose_parts_have_short_names():
    from weft.config.components import COMPONENT_KINDS
    from weft.config.custom_components import CUSTOM_COMPONENT_KEYS

    assert set(plugins.KINDS) == {"verb", "source", "export"} | (
        set(COMPONENT_KINDS) - set(CUSTOM_COMPONENT_KEYS.values())
    )


def test_finding_plugins_imports_nothing_heavy():
    program = "import sys; from weft.plugins import plugins; plugins('verb'); sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_package_adds_a_verb_and_a_sub_verb(tmp_path):
    """Tried from outside: only a folder on PYTHONPATH, as `pip install --target` makes one."""
    verb = (
        'HELP = "count letters"\n'
        'def add_arguments(parser):\n    parser.add_argument("word")\n'
        "def run(args):\n    print(len(args.word))\n    return 3 if not args.word else 0\n"
    )
    points = {"verb.count": "weft_count_test", "verb.data.count": "weft_count_test", "verb.bad": "weft_nowhere_test"}
    install(tmp_path, "counters", points, weft_count_test=verb)

    def weft(*arguments):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "weft", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)

    for outer in ([], ["data"]):
        assert "count" in weft(*outer, "--help").stdout
        assert weft(*outer, "count", "--help").stdout.startswith(f"usage: {' '.join(['weft', *outer])} count")
        done = weft(*outer, "count", "abc")
        assert (done.stdout, done.returncode) == ("3\n", 0)
        assert weft(*outer, "count", "").returncode == 3
        assert weft(*outer, "coutn").stderr.startswith(f"{' '.join(['weft', *outer])}: unknown")
    assert "\n  plugins " in weft("--help").stdout
    assert "from the package counters 1.2" in weft("--help").stdout
    done = weft("bad")
    assert done.returncode == 2
    assert done.stderr.startswith("the plugin verb.bad of counters 1.2 cannot be imported: ")
    assert done.stderr.count("\n") == 1


def test_a_package_adds_an_optimizer(site, run_yaml, monkeypatch):
    """By its short name in a run file; its arguments are checked by its source, and it is not imported for that."""
    from weft.config.components import load_class
    from weft.config.run import RunConfig
    from weft.errors import ConfigError

    lion = (
        "import torch\n\n\nclass Lion(torch.optim.SGD):\n"
        "    def __init__(self, params, *, lr: float = 1e-4, beta: float = 0.9):\n"
        "        super().__init__(params, lr)\n"
    )
    install(site, "lions", {"optimizer.test-lion": "weft_lion_optimizer:Lion"}, weft_lion_optimizer=lion)

    def load(optimizer):
        path = run_yaml(optimizer=None)
        path.write_text(f"{path.read_text()}optimizer: {optimizer}\n")
        return RunConfig.load(path)

    config = load("{type: test-lion, lr: 0.01}")
    assert config.optimizer.arguments == {"lr": 0.01, "beta": 0.9}
    assert "weft_lion_optimizer" not in sys.modules
    assert load_class(config.optimizer, "optimizer").__name__ == "Lion"
    with pytest.raises(ConfigError, match=r"optimizer\.betta: unknown key; did you mean 'beta'"):
        load("{type: test-lion, betta: 0.5}")
    with pytest.raises(ConfigError, match="did you mean 'test-lion'"):
        load("{type: test-lionn}")
