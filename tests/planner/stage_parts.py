"""What ranks do in the tests of pipeline stages: run modules by plans, and compare with one process."""

import copy
import functools
import gc
import os
import weakref

import torch
from staged_modules import inputs_of, make, token_loss
from torch.distributed.tensor import Shard

from weft.errors import UserError
from weft.planner.parallelize.mesh import start_processes
from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.stage_reference import is_here, run_micro_batches

TWO = {
    "gpt": (("", ("wte", "wpe", "h.0..1")), ("h.2", ("h.2..3", "ln_f", "lm_head"))),
    "encoder-decoder": (
        ("", ("embed", "encoder", "decoder.layers.0")),
        ("decoder.layers.1", ("decoder.layers.1..2", "decoder.norm", "embed")),
    ),
    "unet": (("", ("enter", "down", "middle")), ("up.0", ("up", "out"))),
    "mixed": (("", ("embed", "sides", "h.0..1")), ("h.2", ("h.2..3", "out"))),
}
FOUR = {
    "gpt": (
        ("", ("wte", "wpe", "h.0")), ("h.1", ("h.1",)), ("h.2", ("h.2",)), ("h.3", ("h.3", "ln_f", "wte.weight")),
    ),
    "encoder-decoder": (
        ("", ("embed", "encoder.0")), ("encoder.1", ("encoder.1", "embed")),
        ("decoder.layers.0", ("decoder.layers.0",)),
        ("decoder.layers.1", ("decoder.layers.1..2", "decoder.norm", "embed")),
    ),
    "unet": (
        ("", ("enter", "down.0")), ("down.1", ("down.1", "middle")), ("up.0", ("up.0",)), ("up.1", ("up.1", "out")),
    ),
    "mixed": (("", ("embed", "sides", "h.0")), ("h.1", ("h.1",)), ("h.2", ("h.2",)), ("h.3", ("h.3", "out"))),
}  # fmt: skip
TWO["dropout"], FOUR["dropout"] = TWO["gpt"], FOUR["gpt"]
TP = {
    "gpt": {"h.*.fc.*": Shard(0), "h.*.proj.weight": Shard(1), "wte.weight": Shard(0), "lm_head.weight": Shard(0)},
    "encoder-decoder": {"*.*.linear1.*": Shard(0), "*.*.linear2.weight": Shard(1)},
    "unet": {"enter.*": Shard(0), "middle.*": Shard(0)},
    "mixed": {"h.*.weight": Shard(0), "h.*.bias": Shard(0)},
}
TP["dropout"] = TP["gpt"]


def plan_of(name, ranks, schedule="1F1B", dp=1, tp=1, micro_batches=4):
    """A plan with stages for a module; two stages on each pipeline rank where the schedule needs them."""
    pp = ranks // (dp * tp)
    stages = TWO if pp == 2 and schedule in ("1F1B", "GPipe") else FOUR
    parameters = {} if tp == 1 else TP[name]
    return Plan(
        pp=pp, dp=dp, tp=tp, parameters=parameters, stages=stages[name], schedule=schedule, micro_batches=micro_batches
    )


def equal_to_one_process(cases, steps=2):
    """For each case: the largest difference of loss, gradients, buffers, and parameters after steps, on this rank."""
    torch.set_default_dtype(torch.float64)
    found = []
    for name, options in cases:
        plan, reference = plan_of(name, int(os.environ["WORLD_SIZE"]), **options), make(name)
        loss = token_loss if name == "encoder-decoder" else None
        module = plan.apply(copy.deepcopy(reference), loss=loss)
        assert list(reference.state_dict()) == list(module.state_dict())
        own = [parameter for parameter in module.parameters() if is_here(parameter)]
        assert 0 < len(own) < len(list(module.parameters()))  # other ranks have the rest
        optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3, eps=1e-3) for one in (reference, module)]
        worst = 0.0
        for _ in range(steps):
            args, kwargs = inputs_of(name)
            if name == "dropout":
                expected = run_micro_batches(plan, reference, args, kwargs, loss)
            else:
                out = reference(*args, **kwargs)
                value = out if loss is None else loss(out)
                value.backward()
                expected = value.item()
            torch.manual_seed(0)
            value = module(*args, **kwargs)
            (2 * value).backward()
            for parameter in own:
                if parameter.grad is not None:
                    parameter.grad /= 2
            worst = max(worst, abs(value.item() - expected), _difference(reference, module, "grad"))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        worst = max(worst, _difference(reference, module, "data"))
        if name == "unet":
            assert module.steps.item() == steps * plan.micro_batches
        with torch.no_grad():
            args, kwargs = inputs_of(name)
            outs = [one.eval()(*args, **kwargs) for one in (reference, module)]
            worst = max(worst, abs((outs[0] if loss is None else loss(outs[0])).item() - outs[1].item()))
        found.append((f"{name} {options}", worst))
    return found


def _difference(reference, module, attribute):
    found = [0.0]
    for (name, one), (other_name, other) in zip(reference.named_parameters(), module.named_parameters(), strict=True):
        assert name == other_name
        if not is_here(other):
            assert other.grad is None
            continue
        first, second = getattr(one, attribute), getattr(other, attribute)
        assert (first is None) == (second is None), name
        if first is not None:
            found.append((first - second.full_tensor()).abs().max().item())
    return max(found)


def refusals():
    """Messages of calls that stages refuse."""
    torch.set_default_dtype(torch.float64)
    found = []
    plan = plan_of("gpt", 2)
    forgets = Plan(pp=2, stages=(TWO["gpt"][0], ("h.2", ("h.2..3", "ln_f"))), micro_batches=2)
    order = Plan(pp=2, stages=(("", ("wte", "wpe", "h", "ln_f")), ("h", ("wte",))), micro_batches=2)
    for name, one, rows in (
        ("gpt", plan, 6),
        ("gpt", forgets, 8),
        ("encoder-decoder", plan_of("encoder-decoder", 2), 8),
    ):
        args, kwargs = inputs_of(name, rows)
        try:
            one.apply(make(name))(*args, **kwargs)
        except UserError as error:
            found.append(str(error))
    try:
        order.apply(make("gpt"))(*inputs_of("gpt")[0])
    except UserError as error:
        found.append(str(error))
    return found


def rounding(schedules, micro_batches=16):
    """For each schedule: errors of gradients in bfloat16 over float32 parameters, on this rank.

    Returns:
        (schedule, error of the stages, error of a sum in bfloat16), relative to the sum in float32 of the gradients of
        the micro-batches on one device.
    """
    torch.set_default_dtype(torch.float32)
    args, _ = inputs_of("gpt", 2 * micro_batches)
    device = make("gpt").bfloat16()
    sums = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in device.named_parameters()}
    rounded = {name: torch.zeros_like(one) for name, one in device.named_parameters()}
    for number in range(micro_batches):
        device.zero_grad()
        (device(*(one[2 * number : 2 * number + 2] for one in args)) / micro_batches).backward()
        for name, one in device.named_parameters():
            sums[name] += one.grad.float()
            rounded[name] += one.grad
    found = []
    for schedule in schedules:
        plan = plan_of("gpt", int(os.environ["WORLD_SIZE"]), schedule, micro_batches=micro_batches)
        module = plan.apply(make("gpt").float(), dtype=torch.bfloat16)
        module(*args).backward()
        own = {name: one.grad.full_tensor() for name, one in module.named_parameters() if is_here(one)}
        assert all(one.dtype == torch.float32 for one in own.values())
        norm = sum(sums[name].square().sum() for name in own).sqrt()
        errors = [
            (sum((grads[name].float() - sums[name]).square().sum() for name in own).sqrt() / norm).item()
            for grads in (own, rounded)
        ]
        found.append((schedule, *errors))
    return found


class Scaled(torch.nn.Module):
    """A GPT with a function as argument."""

    def __init__(self):
        super().__init__()
        self.gpt = make("gpt")

    def forward(self, ids, targets, *, function):
        return function(self.gpt(ids, targets))


def calls_with_functions():
    """Runs a module three times with a new function as argument. Returns how often it was traced, and what it keeps."""
    torch.set_default_dtype(torch.float64)
    names = [(f"gpt.{begin}" if begin else "", tuple(f"gpt.{one}" for one in own)) for begin, own in TWO["gpt"]]
    start_processes(2)
    runtime = Plan(pp=2, stages=tuple(names), micro_batches=2).runtime(None, inputs="global", outputs="global")
    runtime.apply(Scaled())
    args, kept = inputs_of("gpt", 4)[0], []
    for scale in range(3):

        def finish(_, out, scale=scale):
            return out.full_tensor() * scale

        function = functools.partial(torch.mul, torch.tensor(float(scale)))
        runtime.run([(args, {"function": function})] * 2, lambda *_: None, finish)
        kept.append(weakref.ref(finish))
    del finish, function
    gc.collect()
    return len(runtime.calls), sum(one() is not None for one in kept)
