"""Parts chosen by `type:` are checked by their signatures, read from source and never imported."""

import subprocess
import sys
from pathlib import Path

import pytest
from config_cases import SHORT, load, problems, shows, write

from weft.config.components import COMPONENT_KINDS, built_ins, find_component, load_class
from weft.errors import UserError

OWN = """\
raise RuntimeError("imported")
"""
CLASSES = '''\
from __future__ import annotations
import enum
from dataclasses import dataclass, field, InitVar
from typing import Annotated, Any, ClassVar, Literal, Optional, Union
import annotated_types as at
import torch
from helpers import Base as Ancestor, RATE
from annotated_types import Ge, Interval

Mode = Literal["slow", "fast"]
raise RuntimeError("this module was imported")

class Plain:
    step = zero_grad = None
    def __init__(self, params, lr: float, mode: Mode = "slow", *, steps: int = 3, rate: float = RATE, name=None,
                 pair: tuple[int, int] = (1, 2), maybe: "Optional[int]" = None,
                 either: Union[float, torch.Tensor] = 1e-3, bounded: Annotated[float, Ge(0), at.Le(1)] = 0.5,
                 inside: Annotated[int, Interval(ge=1, lt=9)] = 2, items: list[str] | None = None,
                 table: dict[str, int] = {}, fn: Any = print, free=(1, 2)):
        pass

class Open(Plain):
    def __init__(self, params, *, extra: int = 1, **kwargs):
        super().__init__(params, **kwargs)

class Inherits(Plain):
    """Nothing of its own."""

class FromElsewhere(Ancestor):
    pass

class FromTorch(torch.optim.SGD):
    pass

class Unknown(enum.Enum):
    A = 1

@dataclass
class Data:
    __call__ = None
    total_steps: int
    factor: float
    names: list[str] = field(default_factory=list)
    hidden: int = field(default=1, init=False)
    constant: ClassVar[int] = 3
    start: InitVar[int] = 0

@dataclass(frozen=True)
class MoreData(Data):
    power: float = 2.0

class NoPosition:
    step = zero_grad = None
    def __init__(self, *, lr: float = 1.0): ...

class Starred:
    step = zero_grad = None
    def __init__(self, *args, **kwargs): ...

if True:
    class Nested:
        step = zero_grad = None
        def __init__(self, params, inside: bool = False): ...

Renamed = Plain
'''
HELPERS = """\
from package.inner import Root as Base
RATE = 0.25
"""
VALUES = """\
number = 5
negative = -1.5
again = number
nothing: object = None
def make(params): ...
table = {"a": 1}
"""
ROOT = "class Root:\n    step = zero_grad = None\n    def __init__(self, params, depth: int): ...\n"


@pytest.fixture
def own(monkeypatch):
    write(CLASSES, "own.py")
    write(HELPERS, "helpers.py")
    write("raise RuntimeError('imported')\n", "package/__init__.py")
    write(ROOT, "package/inner.py")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])


def optimizer(text: str, *, name: str = "Plain") -> str:
    return f"{SHORT}optimizer: {{type: 'own:{name}', {text}}}\n"


def test_built_ins_are_files_that_hold_a_part():
    assert built_ins("optimizer") == {"adamw": "weft.optim.adamw", "muon": "weft.optim.muon"}
    assert {"constant", "linear", "cosine", "polynomial", "exponential", "step", "wsd"} == set(built_ins("schedule"))
    assert "pretrain" in built_ins("objective")
    assert "objective" not in built_ins("objective")
    assert {"tensorboard", "wandb", "mlflow"} <= set(built_ins("tracker"))
    assert built_ins("model") == built_ins("dataset") == {}


@pytest.mark.parametrize("room", [room for room in COMPONENT_KINDS if built_ins(room)])
def test_what_the_source_says_is_what_the_class_takes(room):
    import inspect

    for name in built_ins(room):
        taken = inspect.signature(load_class(name, room).__init__).parameters
        part = find_component(name, room)
        if load_class(name, room).__init__ is object.__init__:
            assert not part.arguments
            continue
        assert ["self", *part.injected, *part.arguments] == list(taken)
        for key, argument in part.arguments.items():
            assert argument.required == (taken[key].default is inspect.Parameter.empty)
            assert argument.required or argument.default == taken[key].default


def test_a_class_of_the_users_own_is_completed_without_importing_it(own):
    config = load(optimizer("lr: 1"))
    taken = config.optimizer.arguments
    assert taken == {
        "lr": 1.0, "mode": "slow", "steps": 3, "rate": 0.25, "name": None, "pair": (1, 2), "maybe": None,
        "either": 1e-3, "bounded": 0.5, "inside": 2, "items": None, "table": {}, "free": (1, 2),
    }  # fmt: skip
    assert isinstance(taken["lr"], float)
    assert "own" not in sys.modules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mode: slow", "optimizer.lr: required argument of Plain; add the key"),
        ("lr: 1, mode: fat", "optimizer.mode: must be one of slow, fast, not 'fat'; did you mean 'fast'?"),
        ("lr: 1, stepz: 2", "optimizer.stepz: unknown key; did you mean 'steps'?"),
        ("lr: 1, steps: 2.5", "optimizer.steps: must be an integer, not 2.5"),
        ("lr: 1, rate: quick", "optimizer.rate: must be a number, not 'quick'"),
        ("lr: 1, pair: [1, 2, 3]", "optimizer.pair: must be a list of 2 items, not of 3"),
        ("lr: 1, pair: [1, x]", "optimizer.pair[1]: must be an integer, not 'x'"),
        ("lr: 1, maybe: x", "optimizer.maybe: must be an integer, not 'x'"),
        ("lr: 1, either: x", "optimizer.either: must be a number, not 'x'"),
        ("lr: 1, bounded: 1.5", "optimizer.bounded: must be at most 1, not 1.5"),
        ("lr: 1, inside: 9", "optimizer.inside: must be less than 9, not 9"),
        ("lr: 1, items: [1]", 'optimizer.items[0]: must be text, not 1; quote it: "1"'),
        ("lr: 1, table: [1]", "optimizer.table: must be a mapping, not a list"),
        ("lr: null", "optimizer.lr: must not be null; remove the key"),
    ],
)
def test_mistakes_in_its_arguments(own, text, said):
    (found,) = problems(optimizer(text))
    assert shows(found, f"run.yaml:4: {said}")


def test_null_and_anything_where_the_signature_allows(own):
    taken = load(optimizer("lr: 1, maybe: null, name: [1, {a: b}], fn: x, free: [3, 4]")).optimizer.arguments
    assert (taken["maybe"], taken["name"], taken["fn"], taken["free"]) == (None, [1, {"a": "b"}], "x", (3, 4))


def test_constructors_found_elsewhere(own):
    assert load(optimizer("lr: 1", name="Inherits")).optimizer.arguments["steps"] == 3
    assert load(optimizer("lr: 1", name="Renamed")).optimizer.arguments["steps"] == 3
    assert load(optimizer("inside: true", name="Nested")).optimizer.arguments == {"inside": True}
    assert load(optimizer("depth: 1", name="FromElsewhere")).optimizer.arguments == {"depth": 1}
    assert shows(
        problems(optimizer("lr: 1", name="FromElsewhere")),
        [
            "run.yaml:4: optimizer.lr: unknown key; remove it (known here: depth, ... no_decay, type)",
            "run.yaml:4: optimizer.depth: required argument of FromElsewhere; add the key",
        ],
    )
    assert load(optimizer("lr: 1, nesterov: true", name="FromTorch")).optimizer.arguments["nesterov"] is True


def test_keyword_arguments_take_all(own):
    assert load(optimizer("extra: 2, anything: [1]", name="Open")).optimizer.arguments == {"extra": 2, "anything": [1]}
    assert shows(problems(optimizer("extra: x, anything: [1]", name="Open"))[0], "optimizer.extra: must be")
    assert load(optimizer("anything: 1", name="Starred")).optimizer.arguments == {"anything": 1}


def test_dataclasses(own):
    text = SHORT + "schedule: {type: 'own:MoreData', factor: 1}\n"
    assert load(text).schedule.arguments == {"factor": 1.0, "start": 0, "power": 2.0}
    assert shows(
        problems(text, "schedule.total_steps=3")[0], "schedule.total_steps: ... total_steps to MoreData; remove the key"
    )
    assert shows(problems(text, "schedule.hidden=3")[0], "unknown key")
    assert shows(problems(text, "schedule.constant=3")[0], "unknown key")


def test_a_class_that_cannot_be_given_its_first_argument(own):
    (found,) = problems(optimizer("lr: 1", name="NoPosition"))
    assert shows(found, "define it as __init__(self, params, ...)")


@pytest.mark.parametrize(
    ("type_", "said"),
    [
        ("own:Plane", "no class 'Plane' in own.py; use one of Plain"),
        ("onw:Plain", "no module 'onw' in the working directory or among installed packages; did you mean 'own'?"),
        ("nown:Plain", "no module 'nown' in the working directory or among installed packages; did you mean 'own'?"),
        ("noson:Plain", "no module 'noson' in the working directory ... put it in the working directory"),
        ("own:Mode", None),
        ("own:RATE", "'RATE' is not a class (helpers.py:2); use the name of a class"),
        ("own:at", "'at' is a module (own.py), not a class; use the name of a class"),
        ("values:number", "'number' is not a class (values.py:1); use the name of a class"),
        ("values:negative", "'negative' is not a class (values.py:2); use the name of a class"),
        ("values:again", "'again' is not a class (values.py:1); use the name of a class"),
        ("values:nothing", "'nothing' is not a class (values.py:4); use the name of a class"),
        ("values:make", "'make' is not a class (values.py:5); use the name of a class"),
        ("values:table", "'table' is not a class (values.py:6); use the name of a class"),
        ("package.outer:Plain", "no module 'package.outer' in the package package"),
        ("package:Plain", "no class 'Plain' in package/__init__.py"),
        ("own:", "is not a module:Class"),
        (":Plain", "is not a module:Class"),
        ("own.py:Plain", "no module 'own.py'"),
        ("my-module:Plain", "is not a module:Class"),
        ("adamv", "unknown optimizer 'adamv'; did you mean 'adamw'? (use one of adamw, muon; write a custom class as"),
        ("schedule", "unknown optimizer 'schedule'"),
        ("groups", "unknown optimizer 'groups'"),
    ],
)
def test_types_that_are_not_there(own, type_, said):
    write(VALUES, "values.py")
    if said is None:  # a class or not: the source does not say
        load(f"{SHORT}optimizer: {{type: '{type_}', lr: 1}}\n")
        return
    (found,) = problems(f"{SHORT}optimizer: {{type: '{type_}', lr: 1}}\n")
    assert shows(found, "run.yaml:4: optimizer.type: ")
    assert shows(found, said)


def test_a_name_that_may_be_a_class_is_taken_for_one(own):
    write(
        "try:\n    from package.inner import Root\nexcept ImportError:\n    Root = None\n"
        "Other = None\nif True:\n    from package.inner import Root as Other\n"
        "class Kept:\n    step = zero_grad = None\n    def __init__(self, params, depth: int): ...\n"
        "if not Root:\n    Kept = None\nMade = type('Made', (), {})\n",
        "maybe.py",
    )
    for name in ("Root", "Other", "Kept"):
        assert load(f"{SHORT}optimizer: {{type: 'maybe:{name}', depth: 1}}\n").optimizer.arguments == {"depth": 1}
    assert load(f"{SHORT}optimizer: {{type: 'maybe:Made', anything: 1}}\n").optimizer.arguments == {"anything": 1}


def test_a_module_that_is_no_python():
    write("def (:\n", "own.py")
    (found,) = problems(optimizer("lr: 1"))
    assert shows(found, "own.py:1 is not Python")


def test_names_may_have_hyphens(monkeypatch):
    assert find_component("adamw", "optimizer").name == "AdamW"
    with pytest.raises(UserError, match="ada-mw"):
        find_component("ada-mw", "optimizer")


def test_models_and_datasets_of_the_users_own():
    write(
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self, width: int, depth: int = 2): ...\n"
        "class Lines:\n    __len__ = __getitem__ = None\n    def __init__(self, path: str): ...\n",
        "own.py",
    )
    text = """\
        model: {type: "own:Net", width: 8}
        data: {train: {type: "own:Lines", path: x}, sequence_length: 8}
        training: {steps: 3}
        """
    config = load(text)
    assert config.model.arguments == {"width": 8, "depth": 2}
    assert config.data.train.arguments == {"path": "x"}
    assert shows(
        problems(text, "model.widht=3", "data.train.pth=x"),
        [
            "command line: model.widht: unknown key; did you mean 'width'?",
            "command line: data.train.pth: unknown key; did you mean 'path'?",
        ],
    )
    (found,) = problems(text.replace("sequence_length", "validation: {type: 'own:Lines'}, sequence_length"))
    assert shows(found, "run.yaml:2: data.validation.path: required argument of Lines")
    assert shows(problems(text, "data.train.type=lines")[0], "unknown dataset 'lines'")
    assert shows(problems(text, "model.type=llama")[0], "unknown model 'llama'")


def test_torch_is_read_but_not_imported():
    write(SHORT + "optimizer: {type: 'torch.optim:SGD', lr: 1, momentum: 0.9}\n")
    program = (
        "import sys; from weft.config.run import RunConfig as R; "
        "c = R.load('run.yaml', check_data=False); print('torch' in sys.modules, c.optimizer.arguments['momentum'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False 0.9\n"
    (found,) = problems(None, "optimizer.momentun=3")
    assert shows(found, "command line: optimizer.momentun: unknown key; did you mean 'momentum'?")


# ---- importing, when a run begins


def test_load_class_finds_the_working_directory_first(monkeypatch):
    weight = "    def weight(self, batch): return 1.0\n"
    whole = f"class Whole:\n{weight}    def compute(self, forward, batch): return 1.0\n"
    half = f"class Half:\n{weight}    def inputs(self, batch): return {{}}\n"
    bare = "class Thing(list):\n    pass\nclass Bare:\n    def __len__(self): return 1\n"
    write(bare + whole + half, "weft_test_own.py")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(Path.cwd()))])
    assert load_class("weft_test_own:Thing", "dataset").__name__ == "Thing"
    with pytest.raises(
        UserError, match=r"^'weft_test_own:Bare': Bare has no method __getitem__, which every dataset needs"
    ):
        load_class("weft_test_own:Bare", "dataset")
    assert load_class("weft_test_own:Whole", "objective").__name__ == "Whole"
    with pytest.raises(UserError, match="Half has no method loss or compute, which every objective needs"):
        load_class("weft_test_own:Half", "objective")
    with pytest.raises(UserError, match="has no class 'Think'"):
        load_class("weft_test_own:Think", "dataset")
    with pytest.raises(UserError, match="no module 'weft_test_other'"):
        load_class("weft_test_other:Thing", "dataset")


@pytest.mark.parametrize(
    ("methods", "missing"),
    [
        ("weight = inputs = loss", None),
        ("weight = compute", None),
        ("inputs = loss", "weight"),
        ("weight = loss", "inputs or compute"),
        ("weight = inputs", "loss or compute"),
    ],
)
def test_missing_methods_are_found_by_config_check_and_by_the_import(methods, missing):
    module = f"weft_test_{methods.replace(' = ', '_')}"
    write(f"class Loss:\n    {methods} = print\n", f"{module}.py")
    type_ = f"{module}:Loss"
    text = f"{SHORT}objective: {{type: '{type_}'}}\n"
    if missing is None:
        assert load_class(load(text).objective, "objective").__name__ == "Loss"
        return
    (found,) = problems(text)
    assert shows(found, f"run.yaml:4: objective.type: ... Loss (weft_test_... has no method {missing}; add it")
    with pytest.raises(UserError, match=f"has no method {missing}, which every objective needs"):
        load_class(type_, "objective")


def test_what_only_the_import_shows_is_reported_with_the_place_of_its_key():
    write("Thing = dict(a=1)\nclass Lines:\n    pass\n", "weft_test_made.py")
    text = SHORT + "optimizer: {type: 'weft_test_made:Thing', lr: 1}\nlog: {trackers: ['weft_test_made:Thing']}\n"
    config = load(text.replace("train: store", "train: [a, {type: 'weft_test_made:Thing'}]"))
    no_class = "'weft_test_made:Thing' is a dict, not a class; set type to the name of a class"
    for chosen, place in (
        (config.optimizer, "run.yaml:4: optimizer.type"),
        (config.log.trackers[0], "run.yaml:5: log.trackers[0].type"),
        (config.data.train[1], "run.yaml:2: data.train[1].type"),
        (load(text, "optimizer.type=weft_test_made:Thing").optimizer, "command line: optimizer.type"),
    ):
        with pytest.raises(UserError) as error:
            load_class(chosen, "optimizer")
        assert str(error.value) == f"{place}: {no_class}"
    assert config.schedule.place is None
    assert load(text).optimizer == load(text, "optimizer.type=weft_test_made:Thing", "optimizer.lr=1").optimizer


def test_a_missing_dependency_of_the_users_module_is_named():
    write("import weft_test_nowhere\nclass Thing:\n    pass\n", "weft_test_needy.py")
    with pytest.raises(UserError, match="no module 'weft_test_nowhere'; install it"):
        load_class("weft_test_needy:Thing", "dataset")
