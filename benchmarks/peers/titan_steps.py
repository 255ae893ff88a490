"""torchtitan's Llama in one process: its model, its parallelization and its chunked loss, in the shared loop.

Run by parallel_gpu.py. torchtitan's own trainer wants a data set and a tokenizer on disk; what is computed in a step is
what it computes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "export"))

import torch
import torch.distributed as dist
import torchtitan.tools.utils as tools
from common import CLIP, Clock, batch, job, optimizer, report

asked = job()
device, micro = asked["device"], asked.get("micro", asked["batch"])
# Without a GPU, torchtitan goes on as if there were one. Other modules copy these names when they are imported.
tools.device_type, tools.device_module = device, getattr(torch, device)

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models.llama3.parallelize import parallelize_llama  # noqa: E402
from torchtitan_models import built  # noqa: E402

dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
shape = asked["shape"]
config = shape | {"model_type": "llama", "rope_parameters": {"rope_theta": shape["rope_theta"]}}
torch.manual_seed(0)
with torch.device("meta"):
    model = built(config, asked["sequence"])
parallelism = ParallelismConfig(data_parallel_shard_degree=1, spmd_backend="partial_dtensor")
compiling = CompileConfig(enable=asked["compile"])
model = parallelize_llama(
    model,
    parallel_dims=ParallelDims.from_config(parallelism, 1),
    training=TrainingConfig(seq_len=asked["sequence"]),
    parallelism=parallelism,
    compile_config=compiling,
    ac_config=None,
    dump_folder="",
)
set_spmd_backend(parallelism.spmd_backend)
model.to_empty(device=device)
with torch.no_grad():
    model.init_weights(buffer_device=torch.device(device))
model.train()
loss_of = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()).build(compile_config=compiling)
loss_of.set_lm_head(model.lm_head)
model._skip_lm_head = True

adamw, clock, losses = optimizer(model), Clock(asked), []
for step in range(asked["warmup"] + asked["steps"]):
    tokens, labels = batch(asked, step)
    weight, total = torch.tensor(float(labels.numel()), device=device), torch.zeros((), device=device)
    for part, answers in zip(tokens.split(micro), labels.split(micro), strict=True):
        loss, _ = loss_of(model(part), answers, weight)
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    adamw.step()
    adamw.zero_grad()
    losses.append(total.item())
    clock.tick()
report(asked, model, clock, losses)
dist.destroy_process_group()
