"""Exports adapters to PEFT's files, which `peft.PeftModel.from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path

from weft.checkpoint.adapter_record import read_adapter_record
from weft.checkpoint.adapter_weights import read_adapter, read_heads
from weft.checkpoint.huggingface.config_files import copy_tokenizer_files
from weft.checkpoint.huggingface.peft_writer import write_peft
from weft.checkpoint.load import architecture, tokenizer_folder
from weft.checkpoint.shard_files import new_folder
from weft.config.model import CustomModelSection, ModelSection
from weft.errors import UserError
from weft.families.config_json import is_huggingface
from weft.formatting import counted
from weft.models.huggingface_weights import to_config_json
from weft.observe.console import Console

FAMILIES = "adapters of all families that Transformers has, and of type: hf."


def export(source: Path, out: Path, console: Console, *, base: str | None = None) -> str:
    """Writes adapter_config.json, adapter_model.safetensors and tokenizer files.

    An adapter of PiSSA becomes an adapter of twice the rank, for the original base model. In layers that the
    Transformers model fuses (such as GPT-2's queries, keys and values), the ranks of their adapters add up.

    Args:
        source: path of a checkpoint of an adapter.
        base: name or path of the base model for adapter_config.json. Default: the path of the Hugging Face folder that
            the adapter was trained on.

    Raises:
        UserError: the checkpoint has no adapter, or PEFT cannot express it.
    """
    record, section = read_adapter_record(source), architecture(source)
    if record is None:
        raise UserError("this model has no adapter; --to hf exports full models", source)
    if isinstance(section, CustomModelSection):
        raise UserError(f"a custom model ({section.type}) has no class in Transformers, which PEFT needs", source)
    if isinstance(section, ModelSection):
        to_config_json(section)  # refuses a model that Transformers has no code for
    layers, heads = read_adapter(source, record.section), read_heads(source, section)
    if base is None and is_huggingface(record.base.path):
        base = str(record.base.path.absolute())
    if base is None:
        console.warning(
            f"the base model {record.base.path} is not a Hugging Face folder; export it, too (`weft export`), and give "
            "that folder as --base HF_DIR"
        )
    if record.section.quantize is not None:
        console.warning(
            f"the adapter was trained on weights in {record.section.quantize}; quantize the base model, too"
        )
    tokenizer = tokenizer_folder(source)
    with new_folder(out, sum(one.a.nbytes + one.b.nbytes for one in layers.values())) as folder:
        options = {"rslora": record.section.rslora, "dropout": record.section.dropout}
        number = write_peft(folder, section, layers, heads, base=base, digest=record.base.digest, **options)
        if tokenizer is not None:
            copy_tokenizer_files(tokenizer, folder)
    return f"LoRA adapter of {counted(number, 'layer')}"
