"""Exports custom models whose module is a class of Transformers, or has one that holds all of its parameters."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checkpoint.adapter_record import read_adapter_record
from weft.checkpoint.huggingface.config_files import copy_tokenizer_files
from weft.checkpoint.load import architecture, tokenizer_folder
from weft.checkpoint.load_model import load_model
from weft.config.model import CustomModelSection
from weft.errors import UserError
from weft.families import family_of
from weft.families.config_json import is_huggingface
from weft.observe.console import Console

TOKENS = 256  # of the sequence on which the custom model and the class of Transformers are compared, at most


@contextmanager
def exportable(source: Path, out: Path, console: Console) -> Iterator[Path]:
    """Context whose value is a Hugging Face folder of a custom model, if it is one of Transformers; else `source`.

    Args:
        source: path of a checkpoint or of a Hugging Face folder.
        out: path of the output; the folder is written beside it, and removed when the context ends.
        console: prints why a model of Transformers cannot be exported as such.
    """
    model = _custom_model(source)
    inner = None if model is None else _transformers_model(model)
    if model is None or inner is None:
        del model, inner  # its memory, before the target loads the weights
        yield source
        return
    kind = next(one for one in type(inner).__mro__ if one.__module__.startswith("transformers."))
    beside = next(parent for parent in out.absolute().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(prefix=".weft-export-", dir=beside) as name:
        folder = Path(name)
        reason = _difference(model, inner, kind, folder)
        if reason is not None:
            console.warning(f"{source}: not exported as {kind.__name__} of Transformers: {reason}")
            del model, inner
            yield source
            return
        tokenizer = tokenizer_folder(source)
        if tokenizer is not None:
            copy_tokenizer_files(tokenizer, folder)
        del model, inner
        yield folder


def _custom_model(source: Path) -> nn.Module | None:
    """Returns the trained model of a checkpoint of a custom model; None for other models and for adapters."""
    if is_huggingface(source) or not isinstance(architecture(source), CustomModelSection):
        return None
    return None if read_adapter_record(source) is not None else load_model(source)


def _transformers_model(model: nn.Module) -> Any:
    """Returns the first module of a class of Transformers within a model; None if there is none."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    return next((module for module in model.modules() if isinstance(module, kind)), None)


@torch.no_grad()
def _difference(model: nn.Module, inner: Any, kind: Any, folder: Path) -> str | None:
    """Writes `inner` as a class of Transformers, and compares the class, loaded from the folder, with a custom model.

    Returns:
        What differs; None if the parameters and the logits are equal.
    """
    others = sorted(dict(model.named_parameters()).keys() - _names_within(model, inner))
    if others:
        return f"the model also has the parameter {others[0]}"
    try:
        family_of({"architectures": [kind.__name__]})
    except UserError:
        return "no model family of Weft has this class; write it with weft.load_model(RUN).save_pretrained(FOLDER)"
    device = next(model.parameters()).device
    try:
        config = inner.config.get_text_config()
        length = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS))
        tokens = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
        found = model(tokens)
        inner.__class__ = kind  # `save_pretrained` writes the name of the class
        inner.save_pretrained(folder)
        loaded, read = kind.from_pretrained(folder, dtype=inner.dtype, output_loading_info=True)
        wrong = [*read["missing_keys"], *read["unexpected_keys"]]
        if wrong:
            return f"its parameters are not those of the class, such as {sorted(wrong)[0]}"
        expected = loaded.to(device).eval()(input_ids=tokens, use_cache=False).logits
        same = found.shape == expected.shape and torch.allclose(found.to(expected.dtype), expected, 1e-3, 1e-4)
    except Exception as error:  # of the user's forward, or of Transformers, which raise any
        text = " ".join(str(error).split())[:200]
        return f"the two cannot be compared ({type(error).__name__}: {text})"
    return None if same else "its logits differ from those of the custom model's forward"


def _names_within(model: nn.Module, inner: nn.Module) -> set[str]:
    """Returns the names, in the model, of the parameters that a module of the model holds."""
    held = {id(parameter) for parameter in inner.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}
