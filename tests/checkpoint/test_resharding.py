"""Any mesh loads any other's, bit for bit, and what fails on one rank fails on all."""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint_cases import OPTIMIZERS, adamw, built, everything, goes_on, outcomes, same, start, write
from safetensors import safe_open
from torch import nn

from weft.checkpoint.load import checkpoints, load, resolve

# Four ranks run all cases once, in the worker that has the fork server.
pytestmark = pytest.mark.xdist_group("ranks")

CASES = [
    *(f"x1-to-x2-{kind}" for kind in OPTIMIZERS),
    *(f"save-{mesh}-{kind}" for kind in OPTIMIZERS for mesh in ("x2", "x4", "hsdp")),
    *(
        f"{way}-{kind}"
        for kind in OPTIMIZERS
        for way in ("x1-to-x4", "x2-to-x4", "x4-to-x4", "x4-to-hsdp", "hsdp-to-hsdp")
    ),
    "tensor-parallel",
    *(f"beside-{mesh}" for mesh in ("x4", "hsdp", "tp")),
    "disk-full",
    "damaged",
    "mismatch",
]
# Other meshes or another optimizer show the same.
LONG = {
    *("x1-to-x4-adamw", "x4-to-hsdp-adamw", "beside-hsdp"),
    *(f"{way}-mixed" for way in ("x1-to-x4", "x4-to-x4", "x4-to-hsdp", "hsdp-to-hsdp")),
}


@pytest.fixture(scope="module")
def left_out(request) -> set[str]:
    """The cases that no collected test looks at."""
    return set() if any(item.get_closest_marker("long") for item in request.session.items) else LONG


@pytest.fixture(scope="module")
def world(left_out, tmp_path_factory, ranks) -> tuple[Path, list[dict]]:
    """Four ranks that have run all their cases, and what became of them on each rank."""
    folder = tmp_path_factory.mktemp("world")
    for kind in OPTIMIZERS:
        start(folder / f"x1-{kind}", kind)
    write(folder / "damaged", built(1), None, step=1)
    damaged = write(folder / "damaged", built(1), None)
    flip_a_bit(next(damaged.glob("*.safetensors")))
    return folder, ranks.call(outcomes, 4, folder, left_out, seconds=240)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long if case in LONG else ()) for case in CASES])
def test_of_several_ranks(world, case):
    _, outcomes = world
    told = [outcome[case] for outcome in outcomes if case in outcome]
    assert len(told) == (2 if "x2" in case and "x4" not in case else 4)
    assert set(told) == {"fine"}, next(text for text in told if text != "fine")


def test_every_case_of_the_ranks_is_looked_at(world, left_out):
    assert set(world[1][0]) == set(CASES) - left_out


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("mesh", ["x1", "x2", "x4", "hsdp"])
def test_one_process_without_a_process_group_goes_on_from_any_mesh(world, mesh, kind):
    run = world[0] / f"{mesh}-{kind}"
    resolve(checkpoints(run)[-1])
    goes_on(run, kind, same_mesh=mesh == "x1")


@pytest.mark.parametrize("run", ["x4-adamw", "hsdp-adamw", "hsdp-mixed", "tp"])
def test_every_element_is_saved_once(world, run):
    """Replicas and numbers that all ranks hold are written by one of them; a tied weight has one name."""
    (checkpoint,) = checkpoints(world[0] / run)
    index = json.loads((checkpoint / "index.json").read_text())
    for name, entry in index["tensors"].items():
        sizes = [math.prod(shape) for _, _, shape in entry["pieces"]]
        assert sum(sizes) == math.prod(entry["shape"]), name
    if run != "tp":
        assert index["tied"] == {"head.weight": "embed.weight"}
        assert not any("head" in name for name in index["tensors"])
    stored = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            stored += sum(opened.get_tensor(key).numel() for key in opened.keys())  # noqa: SIM118
    assert stored == sum(math.prod(entry["shape"]) for entry in index["tensors"].values())


def test_tensor_parallel_loads_in_one_process(world):
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    optimizer = adamw(model)
    load(checkpoints(world[0] / "tp")[-1], model=model, optimizer=optimizer)
    same(everything(model, optimizer), torch.load(world[0] / "tp" / "expected.pt"))


def test_pytorch_reads_the_files_too(world):
    """The tensors' files are DCP's Hugging Face format: an independent reader finds the same values."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    (checkpoint,) = checkpoints(world[0] / "x4-adamw")
    model = built(2)
    load(checkpoint, model=model)
    targets = {"model.up.weight": torch.zeros(9, 6), "model.down.weight": torch.zeros(6, 9, dtype=torch.bfloat16)}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(targets, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    assert torch.equal(targets["model.up.weight"], model.up.weight)
    assert torch.equal(targets["model.down.weight"], model.down.weight)
