"""What mode `selective` saves: the time to compute each operation of a layer again, per byte of its result.

    .venv/bin/python benchmarks/selective_ops.py [--width 1024] [--sequence 1024] [--dtype bfloat16]

A layer of a Llama and one with experts take forward passes on a CPU. Each operation is timed where autograd has passed
it on, in CPU time of one thread, with all its calls in a layer together; the least of some passes. Operations that
make no new tensor are left out. The list of mode `selective` is `weft.parallel.memory.activations`.
"""

import argparse
import datetime
import sys
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import processor, slug, write_results  # noqa: E402

PASSES = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cost of recomputing each operation, per byte of its result.")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args()


def measure(keys: dict, args: argparse.Namespace) -> dict[str, tuple[float, int, bool]]:
    """Returns name of the operation -> CPU seconds, bytes of its results, and whether `selective` saves them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from weft.config.model import ModelSection
    from weft.models.build import build_model
    from weft.parallel.memory.activations import _is_expensive
    from weft.parallel.memory.budget import op_name

    class Timed(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seconds, self.bytes, self.saved = defaultdict(float), defaultdict(int), {}

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            began = time.process_time()
            out = op(*args, **(kwargs or {}))
            took = time.process_time() - began
            known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            new = sum(x.untyped_storage().nbytes() for x in made if x.untyped_storage()._cdata not in known)
            if new:
                self.seconds[op_name(op)] += took
                self.bytes[op_name(op)] += new
                self.saved[op_name(op)] = _is_expensive(op, args, kwargs or {})
            return out

    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    model = build_model(ModelSection(**keys)).to(dtype)
    hidden = torch.randn(1, args.sequence, args.width, dtype=dtype, requires_grad=True)
    seen: list = []
    layer = model.layers[0]
    layer.forward, forward = lambda *given, **named: seen.append((given, named)) or given[0], layer.forward
    model(torch.zeros(1, args.sequence, dtype=torch.long))
    (_, *rest), named = seen[0]
    passes = []
    for _ in range(PASSES):
        with Timed() as mode:
            forward(hidden, *rest, **named)
        passes.append(mode)
    return {
        name: (min(one.seconds[name] for one in passes), size, passes[0].saved[name])
        for name, size in passes[0].bytes.items()
    }


def main() -> int:
    args = arguments()
    shape = {"family": "llama", "vocab_size": 512, "hidden_size": args.width, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": args.width // 64, "num_key_value_heads": args.width // 256}
    shape |= {"intermediate_size": 4 * args.width}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": args.width // 2}
    lines = [
        "# The cost of recomputing operations, per byte",
        "",
        f"{processor()}, one thread; width {args.width:,}, {args.sequence:,} tokens, {args.dtype}; "
        f"{datetime.date.today()}.",
    ]
    found = {}
    for name, keys in {"dense": shape, "experts": shape | {"moe": experts}}.items():
        found[name] = measure(keys, args)
        rows = sorted(found[name].items(), key=lambda row: -row[1][0] / row[1][1])
        lines += ["", f"A layer, {name}:", "", "| operation | KiB | ms | ns per byte | `selective` |"]
        lines += ["| --- | ---: | ---: | ---: | --- |"]
        lines += [
            f"| `{op}` | {size / 1024:,.0f} | {1e3 * seconds:.2f} | {1e9 * seconds / size:.2f} "
            f"| {'saves it' if saved else ''} |"
            for op, (seconds, size, saved) in rows
            if size >= 1 << 16  # smaller results cost nothing to keep or to compute
        ]
    write_results(args.out, f"selective_ops-{slug(processor())}", "\n".join(lines) + "\n", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
