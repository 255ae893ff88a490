"""The machine's matrix-product peak in one dtype: the best of many products of a few sizes. Prints FLOP/s."""

import json
import time

import torch
from common import job

asked = job()
dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[asked["dtype"]]
best = 0.0
for size in (1024, 2048, 4096) if asked["device"] == "cpu" else (4096, 8192):
    a = torch.randn(size, size, dtype=dtype, device=asked["device"])
    b = torch.randn(size, size, dtype=dtype, device=asked["device"])
    until, runs = time.perf_counter() + asked["seconds"], 0
    while runs < 4 or time.perf_counter() < until:
        begin = time.perf_counter()
        a @ b
        if asked["device"] == "cuda":
            torch.cuda.synchronize()
        runs += 1
        if runs > 1:
            best = max(best, 2 * size**3 / (time.perf_counter() - begin))
print(json.dumps({"flops_per_second": best, "torch": torch.__version__}))
