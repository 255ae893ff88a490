"""litgpt's GPT with Llama's parts, in a bare PyTorch loop."""

import torch
from common import SHAPES, bare_loop, job
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy

asked = job()
shape = SHAPES[asked["size"]]
config = Config(
    block_size=shape["max_position_embeddings"],
    n_layer=shape["num_hidden_layers"],
    n_embd=shape["hidden_size"],
    n_head=shape["num_attention_heads"],
    n_query_groups=shape["num_key_value_heads"],
    intermediate_size=shape["intermediate_size"],
    vocab_size=shape["vocab_size"],
    padded_vocab_size=shape["vocab_size"],
    rope_base=int(shape["rope_theta"]),
    rotary_percentage=1.0,
    norm_class_name="RMSNorm",
    norm_eps=shape["rms_norm_eps"],
    mlp_class_name="LLaMAMLP",
    parallel_residual=False,
    bias=False,
)
torch.manual_seed(0)
model = GPT(config)
model.apply(model._init_weights)
if shape["tie_word_embeddings"]:
    model.lm_head.weight = model.transformer.wte.weight
model.max_seq_length = asked["sequence"]


def loss_of(model, tokens, labels):
    # chunk_size=0 is the plain cross-entropy: faster on CPU than its chunks of 128.
    return chunked_cross_entropy(model(tokens), labels, chunk_size=0)


bare_loop(asked, model, loss_of)
