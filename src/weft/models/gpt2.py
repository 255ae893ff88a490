"""GPT-2 (Radford et al., 2019): LayerNorm, learned positions, a plain GELU MLP, biases, a tied head.

Sizes as published; dropout, 0.1 in the published configurations, is off unless set.
"""

PRESETS = {
    # 124M parameters.
    "gpt2": {
        "family": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 1024,
        "position": "learned",
        "norm": "layernorm",
        "mlp": "plain",
        "hidden_act": "gelu_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    # 355M.
    "gpt2-medium": {
        "family": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 1024,
        "position": "learned",
        "norm": "layernorm",
        "mlp": "plain",
        "hidden_act": "gelu_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    # 774M.
    "gpt2-large": {
        "family": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 1280,
        "num_hidden_layers": 36,
        "num_attention_heads": 20,
        "intermediate_size": 5120,
        "max_position_embeddings": 1024,
        "position": "learned",
        "norm": "layernorm",
        "mlp": "plain",
        "hidden_act": "gelu_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    # 1.56B.
    "gpt2-xl": {
        "family": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 1600,
        "num_hidden_layers": 48,
        "num_attention_heads": 25,
        "intermediate_size": 6400,
        "max_position_embeddings": 1024,
        "position": "learned",
        "norm": "layernorm",
        "mlp": "plain",
        "hidden_act": "gelu_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
}
