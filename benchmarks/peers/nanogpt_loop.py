"""nanoGPT's GPT, from a clone of its repository, in a bare PyTorch loop.

It has GPT-2's parts: learned positions, LayerNorm, one key/value head per query head and an MLP of two matrices of four
times the width, and always ties the head. Its matrix products take 3% more operations at 14M, and as many at 58M.
"""

import sys

import torch
from common import SHAPES, bare_loop, job

asked = job()
sys.path.insert(0, asked["nanogpt"])
from model import GPT, GPTConfig  # noqa: E402

shape = SHAPES[asked["size"]]
torch.manual_seed(0)
model = GPT(
    GPTConfig(
        block_size=asked["sequence"],
        vocab_size=shape["vocab_size"],
        n_layer=shape["num_hidden_layers"],
        n_head=shape["num_attention_heads"],
        n_embd=shape["hidden_size"],
        dropout=0.0,
        bias=False,
    )
)
bare_loop(asked, model, lambda model, tokens, labels: model(tokens, labels)[1])
