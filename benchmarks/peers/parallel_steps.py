"""One rank of one measurement of parallel_fsdp.py or parallel_gpu.py: some training steps; or the models' folder, made;
or what the device can do at most.

    parallel_steps.py --job '{"peer": "weft", "mesh": {"dp_shard": 4}, "shape": ..., "folder": ..., ...}'

RANK and the like say which rank it is, as under torchrun; without them it is alone. All peers take the same rows of
the same tokens in each step, and AdamW with the same settings. The weights are those of `folder`; without one, random.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from common import CLIP, Clock, batch, optimizer, peak_resident_bytes

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def work(asked: dict) -> None:
    """Train for some steps; the first rank prints what was measured as the last line."""
    from weft.launch.threads import use_huge_pages, wait_briefly

    wait_briefly()  # before torch loads
    use_huge_pages()
    import torch
    import torch.distributed as dist

    from weft.train.auto_settings import keep_freed_memory

    torch.set_num_threads(asked["threads"])
    keep_freed_memory()
    if asked["peer"] == "make":
        from hf_model import llama

        llama(asked["shape"]).save_pretrained(asked["folder"])
        print(json.dumps({"made": True}))
        return
    if asked["peer"] == "peak":
        from weft.observe.flops import device_peak

        peak = device_peak(asked["device"], torch.bfloat16)
        name = torch.cuda.get_device_name() if asked["device"] == "cuda" else None
        print(json.dumps({"flops_per_second": peak.flops_per_second, "origin": peak.origin, "device": name}))
        return
    step = PEERS[asked["peer"]](asked)
    clock, losses = Clock(asked), []
    began, cpu = time.perf_counter(), 0.0
    for number in range(asked["warmup"] + asked["steps"]):
        if number == asked["warmup"]:
            cpu = time.process_time()
        losses.append(step(number))
        clock.tick()
    cuda = asked["device"] == "cuda"
    told = (torch.cuda.max_memory_allocated() if cuda else peak_resident_bytes(), losses[0], time.process_time() - cpu)
    every = [told] * RANKS
    if RANKS > 1:
        dist.all_gather_object(every, told)
    done = {
        "seconds": clock.seconds(),
        "first_seconds": clock.ends[0] - began,
        "peak_bytes": max(peak for peak, *_ in every),
        # Peers note the mean of their own rows, Weft that of all: over the ranks both are one.
        "first_loss": sum(loss for _, loss, _ in every) / RANKS,
        "cpu_seconds": sum(cpu for *_, cpu in every) / asked["steps"],
        "torch": torch.__version__,
    }
    if RANK == 0:
        print(json.dumps(done), flush=True)
    if dist.is_initialized():
        dist.barrier()  # gloo aborts when one rank tears down while another still talks
        dist.destroy_process_group()


# ---- Weft: the parts of its training loop


def weft(asked: dict):
    """Weft's model, or transformers' under `type: hf`, on a mesh."""
    import torch

    from weft.checkpoint.huggingface.transformers_files import fill_transformers_model
    from weft.checkpoint.load import load
    from weft.config.mesh import ParallelSection
    from weft.config.model import ModelSection
    from weft.config.transformers_model import TransformersModelSection
    from weft.data.batches.batch import Batch
    from weft.objectives.pretrain import Pretrain
    from weft.parallel.apply import build_sharded_model
    from weft.parallel.axes.pipeline import PipelinePasses
    from weft.parallel.fp8 import raise_unless_usable
    from weft.parallel.gradients.clip import clip_gradients
    from weft.parallel.model_state import ModelPlan
    from weft.parallel.passes import Passes
    from weft.parallel.world import start_world
    from weft.train.auto_settings import DTYPES

    folder, is_hf = asked.get("folder"), asked.get("hf", False)
    if is_hf:
        config = json.loads((Path(folder) / "config.json").read_text())
        section = TransformersModelSection(type="hf", path=folder, config=config)
    else:
        section = ModelSection(**asked["shape"])
    parallel = ParallelSection(**asked.get("mesh", {}))
    world = start_world(parallel)
    fp8 = {"fp8": True, "fp8-rowwise": "rowwise"}.get(asked["dtype"], False)
    if fp8:
        raise_unless_usable(world.device)
    plan = ModelPlan(
        section,
        parallel,
        dtype=DTYPES["float32" if asked["dtype"] == "fp32" else "bfloat16"],
        reduce_dtype=DTYPES.get(asked.get("reduce")),
        compile=asked["compile"],
        sequence=asked["sequence"],
        fp8=fp8,
    )
    model = build_sharded_model(plan, world)
    if is_hf:
        fill_transformers_model(model, section)
    elif folder:
        load(folder, model=model)
    objective, kind = Pretrain(), PipelinePasses if world.shape.pp > 1 else Passes
    passes, adamw = kind(model, objective, world, parallel), optimizer(model)
    parameters = list(model.parameters())
    passes.after_update()

    def step(number: int) -> float:
        # As from the loader, on the host: what is counted of it does not wait for a GPU.
        tokens, labels = mine(batch(asked | {"device": "cpu"}, number), world.data_rank, world.data_ranks)
        rows, sequence = tokens.shape
        whole = Batch(
            tokens=tokens,
            labels=labels,
            weight=torch.ones(rows, sequence),
            positions=torch.arange(sequence).repeat(rows, 1),
            segments=None,
            samples=torch.arange(rows),
        )
        weight, learned = world.sum(objective.weight(whole), whole.weight.sum(dtype=torch.float64))
        micro_batches = whole.split(asked.get("micro", rows))
        total = passes.train(micro_batches, weight=weight, learned_tokens=learned, seed=lambda sample: sample)
        loss = world.sum(total[0])[0] / weight
        clip_gradients(parameters, CLIP, world.pp_group)
        adamw.step()
        passes.after_update()
        adamw.zero_grad()
        return loss

    return step


def mine(tensors, part: int, parts: int):
    """One rank's rows."""
    return tuple(tensor.chunk(parts)[part] for tensor in tensors)


# ---- The peers, over transformers' Llama: its own loss, of the labels that Weft is given too


def loss_of(model, rows):
    tokens, labels = rows
    return model(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss


def from_folder(asked: dict, **options):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(asked["folder"], dtype=torch.float32, **options).train()


def plain_step(asked: dict, model, call, shared: bool = True):
    """Backward, clip, update and the rank's own loss: PyTorch's own loop.

    Args:
        call: rows -> the mean loss.
        shared: each rank has its own rows.
    """
    kinds = by_kind(model.parameters())
    adamw = optimizer(model, [{"params": kind} for kind in kinds])

    def step(number: int) -> float:
        rows = batch(asked, number)
        loss = call(mine(rows, RANK, RANKS) if shared else rows)
        loss.backward()
        clip(kinds)
        adamw.step()
        adamw.zero_grad()
        return loss.item()

    return step


def by_kind(parameters) -> list[list]:
    """DTensors and others: neither clipping nor the fused AdamW takes them together."""
    from torch.distributed.tensor import DTensor

    parameters = list(parameters)
    return [kind for cut in (True, False) if (kind := [p for p in parameters if isinstance(p, DTensor) == cut])]


def clip(kinds: list[list]) -> None:
    """By PyTorch's function, or its two halves where there are two kinds."""
    import torch
    from torch.distributed.tensor import DTensor

    if len(kinds) == 1:
        torch.nn.utils.clip_grad_norm_(kinds[0], CLIP)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds]
    norm = torch.stack([x.full_tensor() if isinstance(x, DTensor) else x for x in norms]).norm()
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, CLIP, norm)


def autocast(asked: dict):
    import torch

    return torch.autocast(asked["device"], torch.bfloat16) if asked["dtype"] == "bf16" else nullcontext()


def ddp(asked: dict):
    """PyTorch's DistributedDataParallel under autocast."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(from_folder(asked))
    compiled = torch.compile(model) if asked["compile"] else model

    def call(rows):
        with autocast(asked):
            return loss_of(compiled, rows)

    return plain_step(asked, model, call)


def transformers(asked: dict):
    """transformers' own FSDP2 or tensor parallelism, by its `DistributedConfig`."""
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    ways = dict(asked["mesh"])
    if sharded := "fsdp_size" in ways:
        ways["fsdp_mixed_precision"] = asked["dtype"] == "bf16"
    model = from_folder(asked, distributed_config=DistributedConfig(**ways))
    if asked["compile"]:
        for layer in model.model.layers:
            layer.compile()

    def call(rows):
        with nullcontext() if sharded else autocast(asked):
            return loss_of(model, rows)

    return plain_step(asked, model, call, shared=sharded)


def accelerate(asked: dict):
    """Accelerate's loop: DDP, or FSDP2 with its defaults and a unit for each layer."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType, TorchDynamoPlugin

    plugin = None
    if asked["mesh"] == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    accelerator = Accelerator(
        cpu=asked["device"] == "cpu",
        mixed_precision={"bf16": "bf16", "fp32": "no"}[asked["dtype"]],
        fsdp_plugin=plugin,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        if asked["compile"]
        else None,
    )
    if plugin is not None and accelerator.distributed_type == DistributedType.MULTI_CPU:
        # On CPUs it takes no notice of the plugin (1.15) and goes on with DDP; told by hand, the rest is its own.
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        if asked["dtype"] == "bf16":
            plugin.set_mixed_precision("bf16")
    model = from_folder(asked)
    model, adamw = accelerator.prepare(model, optimizer(model))

    def step(number: int) -> float:
        loss = loss_of(model, mine(batch(asked, number), RANK, RANKS))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()
        return loss.item()

    return step


PEERS = {"weft": weft, "ddp": ddp, "transformers": transformers, "accelerate": accelerate}

if __name__ == "__main__":
    work(json.loads(sys.argv[2]))
