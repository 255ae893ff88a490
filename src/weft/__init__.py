"""Weft trains language models: raw text in; a trained, evaluated and served model out.

The names a library user starts with; each is imported when it is first touched, so that `import weft` costs nothing:

    config = weft.RunConfig.load("run.yaml", ["optimizer.lr=1e-3"])
    weft.Trainer(config).fit()
    model = weft.load_model("runs/run")          # token ids [batch, seq] -> logits [batch, seq, vocab]
    weft.perplexity(model, "heldout").loss       # nats per token of a token store
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["RunConfig", "Trainer", "UserError", "load_model", "perplexity"]

if TYPE_CHECKING:
    from weft.checkpoint.model import load_model
    from weft.config.errors import UserError
    from weft.config.run import RunConfig
    from weft.evaluate.perplexity import perplexity
    from weft.train.trainer import Trainer

_HOME = {
    "RunConfig": "weft.config.run",
    "UserError": "weft.config.errors",
    "Trainer": "weft.train.trainer",
    "load_model": "weft.checkpoint.model",
    "perplexity": "weft.evaluate.perplexity",
}


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
