"""What lives on the host changes no number, no checkpoint and no resume."""

from types import SimpleNamespace

import pytest
import torch
from matrix import Case
from running import QUIET, assert_same_weights, losses, train
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.checkpoint.tensors import empty_state
from weft.optim.adamw import AdamW
from weft.optim.muon import Muon
from weft.parallel.memory.offload import keep_state_on_host

OPTIMIZERS = {
    "adamw": {"type": "adamw", "lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]},
    "muon": {"type": "muon", "lr": 0.02, "weight_decay": 0.1, "betas": [0.9, 0.95]},
}


@pytest.fixture
def run(run_yaml, tmp_path):
    """Trains 4 steps, two halves of them apart if `then` says how the second goes on; gives the run directory."""

    def run(name, offload, then=None, optimizer="adamw", data=None, **changes):
        file = run_yaml(
            run={"name": name},
            optimizer=OPTIMIZERS[optimizer],
            data=data or {"validation": None},
            schedule={"type": "constant", "warmup_steps": 0},
            training={"steps": 4, "batch_tokens": 512, "dtype": "float32"},
            log=QUIET,
            **changes,
        )
        if then is not None:
            assert train(file, f"parallel.offload={offload}", "training.steps=2") == 0
        assert train(file, f"parallel.offload={then or offload}") == 0
        return tmp_path / "runs" / name

    return run


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_runs_are_the_same_to_the_bit_and_go_on_from_one_another(run, optimizer):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "correction_bias": True}
    settings = {"optimizer": optimizer, "model": {"moe": moe}}  # whose routers have buffers
    plain = run("plain", "none", **settings)
    changed = run("changed", "parameters", "optimizer", **settings)
    assert losses(changed) == losses(plain)
    assert_same_weights(changed, plain)


def test_a_model_on_the_host_writes_samples_and_is_validated(run, tmp_path, tiny_heldout):
    found = []
    for offload in ("none", "parameters"):
        changes = {"samples": {"prompts": ["Ka"], "max_new_tokens": 4}, "validation": {"every": 2}}
        directory = run(offload, offload, data={"validation": str(tiny_heldout)}, **changes)
        text = [line.split('"samples"')[-1] for line in (directory / "samples.jsonl").read_text().splitlines()]
        found.append((losses(directory), text))
    assert found[0] == found[1]


ON_RANKS = [
    pytest.param("gqa", "clipping", {"dp_shard": 2, "tp": 2, "offload": "parameters"}, marks=pytest.mark.long),
    pytest.param("moe", "accumulation", {"dp_shard": 2, "ep": 2, "offload": "parameters"}, marks=pytest.mark.long),
    ("tied", "uneven", {"pp": 2, "offload": "parameters"}),
]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("model", "way", "mesh"), ON_RANKS, ids=["tp", "ep", "pp"])
def test_on_several_ranks(runner, model, way, mesh):
    difference = runner.compare(Case(model, way, mesh, layers=2))
    assert difference.good, difference.wrong()


@pytest.mark.parametrize(("optimizer", "role"), [(AdamW, "other"), (Muon, "matrix")])
def test_state_is_on_the_device_in_pieces_and_only_in_an_update(monkeypatch, optimizer, role):
    """On a GPU that is made up: tensors have devices and sizes, and no values."""
    device, waited = torch.device("cuda", 0), []
    stream = SimpleNamespace(synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_stream=lambda _: stream))
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(64, 64, device=device)) for _ in range(5)]
        made = optimizer([{"params": parameters, "role": role}])
        step, inside = made.step, []

        def spy():
            step()
            inside.append([[value.device for value in made.state.get(p, {}).values()] for p in parameters])

        made.step = spy
        keep_state_on_host(made, device, chunk=2 * 64 * 64 * 4)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            made.step()
        host = torch.device("cpu")
        for parameter in parameters:
            assert {value.device for value in made.state[parameter].values() if value.dim()} == {host}
        assert len(inside) == 6  # 5 parameters, 2 at a time, twice
        for number, devices in enumerate(inside[3:]):
            there = [index for index, found in enumerate(devices) if host not in found]
            assert there == list(range(5))[2 * number : 2 * number + 2]
        assert made.param_groups[0]["params"] == parameters
        assert len(waited) == 2

        index = {"tensors": {"x": {"dtype": "float32", "shape": [64, 64]}, "step": {"dtype": "float32", "shape": []}}}
        group, targets = made.param_groups[0], {}
        for name, where in (("x", host), ("step", device)):  # a checkpoint is loaded to where it will be
            kind = "parameter" if name == "x" else "scalar"
            assert empty_state({"tensor": kind}, name, parameters[0], group, index, targets).device == where


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [AdamW, Muon])
def test_on_a_gpu_the_state_takes_no_memory_and_has_the_same_bits(optimizer):
    def trained(piece):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(512, 512, device="cuda")) for _ in range(6)]
        made = optimizer([{"params": parameters, "role": "matrix"}])
        if piece:
            keep_state_on_host(made, torch.device("cuda", 0), piece)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach())
            before = torch.cuda.memory_allocated()
            made.step()
        held = torch.cuda.memory_allocated() - before
        return parameters, sum(v.numel() * 4 for s in made.state.values() for v in s.values() if v.is_cuda), held

    plain, on_device, _ = trained(None)
    other, still_there, held = trained(2 * 512 * 512 * 4)
    assert on_device >= 6 * 512 * 512 * 4
    assert still_there < 100
    assert held < 1 << 20
    for one, two in zip(plain, other, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0 if optimizer is AdamW else 1e-3)


@pytest.mark.gpu
def test_on_a_gpu_parameters_on_the_host_give_the_same_run(run):
    """Updates on the host round otherwise than a GPU's."""
    plain = run("plain", "none")
    for offload, close in (("parameters", 1e-4), ("optimizer", 0.0)):
        changed = run(offload, offload, "none")
        for (_, loss, norm), (_, other, other_norm) in zip(losses(plain), losses(changed), strict=True):
            assert loss == pytest.approx(other, abs=close)
            assert norm == pytest.approx(other_norm, rel=1e-3 if close else 0.0, abs=0.0)
