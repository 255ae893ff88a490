"""Small models of transformers', with weights by which all answers differ clearly."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

WINDOW = 64  # positions that the models are made for


def random_llama(path, vocab_size, **more):
    """A folder of Hugging Face's; the model itself comes back."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab_size, intermediate_size=48, max_position_embeddings=WINDOW, **shape, **more)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.eval().save_pretrained(path)
    return model
