"""Megatron-Core's samples over its .bin and .idx, as two benchmarks read them."""

from pathlib import Path
from types import SimpleNamespace


def gpt_dataset(indexed, folder: Path, samples: int, length: int, vocabulary: int):
    """Its GPTDataset, which keeps what it works out in `folder`/cache.

    Args:
        indexed: the IndexedDataset of `folder`/tokens.
        samples: number of samples, of `length` tokens each.
    """
    import numpy as np
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    prefix = str(folder / "tokens")
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=length,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=SimpleNamespace(vocab_size=vocabulary, eod=0, pad=-1, unique_identifiers={"class": "none"}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    documents = np.arange(len(indexed.document_indices) - 1, dtype=np.int32)
    return GPTDataset(indexed, prefix, documents, samples, Split.train, config)
