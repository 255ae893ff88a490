"""Opens distributed checkpoints of Megatron-Core (`torch_dist`) and torchtitan (DCP). Nothing is unpickled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.distributed.dcp_reader import is_dcp, open_archive, read_dcp
from weft.checkpoint.distributed.inert_pickle import Record, name_of
from weft.checkpoint.distributed.megatron import megatron_layout
from weft.checkpoint.distributed.megatron_arguments import from_arguments
from weft.checkpoint.distributed.torchtitan import model_name, torchtitan_layout
from weft.checkpoint.saved_tensor import SavedTensor
from weft.config.huggingface_config import checked_model
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.families.config_json import CONFIG
from weft.files import read_json
from weft.formatting import counted, first_few

_LATEST, _COMMON = "latest_checkpointed_iteration.txt", "common.pt"
_RELEASE = "release"  # the folder of a converted checkpoint
_MEGATRON = ("embedding.", "decoder.", "output_layer.")


def distributed_checkpoint(path: Path) -> Path | None:
    """Returns the folder with `.metadata`: `path` itself, or the newest iteration of a folder of Megatron-LM.

    Returns None if `path` is not a distributed checkpoint.

    Raises:
        UserError: the folder of Megatron-LM has no distributed checkpoint of its newest iteration.
    """
    if is_dcp(path):
        return path
    if not (path / _LATEST).is_file():
        return None
    with (path / _LATEST).open("rb") as file:
        name = file.read(64).strip().decode("ascii", "replace")
    if name != _RELEASE and not re.fullmatch(r"[0-9]{1,12}", name):
        what = f"has {name[:20]!r}, not the number of an iteration or {_RELEASE!r}; write the number of a folder iter_*"
        raise UserError(what, path / _LATEST)
    found = path / (name if name == _RELEASE else f"iter_{int(name):07d}")
    if not is_dcp(found):
        what = f"{_LATEST} names {name!r}, of which there is no distributed checkpoint (.metadata)"
        remedy = "save with --ckpt-format torch_dist; checkpoints of the format torch are pickles, which are not read"
        raise UserError(f"{what}; {remedy}", path)
    return found


@dataclass(frozen=True)
class DistributedModel:
    """The model of a distributed checkpoint.

    Attributes:
        path: the path that the user gave.
        section: the `model` section.
        described: folder with config.json and the tokenizer, if they exist.
        config: content of config.json; None: the arguments of Megatron-LM describe the model.
        tensors: the tensors of Weft's model, read on demand.
        warnings: texts about tensors that are not read.
    """

    path: Path
    section: ModelSection
    described: Path
    config: dict[str, Any] | None
    tensors: Mapping[str, SavedTensor]
    warnings: Sequence[str]


def open_distributed(folder: Path, source: Path, config: str | Path | None = None) -> DistributedModel:
    """Opens the model of a distributed checkpoint of Megatron-Core or torchtitan. Nothing is unpickled.

    Args:
        folder: the folder with `.metadata`, as `distributed_checkpoint` returns it.
        source: the path that the user gave.
        config: config.json of the model, or a Hugging Face folder with config.json and a tokenizer. Default: the files
            in `source`; for Megatron also the arguments in common.pt.

    Raises:
        UserError: the model's configuration is unknown, a file is damaged, or the tensors do not match the model.
    """
    stored, _ = read_dcp(folder)
    given = Path(config) if config is not None else source
    described = given if given.is_dir() else given.parent
    section, content = _section(given / CONFIG if given.is_dir() else given, folder, config is not None)
    tensors, ignored = _weft_tensors(folder, section, stored)
    warnings = []
    if ignored:
        what = counted(len(ignored), "tensor was", "tensors were")
        warnings.append(f"{what} not read, because they do not belong to the model: {first_few(sorted(ignored), 3)}")
    return DistributedModel(source, section, described, content, tensors, warnings)


def _section(file: Path, folder: Path, required: bool) -> tuple[ModelSection, dict[str, Any] | None]:
    """Returns the `model` section, and the content of config.json if this file describes the model.

    Args:
        file: path of config.json.
        folder: folder of the checkpoint, whose common.pt is read if `file` does not exist.
        required: whether `file` must exist.
    """
    if required or file.is_file():
        content = read_json(file)
        if not isinstance(content, dict):
            raise UserError("config.json must be a mapping; give the config.json of a Hugging Face model", file)
        try:
            return checked_model(content), content
        except UserError as error:
            raise UserError(error.what, error.where or file) from None
    common = folder / _COMMON
    if not common.is_file():
        raise UserError(
            "the checkpoint does not describe its model (no config.json, no common.pt); give the config.json of a "
            "Hugging Face model with these sizes as --config",
            folder,
        )
    parsed, _ = open_archive(common.read_bytes(), common)
    arguments = parsed.get("args") if isinstance(parsed, dict) else None
    if not isinstance(arguments, Record) or name_of(arguments) not in ("argparse.Namespace", "types.SimpleNamespace"):
        raise UserError("no arguments of Megatron-LM (args); give the model's config.json as --config", common)
    try:
        return from_arguments(arguments.state), None
    except UserError as error:
        raise UserError(error.what, common) from None
    except ValueError as error:  # a value that the model section refuses
        raise UserError(
            f"args: {' '.join(str(error).split())}; give the model's config.json as --config", common
        ) from None


def _weft_tensors(
    folder: Path, section: ModelSection, stored: dict[str, SavedTensor]
) -> tuple[dict[str, SavedTensor], set[str]]:
    """Returns the tensors of Weft's model, and the names of the stored tensors that are not read."""
    word = "embedding.word_embeddings.weight"
    prefix = next((name.removesuffix(word) for name in stored if name.endswith(word)), None)
    if prefix is not None:
        names = {name: name.removeprefix(prefix) for name in stored}
        model = {
            ours: stored[name] for name, ours in names.items() if name.startswith(prefix) and ours.startswith(_MEGATRON)
        }
        layout = megatron_layout(section, max(model[word].shape[0], section.vocab_size or 0))
    else:
        names = {name: model_name(name) or "" for name in stored}
        model = {ours: stored[name] for name, ours in names.items() if ours}
        layout = torchtitan_layout(section)
        if not model:
            raise UserError(
                "neither names of Megatron-Core nor of torchtitan; convert the model to Hugging Face files", folder
            )
    ignored = {name for name, ours in names.items() if ours not in model}
    return layout.convert(folder, model), {
        name for name in ignored if not name.startswith(("optimizer", "train_state"))
    }
