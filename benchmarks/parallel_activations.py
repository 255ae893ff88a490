"""What each way of activation checkpointing keeps for backward, and what it computes again. Counted, not timed.

    .venv/bin/python benchmarks/parallel_activations.py [--sequence 4096]

Layers of the width of Llama 1B and of a mixture of experts take a forward and a backward on tensors without values, in
bfloat16 with a float32 residual stream, as in a run. Bytes are those of storages that operations made in forward and
that are still held after it, a layer's input with them. Operations are those of matrix products and attention.
"""

import argparse
import datetime
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import write_results  # noqa: E402

LAYERS = 4
MODES = ("none", "budget-0.75", "selective", "budget-0.5", "every-2", "budget-0.25", "full")
SHAPE = {
    "family": "llama",
    "vocab_size": 512,
    "hidden_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
}
MODELS = {
    "dense": SHAPE,
    "experts": SHAPE | {"moe": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}},
}


def count(keys: dict, mode: str, sequence: int) -> tuple[float, int]:
    """Bytes held a layer, and operations of forward and backward of all layers."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import FlopCounterMode

    from weft.config.model import ModelSection
    from weft.models.build import build_model
    from weft.parallel.memory.activations import checkpointed

    class Made(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.made = {}

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            for x in tree_leaves(out):
                if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known:
                    self.made[StorageWeakRef(x.untyped_storage())] = x.untyped_storage().nbytes()
            return out

        def held(self):
            return sum({ref.cdata: size for ref, size in self.made.items() if not ref.expired()}.values())

    def attention(q, k, v, *_, out_val=None, **__):
        return 2 * q.shape[:3].numel() * k.shape[2] * (q.shape[3] + v.shape[3])

    def attention_backward(grad, q, k, v, *_, out_val=None, **__):
        return 5 * q.shape[:3].numel() * k.shape[2] * 2 * q.shape[3]

    def grouped(x, weight, ends, out_val=None):
        return 2 * len(x) * weight.shape[1] * weight.shape[2]

    def grouped_backward(grad, x, weight, ends, out_val=None):
        return 2 * grouped(x, weight, ends)

    formulas = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        torch.ops.weft.grouped_linear: grouped,
        torch.ops.weft.grouped_linear_backward: grouped_backward,
    }
    for formula in formulas.values():
        formula._get_raw = True  # it is given tensors, not shapes
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        model = build_model(ModelSection(**keys, max_position_embeddings=sequence)).train()
        torch.set_default_dtype(torch.float32)
        for number, block in enumerate(model.layers):
            block.forward = checkpointed(block.forward, mode, number, LAYERS, compile=False)
        x = start = torch.empty(1, sequence, keys["hidden_size"], requires_grad=True)
        if mode.startswith("budget"):  # whose choice is made in the first forward
            for block in model.layers:
                x = block(x)
            x = start
        made, operations = Made(), FlopCounterMode(display=False, custom_mapping=formulas)
        with operations:
            with made:
                for block in model.layers:
                    x = block(x)
            held = made.held() - x.untyped_storage().nbytes() + start.untyped_storage().nbytes()
            x.sum().backward()
    return held / LAYERS, operations.get_total_flops()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    import weft.kernels.grouped  # noqa: F401  whose operators are counted

    rows, lines = [], [
        "# What activation checkpointing keeps and computes again",
        "",
        f"{args.sequence:,} tokens, width {SHAPE['hidden_size']:,}, bfloat16; counted; {datetime.date.today()}.",
        "",
        "| layers | mode | kept of each | share | more operations |",
        "| --- | --- | ---: | ---: | ---: |",
    ]  # fmt: skip
    for name, keys in MODELS.items():
        most, least = None, None
        for mode in MODES:
            held, operations = count(keys, mode, args.sequence)
            most, least = most or held, least or operations
            row = {"model": name, "mode": mode, "bytes": held, "share": held / most, "more": operations / least - 1}
            rows.append(row)
            lines.append(f"| {name} | `{mode}` | {held / 2**20:,.0f} MiB | {row['share']:.2f} | {row['more']:.1%} |")
    write_results(args.out, "parallel_activations", "\n".join(lines) + "\n", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
