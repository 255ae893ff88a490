"""What each rank runs in the tests of sharded generation."""

import pytest
import torch

import weft
from weft.checkpoint.load_model import load_sharded_model
from weft.config.mesh import ParallelSection
from weft.errors import UserError
from weft.generation.engine import Engine
from weft.generation.settings import Sampling
from weft.parallel.world import start_world

SETTINGS = ({"temperature": 0, "logprobs": 2}, {"temperature": 0.9, "top_p": 0.9, "seed": 5})


def pieces(engine, prompts):
    """(token, log-probability, top) of each new token of each prompt, greedy and drawn."""
    found = []
    for settings in SETTINGS:
        streams = [engine.submit(prompt, Sampling(6, **settings)) for prompt in prompts]
        found += [[(piece.token, piece.logprob, piece.top) for piece in stream] for stream in streams]
    return found


def sharded(paths, prompts, options):
    """The pieces, the bytes of cache and the blocks that this rank gets from each checkpoint."""
    world = start_world(ParallelSection(tp=-1, dp_shard=1))
    found = []
    for path in paths:
        model = load_sharded_model(path, world)
        engine = Engine(model, max_cache_tokens=800, **options)
        got = pieces(engine, prompts)
        Engine(model).submit([1], Sampling(1)).cancel()  # the free memory decides; all ranks agree
        found.append((got, None if engine.runner.cache is None else engine.runner.cache.nbytes))
        with pytest.raises(UserError, match=r"o_proj is sharded|has an adapter already"):
            engine.add_adapter("a", {"layers.0.attention.o_proj": (torch.ones(1, 16), torch.ones(16, 1))})
    world.close()
    return found


def added_on_one_rank(base, adapter):
    """One rank alone adds an adapter to a model that is not sharded, although the ranks have a process group."""
    world = start_world(ParallelSection(tp=-1, dp_shard=1))
    engine, tokens = Engine(weft.load_model(base), max_cache_tokens=800), []
    if world.rank == 1:
        engine.add_adapter("a", adapter)
        tokens = [piece.token for piece in engine.submit([5, 6, 7], Sampling(6, temperature=0), adapter="a")]
    world.close()
    return tokens


def refused(path):
    world = start_world(ParallelSection(tp=-1, dp_shard=1))
    try:
        load_sharded_model(path, world)
    except UserError as error:
        return str(error)
    finally:
        world.close()
