"""The memory of an engine that serves many requests."""

import gc
import random

import psutil
import pytest
from test_engine import decoder

from weft.generation.engine import Engine
from weft.generation.settings import Sampling


@pytest.mark.matrix
def test_memory_is_flat_over_ten_thousand_requests():
    """Every prompt is new, so the prefix cache is full long before the first measurement."""
    engine, rng, process = Engine(decoder(), max_cache_tokens=4096), random.Random(0), psutil.Process()
    used = []
    for number in range(10_000):
        prompt = [rng.randrange(60) for _ in range(rng.randrange(1, 80))]
        stream = engine.submit(prompt, Sampling(rng.randrange(1, 6), seed=number))
        if number % 100 == 0:
            stream.cancel()
        if number % 32 == 31:
            while engine.step():
                pass
        if number % 1000 == 999:
            gc.collect()
            used.append(process.memory_info().rss)
    assert engine.blocks.free == len(engine.blocks)
    assert max(used[1:]) - used[1] < 4 << 20, [f"{size / 2**20:.1f} MiB" for size in used]
