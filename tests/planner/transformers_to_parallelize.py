"""Tiny models of Transformers for which Weft has no family, with inputs: of text, images, sound and pairs of them."""

import torch


def _ids(rows=4, length=8, vocab=64):
    return torch.randint(3, vocab, (rows, length))


def _text(rows=4, length=8):
    ids = _ids(rows, length)
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3}


def _config(name, **values):
    import transformers

    return getattr(transformers, name)(**values)


def _encoder(name, **values):
    return _config(name, **SIZES | {"max_position_embeddings": 32} | values)


# class -> (function that returns its config, function that returns keyword arguments)
CASES = {
    "BertForMaskedLM": (lambda: _encoder("BertConfig"), lambda: _text() | {"labels": _ids()}),
    "RobertaForSequenceClassification": (
        lambda: _encoder("RobertaConfig", pad_token_id=1),
        lambda: _text() | {"labels": torch.tensor([0, 1, 1, 0])},
    ),
    "DebertaV2ForTokenClassification": (
        lambda: _encoder("DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
        lambda: _text() | {"labels": _ids(vocab=2 + 3) - 3},
    ),
    "DistilBertForQuestionAnswering": (
        lambda: _config("DistilBertConfig", dim=16, n_layers=1, n_heads=2, hidden_dim=32, vocab_size=64),
        lambda: _text() | {"start_positions": torch.tensor([0, 1, 2, 3]), "end_positions": torch.tensor([1, 2, 3, 4])},
    ),
    "T5ForConditionalGeneration": (
        lambda: _config(
            "T5Config", d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64,
            decoder_start_token_id=0,
        ),
        lambda: _text() | {"labels": _ids(length=6)},
    ),
    "BartForConditionalGeneration": (
        lambda: _config(
            "BartConfig", d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64,
            max_position_embeddings=32,
        ),
        lambda: _text() | {"labels": _ids(length=6)},
    ),
    "OPTForCausalLM": (
        lambda: _config(
            "OPTConfig", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, vocab_size=64,
            max_position_embeddings=32, word_embed_proj_dim=16,
        ),
        lambda: _text() | {"labels": _ids()},
    ),
    "BloomForCausalLM": (
        lambda: _config("BloomConfig", hidden_size=16, n_layer=1, n_head=2, vocab_size=64),
        lambda: _text() | {"labels": _ids()},
    ),
    "GPTNeoForCausalLM": (
        lambda: _config(
            "GPTNeoConfig", hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
            vocab_size=64, max_position_embeddings=32, window_size=4,
        ),
        lambda: _text() | {"labels": _ids()},
    ),
    "MambaForCausalLM": (
        lambda: _config("MambaConfig", hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=64),
        lambda: {"input_ids": _ids(length=5), "labels": _ids(length=5)},
    ),
    "ViTForImageClassification": (
        lambda: _encoder("ViTConfig", **IMAGE),
        lambda: {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 1, 0])},
    ),
    "SwinForImageClassification": (
        lambda: _config(
            "SwinConfig", image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4
        ),
        lambda: {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 1, 0])},
    ),
    "ConvNextForImageClassification": (
        lambda: _config("ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16),
        lambda: {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 1, 0])},
    ),
    "ResNetForImageClassification": (
        lambda: _config("ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        lambda: {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 1, 0])},
    ),
    "CLIPModel": (
        lambda: _config(
            "CLIPConfig", text_config=SIZES | {"max_position_embeddings": 32, "eos_token_id": 2},
            vision_config={key: value for key, value in (SIZES | IMAGE).items() if key != "vocab_size"},
            projection_dim=8,
        ),
        lambda: {**_text(), "pixel_values": torch.randn(4, 3, 16, 16), "return_loss": True},
    ),
    "WhisperForConditionalGeneration": (
        lambda: _config(
            "WhisperConfig", d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64, num_mel_bins=8,
            max_source_positions=10, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
        ),
        lambda: {"input_features": torch.randn(4, 8, 20), "labels": _ids(length=6)},
    ),
    "Wav2Vec2ForCTC": (
        lambda: _config(
            "Wav2Vec2Config", **SIZES | {"conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [8, 4],
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0},
        ),
        lambda: {"input_values": torch.randn(4, 400), "labels": _ids(length=4)},
    ),
    "SegformerForSemanticSegmentation": (
        lambda: _config(
            "SegformerConfig", hidden_sizes=[8, 16], depths=[1, 1], num_encoder_blocks=2, sr_ratios=[2, 1],
            num_attention_heads=[1, 2], patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
            classifier_dropout_prob=0.0,  # its numbers depend on the layout of the activations in memory
        ),
        lambda: {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 2, (4, 16, 16))},
    ),
}  # fmt: skip


# Classes that compute in float32, whatever their parameters are.
FLOAT32 = ("T5ForConditionalGeneration", "OPTForCausalLM", "BloomForCausalLM", "GPTNeoForCausalLM", "MambaForCausalLM")


def make(name):
    """A model in float64 in the mode for training, with the same values on all ranks."""
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, name)(CASES[name][0]()).double().train()


def inputs_of(name):
    """Keyword arguments of a call."""
    torch.manual_seed(1)
    return (), CASES[name][1]()
