"""Weft trains language models: it packs raw text, trains a model on it, and evaluates, samples and exports the model.

Each public name is imported when it is first used, so `import weft` itself is fast:

    weft.pack(["docs.jsonl"], tokenizer="tok", out="store")
    config = weft.RunConfig.load("run.yaml", ["optimizer.lr=1e-3"])
    weft.Trainer(config).fit()
    weft.Trainer(config, batches="global").step(batch)      # or your own loop and batches
    weft.generate("runs/run", "Once upon a time")
    weft.evaluate("runs/run", store="heldout").loss         # nats per token
    weft.export_model("runs/run", "out", to="hf")           # for Hugging Face's transformers
    model = weft.load_model("runs/run")                     # token ids [batch, seq] -> logits [batch, seq, vocab]
    weft.parallelize(module, inputs, devices=8).apply(module)  # any module on several devices
"""

TYPE_CHECKING = False  # as in `typing`, whose import takes longer than all else here

__all__ = [
    "Engine",
    "LowRank",
    "RunConfig",
    "Sampling",
    "Tokenizer",
    "Trainer",
    "UserError",
    "average_models",
    "evaluate",
    "export_model",
    "free_models",
    "generate",
    "import_model",
    "load_model",
    "merge_adapter",
    "pack",
    "parallelize",
    "register_op",
]

if TYPE_CHECKING:
    __version__: str
    from weft.checkpoint.average import average_models
    from weft.checkpoint.huggingface.import_model import import_model
    from weft.checkpoint.load_model import load_model
    from weft.config.run import RunConfig
    from weft.data.packing.pack import pack
    from weft.data.tokenizers.tokenizer import Tokenizer
    from weft.errors import UserError
    from weft.evaluation.evaluate import evaluate
    from weft.export.export_model import export_model
    from weft.export.merge_adapter import merge_adapter
    from weft.generation.engine import Engine
    from weft.generation.settings import Sampling
    from weft.generation.text import free_models, generate
    from weft.models.low_rank import LowRank
    from weft.planner.parallelize.api import parallelize
    from weft.planner.parallelize.register_op import register_op
    from weft.train.trainer import Trainer

_MODULES = {
    "Engine": "weft.generation.engine",
    "LowRank": "weft.models.low_rank",
    "RunConfig": "weft.config.run",
    "Sampling": "weft.generation.settings",
    "Tokenizer": "weft.data.tokenizers.tokenizer",
    "Trainer": "weft.train.trainer",
    "UserError": "weft.errors",
    "average_models": "weft.checkpoint.average",
    "evaluate": "weft.evaluation.evaluate",
    "export_model": "weft.export.export_model",
    "free_models": "weft.generation.text",
    "generate": "weft.generation.text",
    "import_model": "weft.checkpoint.huggingface.import_model",
    "load_model": "weft.checkpoint.load_model",
    "merge_adapter": "weft.export.merge_adapter",
    "pack": "weft.data.packing.pack",
    "parallelize": "weft.planner.parallelize.api",
    "register_op": "weft.planner.parallelize.register_op",
}


def __getattr__(name: str):
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def _version() -> str:
    """Returns the version in the pyproject.toml of a source checkout, or else the version of the installed package."""
    import tomllib
    from importlib.metadata import version
    from pathlib import Path

    file = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"] if file.is_file() else {}
    return project["version"] if project.get("name") == "weft-train" else version("weft-train")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
