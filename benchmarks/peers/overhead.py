"""What the benchmarks of the cost of a step beside its arithmetic share: shapes, and data of random tokens."""

from common import SHAPES as COMMON
from common import VOCABULARY

SHAPES = COMMON | {"tiny": COMMON["14m"] | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}}
SHAPES["tiny"] |= {"num_key_value_heads": 2, "intermediate_size": 172, "vocab_size": 512}
SEQUENCE = 256


class Rows:
    """Random sequences, as a dataset of the user's own."""

    def __init__(self, vocab_size: int = VOCABULARY):
        import numpy as np

        self.rows = np.random.default_rng(0).integers(0, vocab_size, size=(512, SEQUENCE))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"tokens": self.rows[i]}
