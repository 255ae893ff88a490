"""Trains a GPT, character by character as nanoGPT does, by plans and on one device: what ranks do, and the losses."""

import copy
import math
from pathlib import Path

import torch
from modules_to_parallelize import GPT
from torch.distributed.tensor import DTensor

from weft.planner.parallelize.plan import Plan
from weft.planner.parallelize.stage_reference import is_here

TEXT = (Path(__file__).parents[2] / "docs" / "parallelize.md").read_text(encoding="utf-8")
LENGTH, ROWS, RATE, CLIP = 24, 8, 3e-3, 1.0


def loss_of(out):
    """The loss of nanoGPT's outputs: logits and loss."""
    return out[1]


def batches(steps):
    """Token ids and the ids that follow them, for each step."""
    alphabet = {character: number for number, character in enumerate(sorted(set(TEXT)))}
    ids, generator = torch.tensor([alphabet[one] for one in TEXT]), torch.Generator().manual_seed(4)
    for _ in range(steps):
        starts = torch.randint(len(ids) - LENGTH - 1, (ROWS,), generator=generator).tolist()
        rows = torch.stack([ids[start : start + LENGTH + 1] for start in starts])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make():
    """A GPT without dropout, with the same values on all ranks."""
    torch.manual_seed(0)
    model = GPT(hidden=32, vocab=len(set(TEXT)), layers=4)
    model.drop.p = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            std = 0.02 / math.sqrt(8) if "proj.weight" in name else 0.02
            torch.nn.init.normal_(parameter, std=std)
    return model


def clip(model):
    """Clips the norm of all gradients, each parameter counted once, also where ranks have different stages."""
    own = {name: one.grad for name, one in model.named_parameters() if is_here(one) and one.grad is not None}
    squares = {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).square().sum().item()
        for name, one in own.items()
    }
    if torch.distributed.is_initialized():
        every = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, squares)
        squares = {name: value for one in every for name, value in one.items()}
    factor = CLIP / max(CLIP, math.sqrt(math.fsum(squares[name] for name in sorted(squares))))
    for one in own.values():
        one.mul_(factor)


def curve(model, steps, staged=False):
    """The losses of training steps: AdamW with weight decay of matrices, a warm-up and a cosine, clipped gradients."""
    matrices = [one for one in model.parameters() if one.dim() > 1]
    vectors = [one for one in model.parameters() if one.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-6)
    found = []
    for step, (ids, targets) in enumerate(batches(steps)):
        rate = RATE * min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        out = model(ids, targets)
        loss = out if staged else loss_of(out)
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def curves(plans: list[dict], steps: int) -> list[list[float]]:
    """The losses on one device, and by each plan."""
    torch.set_default_dtype(torch.float64)
    reference = make()
    found = []
    for tables in plans:
        plan = Plan(**tables)
        module = plan.apply(copy.deepcopy(reference), loss=loss_of if plan.stages else None)
        found.append(curve(module, steps, staged=bool(plan.stages)))
    return [curve(reference, steps), *found]
