"""A bare PyTorch loop over Hugging Face's LlamaForCausalLM."""

from common import SHAPES, bare_loop, job
from hf_model import llama


def loss_of(model, tokens, labels):
    # It shifts the labels by itself; what it is given are the tokens.
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


asked = job()
bare_loop(asked, llama(SHAPES[asked["size"]]), loss_of)
