"""What the checkpoint tests share, and the ranks' half of the tests of several processes (`outcomes`)."""

from __future__ import annotations

import hashlib
import os
import resource
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from same_files import equal_files
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from weft.checkpoint import late_copy
from weft.checkpoint.background import BackgroundSaver
from weft.checkpoint.checkpoint_files import Keep
from weft.checkpoint.load import checkpoints, load
from weft.checkpoint.save import Content, stage
from weft.errors import UserError


class Uneven(nn.Module):
    """Sizes that four ranks do not divide (one leaves ranks empty), three dtypes, buffers, and a tied weight."""

    def __init__(self, width: int = 6):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.up = nn.Linear(width, 9)
        self.down = nn.Linear(9, width, dtype=torch.bfloat16)
        self.tiny = nn.Linear(3, 1, dtype=torch.float64)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scale", torch.tensor(0.1, dtype=torch.float64))


def built(seed: int, width: int = 6) -> Uneven:
    torch.manual_seed(seed)
    model = Uneven(width)
    model.count += seed
    return model


def shard(model: nn.Module, mesh) -> nn.Module:
    for part in (model.up, model.down, model.tiny):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Mixed(torch.optim.Optimizer):
    """Different state for different parameters: a momentum for matrices, which knows nothing of Adam's; numbers, lists
    and tensors of other shapes than the parameter's for others."""

    def __init__(self, params, lr: float = 0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if p.dim() == 2:
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(momentum, alpha=group["lr"])
                else:
                    if not state:
                        state.update(step=0, rate=0.1, recent=[torch.zeros_like(p), None], note={"last": "none"})
                        state["table"] = torch.zeros(2, 3, dtype=torch.float64)
                        state["sum"] = torch.zeros((), dtype=torch.bfloat16)
                    state["step"] += 1
                    state["rate"] *= 1.1
                    state["recent"][0].add_(p.grad, alpha=state["rate"])
                    state["table"] += 1 / 3
                    state["sum"] += 1
                    state["note"]["last"] = f"step {state['step']}"
                    p.sub_(state["recent"][0], alpha=float(state["table"][0, 0]) * float(state["sum"]))
        return None


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def mixed(model: nn.Module) -> torch.optim.Optimizer:
    return Mixed(model.parameters())


OPTIMIZERS = {"adamw": adamw, "mixed": mixed}


def updates(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Steps first..last-1 with gradients that depend on the parameter's name and the step alone, not on the mesh."""
    for step in range(first, last):
        for name, p in model.named_parameters():
            seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:4], "little")
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(p.dtype)
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        optimizer.step()


def whole(value):
    """A copy with every tensor whole and plain, so that two can be compared whatever mesh they lived on."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


def same(one, other, exact: bool = True, where: str = "") -> None:
    """Whether two trees are equal, tensors bit for bit; or, if not `exact`, to a few last places."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, f"{where}: {one.dtype} and {other.dtype}"
        if exact:
            assert torch.equal(one.detach(), other.detach()), f"{where} differs"
        else:
            torch.testing.assert_close(one.detach(), other.detach(), msg=lambda text: f"{where}: {text}")
    elif isinstance(one, dict):
        assert set(one) == set(other), f"{where}: {sorted(one)} and {sorted(other)}"
        for key in one:
            same(one[key], other[key], exact, f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, exact, f"{where}.{number}")
    else:
        assert type(one) is type(other), f"{where}: {type(one)} and {type(other)}"
        assert one == other, f"{where}: {one} and {other}"


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """All weights, buffers and optimizer state, whole, by parameter name."""
    parameters = dict(model.named_parameters())
    return {
        "model": {name: whole(value) for name, value in model.state_dict().items()},
        "optimizer": {name: whole(dict(optimizer.state.get(p, {}))) for name, p in parameters.items()},
    }


def write(
    run: Path, model, optimizer, step: int = 3, keep_last: int = 9, keep_every: int | None = None, **more
) -> Path:
    settings = {"state": {"seen": step * 10}, "architecture": {"type": "decoder"}, "others": {}} | more
    return stage(run, Content(step, model, optimizer, **settings), Keep(keep_last, keep_every)).write()


def start(run: Path, kind: str, prepare=lambda model: model) -> None:
    """Train 3 steps and save; then 2 more without stopping. What there was both times is kept beside the checkpoint."""
    model = prepare(built(1))
    optimizer = OPTIMIZERS[kind](model)
    updates(model, optimizer, 0, 3)
    write(run, model, optimizer)
    states = [everything(model, optimizer)]
    updates(model, optimizer, 3, 5)
    states.append(everything(model, optimizer))
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(states, run / "expected.pt")


def goes_on(run: Path, kind: str, prepare=lambda model: model, same_mesh: bool = False) -> None:
    """Load into a fresh model and optimizer: all is as it was saved, bit for bit, and so are the next two steps on the
    same mesh. (On another one AdamW's last bits differ: vectorized and left-over elements are rounded differently.)"""
    (checkpoint,) = checkpoints(run)
    saved, later = torch.load(run / "expected.pt")
    model = prepare(built(2))
    optimizer = OPTIMIZERS[kind](model)
    for _ in range(2):  # the second time into an optimizer that has stepped
        assert load(checkpoint, model=model, optimizer=optimizer) == {"seen": 30, "step": 3}
        same(everything(model, optimizer), saved)
        updates(model, optimizer, 3, 5)
        same(everything(model, optimizer), later, exact=same_mesh)
    assert model.head.weight is model.embed.weight


# ---- the cases; each runs on all ranks of its world


def two_ranks(folder: Path, rank: int):
    mesh = init_device_mesh("cpu", (2,))
    for kind in OPTIMIZERS:
        sharded = {"kind": kind, "prepare": lambda model: shard(model, mesh)}
        yield f"x1-to-x2-{kind}", partial(goes_on, folder / f"x1-{kind}", **sharded)
        yield f"save-x2-{kind}", partial(start, folder / f"x2-{kind}", **sharded)


def four_ranks(folder: Path, rank: int):
    mesh = init_device_mesh("cpu", (4,))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for kind in OPTIMIZERS:
        meshes = {"x4": lambda model: shard(model, mesh), "hsdp": lambda model: shard(model, hybrid)}
        for name, prepare in meshes.items():
            yield f"save-{name}-{kind}", partial(start, folder / f"{name}-{kind}", kind, prepare)
        for before, after in (("x1", "x4"), ("x2", "x4"), ("x4", "x4"), ("x4", "hsdp"), ("hsdp", "hsdp")):
            case = partial(goes_on, folder / f"{before}-{kind}", kind, meshes[after], same_mesh=before == after)
            yield f"{before}-to-{after}-{kind}", case
    yield "tensor-parallel", lambda: tensor_parallel(folder)
    for name, model in (
        ("x4", meshes["x4"](built(1))),
        ("hsdp", meshes["hsdp"](built(1))),
        ("tp", built_for_tensor_parallel(1)),
    ):
        yield f"beside-{name}", partial(beside, folder / f"beside-{name}", rank, model)
    yield "disk-full", lambda: disk_full(folder, rank, mesh)
    yield "damaged", lambda: refuses(folder / "damaged", built(2), "shard-00001-model-00001-of-00001.safetensors", rank)
    yield (
        "mismatch",
        lambda: refuses(folder / "x1-adamw", shard(built(2, width=8), mesh), "[11, 8] in this model", rank),
    )


def built_for_tensor_parallel(seed: int) -> nn.Module:
    """FSDP2 over tensor parallelism: two sharded dimensions, one of them strided."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def beside(folder: Path, rank: int, model: nn.Module) -> None:
    """Saves beside the next updates, copied late in blocks, are those of saves that the training waits for."""
    late_copy._SMALL, late_copy._BLOCK = 8, 64
    saver, optimizer, layout = BackgroundSaver(), adamw(model), None
    optimizer.register_step_pre_hook(lambda *_: saver.copied())
    settings = {"state": {}, "architecture": {"type": "decoder"}}
    for step in range(5):
        others = {"extra": torch.arange(5.0)} if step == 3 and rank == 1 else {}  # only this rank needs a new layout
        content = Content(step, model, optimizer, others=others, **settings)
        saver.finish()
        stage(folder / "sync", content, Keep(9)).write()
        staged = stage(folder / "async", content, Keep(9), saver.begin(), layout=layout)
        layout = staged.layout
        saver.start(staged, late=True)
        updates(model, optimizer, step, step + 1)
    saver.finish()
    dist.barrier()
    assert equal_files(folder / "sync", folder / "async") >= 5 * 8
    assert len(checkpoints(folder / "async")) == 5


def tensor_parallel(folder: Path) -> None:
    build = built_for_tensor_parallel
    model = build(1)
    optimizer = adamw(model)
    updates(model, optimizer, 0, 3)
    checkpoint = write(folder / "tp", model, optimizer)
    before = everything(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(before, folder / "tp" / "expected.pt")
    model = build(2)
    optimizer = adamw(model)
    load(checkpoint, model=model, optimizer=optimizer)
    same(everything(model, optimizer), before)


def refused(rank: int, action) -> str:
    """The text of the UserError that the action raises, on all ranks; only the first is to say it."""
    try:
        action()
    except UserError as error:
        if error.quiet != (rank != 0):
            raise AssertionError(f"rank {rank} is quiet: {error.quiet}") from error
        return str(error)
    raise AssertionError("it went through")


def disk_full(folder: Path, rank: int, mesh) -> None:
    """A rank that cannot write: all say so, none hangs, nothing is left but what was there."""
    run = folder / "full"
    model = shard(built(1), mesh)
    optimizer = adamw(model)
    updates(model, optimizer, 0, 1)
    first = write(run, model, optimizer, step=1)
    old = {path.name: path.read_bytes() for path in first.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # files over 100 bytes: OSError EFBIG
    text = refused(rank, lambda: write(run, model, optimizer, step=2))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large; the last complete checkpoint is step-00000001" in text, text
    assert "run the same command again" in text, text
    assert "\n" not in text, text
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]
    assert {path.name: path.read_bytes() for path in first.iterdir()} == old
    dist.barrier()
    write(run, model, optimizer, step=2)
    assert [path.name for path in checkpoints(run)] == ["step-00000001", "step-00000002"]


def refuses(run: Path, model, expected: str, rank: int) -> None:
    text = refused(rank, lambda: load(checkpoints(run)[-1], model=model))
    assert expected in text, text


def outcomes(folder: Path, without: set[str]) -> dict[str, str]:
    """On each of four ranks: the cases, and what became of them. They are a world of two first, then of four."""
    rank, outcome = int(os.environ.pop("RANK")), {}
    os.environ.pop("WORLD_SIZE")
    for size, cases in ((2, two_ranks), (4, four_ranks)):
        if rank >= size:
            continue
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{size}", rank=rank, world_size=size)
        for name, case in cases(folder, rank):
            if name in without:
                continue
            try:
                case()
                outcome[name] = "fine"
            except Exception:
                outcome[name] = traceback.format_exc()
            dist.barrier()
        dist.barrier()
        dist.destroy_process_group()
    return outcome
