"""One measurement of family_step.py or family_turns.py: some training steps of one model; or that model's folder, made.

family_steps.py --job '{"peer": "weft", "mode": "eager", "folder": ..., ...}'
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import families
from common import optimizer, peak_resident_bytes

WARMUP, LEAST = 3, 3  # steps that are not measured; steps that are, however long they take


def work(asked: dict) -> None:
    """Train for some steps; prints what was measured as the last line."""
    from weft.launch.threads import use_huge_pages, wait_briefly

    wait_briefly()  # before torch loads
    use_huge_pages()
    import torch

    from weft.train.auto_settings import keep_freed_memory

    torch.set_num_threads(asked["threads"])
    keep_freed_memory()
    folder, device = Path(asked["folder"]), asked["device"]
    if asked["peer"] == "make":
        families.write_folder(asked["family"], device, folder)
        print(json.dumps({"made": True}))
        return
    build = transformers_model if asked["peer"] == "transformers" else weft_model
    model, loss_of, implementation = build(asked, folder)
    adamw = optimizer(model)
    torch.manual_seed(0)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokens = torch.randint(vocabulary, (asked["batch"], asked["sequence"])).to(device)

    def step() -> float:
        loss = loss_of(tokens)
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        found = loss.item()  # waits for the GPU, but for the update
        if device == "cuda":
            torch.cuda.synchronize()
        return found

    if asked.get("in_turns"):
        one_by_one(step, implementation)
        return
    ends, losses = [], []
    while len(ends) < WARMUP + LEAST or ends[-1] - ends[WARMUP - 1] < asked["seconds"]:
        losses.append(step())
        ends.append(time.perf_counter())
    done = {
        "seconds": [end - begin for begin, end in zip(ends[WARMUP - 1 :], ends[WARMUP:], strict=False)],
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else peak_resident_bytes(),
        "implementation": implementation,
    }
    print(json.dumps(done), flush=True)


def one_by_one(step: Callable[[], float], implementation: str | None) -> None:
    """Makes a step for each line of standard input, and prints what it took."""
    print(json.dumps({"implementation": implementation}), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        took = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps(took | {"loss": loss, "peak_bytes": peak_resident_bytes()}), flush=True)


def weft_model(asked: dict, folder: Path):
    """A model as a run of Weft has it: Weft's own, or transformers' under `type: hf`."""
    import torch

    from weft.checkpoint.huggingface.folder import section_of
    from weft.checkpoint.huggingface.transformers_files import fill_transformers_model
    from weft.checkpoint.load import load
    from weft.config.mesh import ParallelSection
    from weft.config.transformers_model import TransformersModelSection
    from weft.models.forward import forward_of
    from weft.parallel.apply import build_sharded_model
    from weft.parallel.model_state import ModelPlan
    from weft.parallel.world import start_world
    from weft.train.auto_settings import DTYPES

    is_hf = asked["peer"] == "hf"
    if is_hf:
        config = json.loads((folder / "config.json").read_text())
        section = TransformersModelSection(type="hf", path=str(folder), config=config)
    else:
        section = section_of(folder)
    parallel = ParallelSection()
    world = start_world(parallel)
    dtype = DTYPES[{"bf16": "bfloat16", "fp32": "float32"}[asked["dtype"]]]
    plan = ModelPlan(section, parallel, dtype=dtype, compile=asked["mode"] == "compiled")
    model = build_sharded_model(plan, world)
    if is_hf:
        fill_transformers_model(model, section)
    else:
        load(folder, model=model)
    forward = forward_of(model)

    def loss_of(tokens):
        # The last token has no successor: it counts for nothing, as in transformers.
        logprobs = forward({"tokens": tokens, "labels": torch.roll(tokens, -1, dims=1)})
        return -logprobs[:, :-1].mean()

    return model, loss_of, None


def transformers_model(asked: dict, folder: Path):
    """transformers' model, under autocast."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(asked["device"]).train()
    experts = (
        getattr(model.config, "_experts_implementation", None) if hasattr(model.config, "num_experts_per_tok") else None
    )
    implementation = model.config._attn_implementation + (f", experts {experts}" if experts else "")
    call = torch.compile(model) if asked["mode"] == "compiled" else model

    def loss_of(tokens):
        with torch.autocast(asked["device"], torch.bfloat16, enabled=asked["dtype"] == "bf16"):
            return call(input_ids=tokens, labels=tokens, use_cache=False).loss

    return model, loss_of, implementation


if __name__ == "__main__":
    work(json.loads(sys.argv[2]))
