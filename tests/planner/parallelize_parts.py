"""What ranks do in the tests of `weft.parallelize`: run modules by plans, and compare with one process."""

import copy

import torch
from modules_to_parallelize import inputs_of, make
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from weft.planner.parallelize.containers import map_tensors
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.torch_private import replicated


def loss_of(out):
    """A number that depends on all elements of all outputs, each with a weight of its own."""
    found = []

    def weighted(tensor):
        if tensor.is_floating_point():
            found.append((tensor * torch.linspace(0.5, 1.5, tensor.numel()).view(tensor.shape).to(tensor)).sum())
        return tensor

    map_tensors(weighted, out)
    return sum(found)


def shapes_of(out):
    """The outputs with shapes in the place of tensors; DTensors would be seen."""
    return map_tensors(lambda tensor: (type(tensor).__name__, tuple(tensor.shape)), out)


def difference(reference, module):
    """The largest difference of gradients of two modules, one of which has DTensors, and of their buffers."""
    found = [0.0]
    for (name, one), (other_name, other) in zip(reference.named_parameters(), module.named_parameters(), strict=True):
        assert name == other_name
        assert isinstance(other, DTensor)
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert other.grad.placements == other.placements
            found.append((one.grad - other.grad.full_tensor()).abs().max().item())
    for (name, one), (other_name, other) in zip(reference.named_buffers(), module.named_buffers(), strict=True):
        assert name == other_name
        found.append((one.double() - other.double()).abs().max().item())
    return max(found)


def equal_to_one_process(cases: list[tuple[str, dict]], steps: int = 2) -> list[tuple[str, float]]:
    """For each module and plan: the largest difference of loss, gradients, buffers and parameters after steps."""
    torch.set_default_dtype(torch.float64)
    found = []
    for name, tables in cases:
        reference = make(name)
        module = Plan(**tables).apply(copy.deepcopy(reference))
        assert list(reference.state_dict()) == list(module.state_dict())
        optimizers = [
            torch.optim.AdamW(one.parameters(), lr=1e-3, eps=1e-3, foreach=True) for one in (reference, module)
        ]
        worst = 0.0
        for step in range(steps):
            args, kwargs = inputs_of(name)
            outs = []
            for one in (reference, module):
                torch.manual_seed(step)
                outs.append(one(*args, **kwargs))
                loss_of(outs[-1]).backward()
            assert shapes_of(outs[0]) == shapes_of(outs[1]), name
            worst = max(worst, abs(loss_of(outs[0]).item() - loss_of(outs[1]).item()), difference(reference, module))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(reference.parameters(), module.parameters(), strict=True):
            worst = max(worst, (one - other.full_tensor()).abs().max().item())
        found.append((name, worst))
    return found


def _pair(name, tables, **options):
    """A module on one device, and its copy on the mesh."""
    reference = make(name)
    return reference, Plan(**tables).apply(copy.deepcopy(reference), **options)


def uneven_rows_and_several_passes(tables):
    """Three rows on two data ranks; two forward passes before one backward pass, and one without gradients."""
    reference, module = _pair("block", tables)
    for rows in (3, 4):
        args, kwargs = inputs_of("block", rows)
        for one in (reference, module):
            torch.manual_seed(rows)
            first, second = one(*args, **kwargs), one(*args)
            (loss_of(first) + loss_of(second)).backward()
    found = [difference(reference, module)]
    for one in (reference, module):
        one.eval()
    with torch.no_grad():
        args, kwargs = inputs_of("block", 3)
        found.append((loss_of(reference(*args, **kwargs)) - loss_of(module(*args, **kwargs))).abs().item())
    return found


def local_inputs(tables):
    """Each data rank passes its own rows."""
    reference, module = _pair("clip", tables, inputs="local")
    args, kwargs = inputs_of("clip")
    rank = torch.distributed.get_rank() if tables.get("dp", 1) > 1 else 0
    own = slice(rank * 2, rank * 2 + 2) if tables.get("dp", 1) > 1 else slice(None)
    outs = [
        reference(*args, **kwargs),
        module(*map_tensors(lambda t: t[own], args), **map_tensors(lambda t: t[own], kwargs)),
    ]
    for out in outs:
        loss_of(out).backward()
    assert shapes_of(outs[0]) == shapes_of(outs[1])
    return [abs(loss_of(outs[0]).item() - loss_of(outs[1]).item()), difference(reference, module)]


def checkpointed_blocks(tables):
    """The module's own activation checkpointing."""
    reference, module = _pair("block", tables)
    reference.checkpointed = module.checkpointed = True
    args, kwargs = inputs_of("block")
    for one in (reference, module):
        torch.manual_seed(0)
        loss_of(one(*args, **kwargs)).backward()
    return [difference(reference, module)]


def state_dicts(tables):
    """A state dict of one device loads into the sharded module, in both ways; and full tensors load into one device."""
    other = make("unet")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    args, kwargs = inputs_of("unet")
    found = []
    for assign in (False, True):
        reference, module = _pair("unet", tables)
        missing = module.load_state_dict(other.state_dict(), assign=assign)
        assert not missing.missing_keys
        assert not missing.unexpected_keys
        full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in module.state_dict().items()}
        reference.load_state_dict(full)
        for one in (reference, module):
            loss_of(one(*args, **kwargs)).backward()
        found += [difference(reference, module), (reference.a.weight - other.a.weight).abs().max().item()]
    return found


def from_meta(tables):
    """Parameters on the meta device: from a state dict, and from each module's own initial values."""
    reference = make("block")
    with torch.device("meta"):
        empty = make("block")
    module = Plan(**tables).apply(empty, state_dict=reference.state_dict())
    args, kwargs = inputs_of("block")
    for one in (reference, module):
        torch.manual_seed(0)
        loss_of(one(*args, **kwargs)).backward()
    found = [difference(reference, module)]
    torch.manual_seed(5)
    again = Plan(**tables).apply(torch.nn.Linear(4, 6, device="meta").double())
    torch.manual_seed(5)
    found.append((again.weight.full_tensor() - torch.nn.Linear(4, 6, dtype=torch.float64).weight).abs().max().item())
    return found


def lower_dtype_and_local_outputs(tables):
    """Products in bfloat16, with parameters and reductions in float32; each data rank has the loss of its rows."""
    reference = torch.nn.Linear(8, 6, bias=False, dtype=torch.float32)
    module = Plan(**tables).apply(copy.deepcopy(reference), inputs="local", outputs="local", dtype=torch.bfloat16)
    x, rank = torch.randn(4, 8).bfloat16(), torch.distributed.get_rank()
    out = module(x[2 * rank : 2 * rank + 2])
    assert not isinstance(out, DTensor)
    assert (out.dtype, tuple(out.shape)) == (torch.bfloat16, (2, 6))
    out.sum().backward()
    low = reference.weight.detach().bfloat16()
    halves = [torch.ones(6, 2, dtype=torch.bfloat16) @ x[at : at + 2] for at in (0, 2)]
    assert module.weight.dtype == module.weight.grad.dtype == torch.float32
    expected = halves[0].float() + halves[1].float()
    return [
        (out - x[2 * rank : 2 * rank + 2] @ low.T).abs().max().item(),
        (module.weight.grad.full_tensor() - expected).abs().max().item(),
    ]


def contract(tables):
    """Numbers that are 0, by name."""
    torch.set_default_dtype(torch.float64)
    parts = (uneven_rows_and_several_passes, local_inputs, checkpointed_blocks, state_dicts, from_meta)
    parts += (lower_dtype_and_local_outputs,)
    return {part.__name__: max(part(tables)) for part in parts}


def without_rules(tables):
    """Functions that DTensor cannot run: which run on full tensors, and the largest difference from one process."""
    torch.set_default_dtype(torch.float64)
    reference, module = _pair("loops", tables)
    args, kwargs = inputs_of("loops")
    outs = [one(*args, **kwargs) for one in (reference, module)]
    for out in outs:
        loss_of(out).backward()
    assert shapes_of(outs[0]) == shapes_of(outs[1])
    assert outs[0]["count"] == outs[1]["count"]
    return dict(replicated), max(difference(reference, module), abs(loss_of(outs[0]).item() - loss_of(outs[1]).item()))


def transformers_models(names, dp, tp):
    """For each class: the largest difference from one process, as a part of the largest value."""
    import transformers_to_parallelize as models

    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        reference = models.make(name)
        args, kwargs = models.inputs_of(name)
        plan = Plan(dp=dp, tp=tp, parameters=output_dims(reference, tp))
        module = plan.apply(copy.deepcopy(reference))
        outs = []
        for one in (reference, module):
            torch.manual_seed(3)
            outs.append(one(*args, **kwargs))
            loss_of(outs[-1]).backward()
        assert str(shapes_of(outs[0])) == str(shapes_of(outs[1])), name
        losses = [loss_of(out).item() for out in outs]
        largest = max(p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None)
        found[name] = max(abs(losses[0] - losses[1]) / abs(losses[0]), difference(reference, module) / largest)
    return found


def output_dims(model, ranks):
    """Placements that shard the output dim of linear layers and embeddings."""
    names = {
        f"{name}.{parameter}".lstrip("."): Shard(0)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and module.weight.shape[0] % ranks == 0
        for parameter, _ in module.named_parameters(recurse=False)
    }
    return names if ranks > 1 else {}


LOSSES = {
    name: getattr(torch.nn.functional, name)
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
}
LOSSES["binary"] = lambda out, y: torch.nn.functional.binary_cross_entropy_with_logits(out, y.sigmoid())
LOSSES["divergence"] = lambda out, y: torch.nn.functional.kl_div(out.log_softmax(-1), y.softmax(-1))
LOSSES["weighted"] = lambda out, y: torch.nn.functional.mse_loss(out, y, weight=y.square())
LOSSES["sum"] = lambda out, y: torch.nn.functional.mse_loss(out, y, reduction="sum")


class WithLoss(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layer, self.name = nn.Linear(4, 3), name

    def forward(self, x, y):
        return LOSSES[self.name](self.layer(x), y)


def losses() -> dict[str, float]:
    """Name of a loss function -> the largest difference of loss and gradients, with rows over `dp`."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in LOSSES:
        torch.manual_seed(0)
        reference, x, y = WithLoss(name), torch.randn(8, 4), torch.randn(8, 3)
        module = Plan(dp=2).apply(copy.deepcopy(reference))
        outs = reference(x, y), module(x, y)
        for out in outs:
            out.backward()
        found[name] = max((outs[0] - outs[1]).abs().item(), difference(reference, module))
    return found
