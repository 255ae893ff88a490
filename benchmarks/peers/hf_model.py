"""Hugging Face's Llama of one of the shapes."""


def llama(shape: dict):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape, attention_bias=False, use_cache=False))
