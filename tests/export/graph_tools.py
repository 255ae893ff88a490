"""Exports a family's model with one target, and runs the result by the target's own tool.

Run as `graph_tools.py TARGET FOLDER FAMILY [SHAPE]` in an environment with the tool. The logits and greedy tokens must
be those of Transformers (`graph_calls.compare`).
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from graph_calls import CASES, compare, small
from safetensors.torch import load_file

import weft


def stablehlo(folder):
    import jax

    exported = jax.export.deserialize(bytearray((folder / "model.jax").read_bytes()))
    weights = [jax.numpy.asarray(one.numpy()) for _, one in sorted(load_file(folder / "weights.safetensors").items())]

    def call(tokens, positions, *past):
        empty = past[0].shape[2] == 0  # JAX's dimensions are at least 1: a column that no token sees
        past = [torch.nn.functional.pad(one, (0, 0, 1, 0)) for one in past] if empty else past
        given = [one.numpy().astype("int32") for one in (tokens, positions)] + [
            one.contiguous().numpy() for one in past
        ]
        out = [torch.from_numpy(np.array(one)) for one in exported.call(weights, tuple(map(jax.numpy.asarray, given)))]
        return [out[0], *(one[:, :, 1:] for one in out[1:])] if empty else out

    return call


def tvm(folder):
    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(tvm.runtime.load_module(str(folder / "model.so")), tvm.cpu())
    stored = sorted(load_file(folder / "weights.safetensors").items())
    weights = [tvm.runtime.tensor(one.numpy()) for _, one in stored]

    def call(*inputs):
        given = [tvm.runtime.tensor(one.contiguous().numpy()) for one in inputs]
        return [torch.from_numpy(one.numpy().copy()) for one in machine["main"](*given, *weights)]

    return call


def executorch(folders):
    from executorch.runtime import Runtime

    methods = {}
    for batch, folder in folders.items():
        methods[batch] = Runtime.get().load_program(str(folder / "model.pte")).load_method("forward")

    def call(*inputs):
        return [one.clone() for one in methods[inputs[0].shape[0]].execute([one.contiguous() for one in inputs])]

    return call


def main(target, folder, family, shape=None):
    shape = shape or next(name for known, name in CASES if known == family)
    theirs = small(family, shape)
    theirs.save_pretrained(folder / "hf")
    if target == "executorch":  # a program for each size of the batch
        made = {batch: folder / f"out-{batch}" for batch in (1, 3)}
        for batch, out in made.items():
            weft.export_model(folder / "hf", out, target, batch=batch)
        call, out = executorch(made), made[1]
    else:
        out = folder / "out"
        weft.export_model(folder / "hf", out, target)
        call = {"stablehlo": stablehlo, "tvm": tvm}[target](out)
    description = json.loads((out / "graph.json").read_text())
    assert description["target"] == target
    compare(call, description, theirs)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
