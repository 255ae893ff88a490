"""Loads exported checkpoints into torchtitan's models by torch.distributed.checkpoint, and writes logits.

Run as `torchtitan_models.py FOLDER NAME...` in an environment with torchtitan; FOLDER/NAME-dcp is loaded into the model
that FOLDER/NAME/config.json describes. Writes FOLDER/titan.pt, and saves the models to FOLDER/NAME-trained.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.rope import RoPE


def built(config: dict, sequence: int = 512):
    """Returns torchtitan's model for a config.json of Hugging Face, for at most `sequence` tokens."""
    dim, head = config["hidden_size"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope: dict = {"dim": head, "max_seq_len": sequence, "theta": config["rope_parameters"]["rope_theta"]}
    if config["rope_parameters"].get("rope_type") == "llama3":
        rope |= {"scaling": "llama", "scaling_factor": config["rope_parameters"]["factor"]}
    sizes = {
        "n_layers": config["num_hidden_layers"], "dim": dim, "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"], "hidden_dim": config["intermediate_size"],
        "attn_backend": "flex", "fuse_qkv": True,
    }  # fmt: skip
    if config["model_type"] == "llama":
        made, module = llama3.Llama3Model, llama3
        layers = llama3._build_llama3_layers(**sizes, rope=ComplexRoPE.Config(**rope))
    else:
        made, module = qwen3.Qwen3Model, qwen3
        layers = qwen3._build_qwen3_layers(**sizes, head_dim=head, rope=CosSinRoPE.Config(**rope))
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        for norm in (layer.attention_norm, layer.ffn_norm):
            norm.eps = config["rms_norm_eps"]
    norm = type(layers[0].ffn_norm)(normalized_shape=dim, eps=config["rms_norm_eps"], param_init=module._NORM_INIT)
    rows, std = config["vocab_size"], module._LINEAR_INIT
    return made.Config(
        dim=dim, vocab_size=rows, enable_weight_tying=config["tie_word_embeddings"], norm=norm, layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=rows, embedding_dim=dim, param_init=module._EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=rows, param_init=std),
    ).build()  # fmt: skip


@torch.no_grad()
def main(folder: Path, names: list[str]) -> None:
    found = {}
    for name in names:
        model = built(json.loads((folder / name / "config.json").read_text()))
        for module in model.modules():
            if isinstance(module, RoPE):
                module.cache = module._precompute_cache()
        state = model.state_dict()
        for tensor in state.values():
            tensor.fill_(float("nan"))
        dcp.load(state, checkpoint_id=str(folder / f"{name}-dcp"))
        model.load_state_dict(state)
        assert not any(parameter.isnan().any() for parameter in model.parameters())
        for batch, seq in ((1, 1), (3, 7), (2, 130)):
            tokens = torch.randint(100, (batch, seq), generator=torch.Generator().manual_seed(seq))
            found[name, batch, seq] = tokens, model(tokens, positions=torch.arange(seq).repeat(batch, 1)).float()
        dcp.save(model.state_dict() | {"train_state": {"step": 7}}, checkpoint_id=str(folder / f"{name}-trained"))
    torch.save(found, folder / "titan.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
