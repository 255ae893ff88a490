"""Loads exported checkpoints with Megatron-Core on a CPU, writes logits, and saves the models again.

Run as `megatron_models.py FOLDER NAME...`: FOLDER/NAME-megatron is loaded into a GPTModel that is built from the
arguments in its common.pt. Writes FOLDER/logits.pt, and saves the models to FOLDER/NAME-saved/iter_0000007.
"""

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def built(args):
    """Returns a GPTModel for the arguments of Megatron-LM."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    def tanh_gelu(x):
        return torch.nn.functional.gelu(x, approximate="tanh")

    experts = {}
    if getattr(args, "num_experts", None):
        experts = {
            "num_moe_experts": args.num_experts, "moe_router_topk": args.moe_router_topk, "moe_grouped_gemm": False,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size, "moe_router_pre_softmax": args.moe_router_pre_softmax,
            "moe_token_dispatcher_type": "allgather", "moe_aux_loss_coeff": 0.0,
            "moe_router_load_balancing_type": "none",
        }  # fmt: skip
    config = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads, num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels, normalization=args.normalization, layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu, activation_func=torch.nn.functional.silu if args.swiglu else tanh_gelu,
        add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias, qk_layernorm=args.qk_layernorm,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, bias_activation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, **experts,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        config.num_moe_experts, False, config.qk_layernorm, normalization=args.normalization
    )
    return GPTModel(
        config, spec, vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent, rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    ).eval()  # fmt: skip


@torch.no_grad()
def main(folder, names):
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # not defined without Transformer Engine

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    found = {}
    for name in names:
        path = str(folder / f"{name}-megatron" / "release")
        common = dist_checkpointing.load_common_state_dict(path)
        assert common["checkpoint_version"] == 3.0
        model = built(common["args"])
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, path)
        print(name, model.load_state_dict(loaded["model"], strict=False), flush=True)
        assert not any(parameter.isnan().any() for parameter in model.parameters())
        for batch, seq in ((1, 1), (3, 7), (2, 130)):
            tokens = torch.randint(100, (batch, seq), generator=torch.Generator().manual_seed(seq))
            mask = torch.ones(seq, seq, dtype=torch.bool).triu(1).expand(batch, 1, -1, -1)
            found[name, batch, seq] = tokens, model(tokens, torch.arange(seq).repeat(batch, 1), mask).float()
        saved = folder / f"{name}-saved" / "iter_0000007"
        saved.mkdir(parents=True)
        state = {"model": model.sharded_state_dict(), "args": common["args"], "iteration": 7}
        dist_checkpointing.save(state, str(saved))
        (saved.parent / "latest_checkpointed_iteration.txt").write_text("7")
    torch.save(found, folder / "logits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # Megatron-Core asks for the device of CUDA also where it computes on a CPU.
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda *_: None
    main(Path(sys.argv[1]), sys.argv[2:])
