"""Exports models to GGUF files, which llama.cpp, Ollama and LM Studio load."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.checkpoint.adapter_record import read_adapter_record
from weft.checkpoint.adapter_weights import Rounding
from weft.checkpoint.gguf.architectures import Architecture
from weft.checkpoint.gguf.latent import stored_part
from weft.checkpoint.gguf.library import gguf_library
from weft.checkpoint.gguf.metadata import architecture_of, attention_scale, write_metadata
from weft.checkpoint.gguf.special import SpecialTokens, read_special_tokens
from weft.checkpoint.gguf.tensors import OUTPUT, layout, tensor_names
from weft.checkpoint.gguf.tokenizer_json import PATTERN_NAMES
from weft.checkpoint.gguf.vocabulary import vocabulary
from weft.checkpoint.load import architecture, tokenizer_folder
from weft.checkpoint.model_parts import without_prediction_layers
from weft.checkpoint.shard_files import new_folder
from weft.checkpoint.weights import Weights, open_weights
from weft.config.model import ModelSection
from weft.errors import UserError
from weft.export.gguf_adapter import adapter_tensors
from weft.export.hf import ExportedModel
from weft.export.k_quants import K_QUANTS, quantize_file, require_quantizer
from weft.export.merge_adapter import merged_run
from weft.export.modelfile import modelfile
from weft.files import hidden_folder, refuse_existing, report_write_errors, require_space, sync_tree
from weft.formatting import counted
from weft.observe.console import Console

FAMILIES = (
    "deepseek_v2, deepseek_v3, gemma2, gemma3, gpt2, gpt_neox, gpt_oss, granite, llama, mistral, mixtral, mpt, olmo2, "
    "olmoe, phi3, qwen2, qwen3, qwen3_moe, smollm3, starcoder2."
)
# The names of types -> GGUF's names of the tensor type, and numbers of the file type.
TYPES = {
    "f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2),
    "q4_1": ("Q4_1", 3), "q5_0": ("Q5_0", 8), "q5_1": ("Q5_1", 9),
}  # fmt: skip
SUFFIX = ".gguf"
_KEPT = ("position_embd.", ".ffn_gate_inp.", "_exps.bias")  # read as float32 by llama.cpp
_ENDS = ("token_embd.weight", OUTPUT)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to write to a GGUF file.

    Attributes:
        kind: name of GGUF's type of the tensor.
        read: function that returns the tensor in float32, in GGUF's layout.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Number of bytes in the file."""
        block, size = gguf_library().GGML_QUANT_SIZES[gguf_library().GGMLQuantizationType[self.kind]]
        return math.prod(self.shape) // block * size


@dataclass(frozen=True)
class WrittenFile:
    """A GGUF file that was written: architecture, type, and numbers of tensors and bytes."""

    architecture: str
    type: str
    tensors: int
    bytes: int

    def __str__(self) -> str:
        tensors, size = counted(self.tensors, "tensor"), counted(self.bytes, "byte")
        return f"{self.architecture} as {self.type}, {tensors}, {size}"


def export(
    source: Path,
    out: Path,
    console: Console,
    *,
    type: str = "f16",
    pre: str | None = None,
    adapter_only: bool = False,
    dequantize: bool = False,
) -> WrittenFile:
    """Writes a GGUF file, and a Modelfile for Ollama.

    If the name of `out` ends with `.gguf`, it is the file, and the Modelfile is beside it. Otherwise `out` is a folder
    with model.gguf and Modelfile.

    Args:
        source: path of a checkpoint or of a Hugging Face folder. An adapter is merged with its base model.
        type: type of the weights: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0; or, with llama-cpp-python, a K-quant
            such as q6_K, q5_K_M or q4_K_M. Default: f16.
        pre: llama.cpp's name of the pattern that splits text into words. Default: the pattern that equals the
            tokenizer's.
        adapter_only: write the adapter of a run as a GGUF adapter, without its base model.
        dequantize: if an adapter was trained on a quantized base model, merge it with the dequantized weights.

    Raises:
        UserError: llama.cpp cannot compute the model or its tokenizer, the type is unknown, or a package is missing.
    """
    gguf_library()
    type = type.lower()
    if type not in TYPES and type not in K_QUANTS:
        raise UserError(f"--type {type}: not a type; use one of {', '.join((*TYPES, *K_QUANTS))}")
    if adapter_only and type not in ("f32", "f16", "bf16"):
        raise UserError(f"--type {type}: an adapter is small and not quantized; use f32, f16 or bf16")
    if type in K_QUANTS:
        require_quantizer(type)
    whole = architecture(source)
    if (section := without_prediction_layers(whole)) is not whole:
        console.warning(f"{source}: multi-token prediction layers are not exported")
    if not isinstance(section, ModelSection):
        raise UserError(f"llama.cpp has no architecture for a model of type {section.type}; use --to hf", source)
    try:
        kind = architecture_of(section)
    except UserError as error:
        raise UserError(error.what, error.where or source) from None
    if adapter_only:
        if pre is not None or dequantize:
            option = "--dequantize" if dequantize else "--pre"
            raise UserError(f"{option} has no effect on an adapter alone; omit {option} or --adapter-only")
        return _write_adapter(source, section, kind, out, console, type)
    record = read_adapter_record(source)
    if dequantize and (record is None or record.section.quantize is None):
        raise UserError("--dequantize: the model has no adapter on a quantized base model; omit the option", source)
    if record is not None:
        model, _ = merged_run(source, torch.float32, Rounding(), dequantize)
    else:
        model = ExportedModel(section, open_weights(source, huggingface=False), tokenizer_folder(source))
    return _write_model(model, section, kind, out, console, type, pre)


def _write_model(
    model: ExportedModel,
    section: ModelSection,
    kind: Architecture,
    out: Path,
    console: Console,
    type: str,
    pre: str | None,
) -> WrittenFile:
    metadata, factors, warnings = write_metadata(section, kind)
    tokens, rows = SpecialTokens({}, None, ()), section.vocab_size or 0
    if model.tokenizer is None:
        metadata |= {"tokenizer.ggml.model": "none", f"{kind.name}.vocab_size": rows}
        warnings.append("the model has no tokenizer, so llama.cpp can only read token ids")
    else:
        tokens = read_special_tokens(model.tokenizer, rows)  # first, because it refuses a damaged tokenizer.json
        made = vocabulary(model.tokenizer, rows, pre)
        if pre is not None and pre not in PATTERN_NAMES:
            warnings.append(f"--pre {pre}: not a name that Weft knows; llama.cpp refuses a file with an unknown name")
        metadata |= {f"tokenizer.ggml.{key}": value for key, value in made.metadata.items()}
        metadata |= {f"tokenizer.{key}": value for key, value in tokens.metadata.items()}
        warnings += [*made.warnings, *tokens.warnings]
    written_as = K_QUANTS[type].written_as(model.weights) if type in K_QUANTS else type
    stored = [
        StoredTensor(name, tuple(tensor.shape), "F32", lambda tensor=tensor: tensor) for name, tensor in factors.items()
    ]
    stored += _tensors(model.weights, section, kind, written_as)
    larger = [one for one in stored if one.kind == "F16" and TYPES[written_as][0] not in ("F16", "F32", "BF16")]
    if larger:
        warnings.append(
            f"{counted(len(larger), 'matrix', 'matrices')}, such as {larger[0].name}, will be f16, because their rows "
            "are not a multiple of 32 numbers"
        )
    for warning in [*model.weights.warnings, *warnings]:
        console.warning(f"{model.weights.path}: {warning}")
    metadata |= {"general.type": "model", "general.file_type": TYPES[written_as][1], "general.quantization_version": 2}
    text = modelfile(tokens, metadata[f"{kind.name}.context_length"])

    def write(file: Path) -> None:
        metadata["general.name"] = _model_name(out)
        if type not in K_QUANTS:
            write_gguf(file, kind.name, metadata, stored, console)
            return
        full = file.with_name("full.gguf")
        write_gguf(full, kind.name, metadata, stored, console)
        quantize_file(full, file, type)
        full.unlink()

    return _place(out, write, text, sum(one.bytes for one in stored), (kind.name, type, len(stored)))


def _tensors(weights: Weights, section: ModelSection, kind: Architecture, type: str) -> Iterator[StoredTensor]:
    """Yields the tensors of a model, with llama.cpp's names and layouts."""
    keys = section.resolved()
    expected = attention_scale(section, kind, keys)
    ratio = keys["attention_multiplier"] / expected
    scaled = ("attention.q_norm.",) if section.qk_norm else ("attention.q_proj.", "attention.q_b_proj.")
    if abs(ratio - 1) < 1e-6:
        ratio = 1.0
    elif section.clip_qkv is not None:
        raise UserError(
            f"model.attention_multiplier is {keys['attention_multiplier']!r}, but llama.cpp computes with "
            f"{expected!r}; with clip_qkv, the queries cannot be scaled instead; use --to hf"
        )

    def part(name: str) -> torch.Tensor:
        tensor = layout(section, kind, name, weights.tensors[name].full().float(), back=False)
        return tensor * ratio if ratio != 1.0 and any(one in name for one in scaled) else tensor

    for name, ours in tensor_names(section, kind).items():
        if missing := [one for one in ours if one not in weights.tensors]:
            raise UserError(f"{missing[0]}, which the model needs, is missing; use another checkpoint", weights.path)
        shapes = [weights.tensors[one].shape for one in ours]
        whole = torch.empty(sum(one[0] for one in shapes), *shapes[0][1:], device="meta")
        shape = tuple(stored_part(section, name, whole).shape)
        read = lambda name=name, ours=ours: stored_part(  # noqa: E731
            section, name, torch.cat([part(one) for one in ours])
        )
        yield StoredTensor(name, shape, _kind_of(name, shape, type), read)


def _kind_of(name: str, shape: tuple[int, ...], type: str) -> str:
    """Returns the type of a tensor in a file of a type.

    Vectors, position embeddings and routers stay float32. Embedding and output head have at least 8 bits, like the
    6 bits of llama.cpp's quantizer, because an error in them changes every logit. A block has 32 numbers of a row.
    """
    wanted = TYPES[type][0]
    if len(shape) == 1 or any(one in name for one in _KEPT):
        return "F32"
    if wanted in ("F32", "F16", "BF16"):
        return wanted
    if shape[-1] % 32:
        return "F16"
    return "Q8_0" if name in _ENDS else wanted


def write_gguf(file: Path, kind: str, metadata: dict[str, Any], tensors: list[StoredTensor], console: Console) -> None:
    """Writes a GGUF file, one tensor at a time.

    Raises:
        UserError: a weight is too large for float16.
    """
    gguf = gguf_library()
    writer = gguf.GGUFWriter(file, kind)
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kind_of = gguf.GGUFValueType.UINT32 if isinstance(value, int) and not isinstance(value, bool) else None
            writer.add_key_value(key, value, kind_of or gguf.GGUFValueType.get_type(value))
    for one in tensors:
        raw = gguf.GGMLQuantizationType[one.kind]
        writer.add_tensor_info(one.name, one.shape, np.dtype(np.float32), one.bytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    done = 0
    with console.progress(sum(one.bytes for one in tensors), "exporting", unit="B") as progress:
        for one in tensors:
            try:
                writer.write_tensor_data(_encoded(one))
            except OSError as error:  # NumPy's message only counts bytes
                raise OSError(error.errno or errno.ENOSPC, "the disk is full, or the file is too large") from error
            done += one.bytes
            progress.update(done)
    writer.flush()
    writer.close()


def _encoded(one: StoredTensor) -> np.ndarray:
    """Returns a tensor in its type in the file, as an array of float32, float16 or bytes."""
    gguf = gguf_library()
    values = np.ascontiguousarray(one.read().numpy(), dtype=np.float32)
    if one.kind == "F16" and np.abs(values).max(initial=0) > np.finfo(np.float16).max:
        raise UserError(f"{one.name}: has numbers that are too large for f16; use --type bf16 or f32")
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[one.kind])


def _model_name(out: Path) -> str:
    """Returns the model's name: the name of the output. llama.cpp changes special tokens of models named "phi3"."""
    name = out.stem if out.suffix.lower() == SUFFIX else out.name
    return re.sub(r"(phi)-?(3)", r"\1 \2", name, flags=re.IGNORECASE)


def _place(
    out: Path, write: Callable[[Path], None], text: str | None, size: int, written: tuple[str, str, int]
) -> WrittenFile:
    """Calls `write` with a path in a hidden folder, and renames the file or the folder to `out`.

    Args:
        text: content of the Modelfile; None: without a Modelfile.
        size: number of bytes of the tensors.
        written: the first attributes of the result.
    """
    if out.suffix.lower() != SUFFIX:
        with new_folder(out, size) as folder:
            write(folder / "model.gguf")
            if text is not None:
                (folder / "Modelfile").write_text(f"FROM ./model.gguf\n{text}", encoding="utf-8")
            bytes = (folder / "model.gguf").stat().st_size
        return WrittenFile(*written, bytes)
    if out.is_dir():
        raise UserError(f"{out} is a folder; give the path of a new file, or of a folder without the suffix {SUFFIX}")
    beside = out.with_suffix(".Modelfile")
    if text is not None:
        refuse_existing(beside, "choose another name for the output")
    with report_write_errors(out), hidden_folder(out) as folder:
        require_space(folder, size)
        write(folder / out.name)
        bytes = (folder / out.name).stat().st_size
        if text is not None:
            (folder / beside.name).write_text(f"FROM ./{out.name}\n{text}", encoding="utf-8")
        sync_tree(folder)
        if text is not None:
            (folder / beside.name).rename(beside)
        (folder / out.name).rename(out)
    return WrittenFile(*written, bytes)


def _write_adapter(
    source: Path, section: ModelSection, kind: Architecture, out: Path, console: Console, type: str
) -> WrittenFile:
    found = adapter_tensors(source, section, kind)
    stored = [
        StoredTensor(name, tuple(one.shape), TYPES[type][0], lambda one=one: one.float()) for name, one in found.items()
    ]
    # With an alpha of 0, llama.cpp uses the products as they are.
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 0.0}
    metadata |= {
        "general.file_type": TYPES[type][1],
        "general.name": _model_name(out),
    }
    size = sum(one.bytes for one in stored)
    return _place(
        out, lambda file: write_gguf(file, kind.name, metadata, stored, console), None, size,
        (f"{kind.name} adapter", type, len(stored)),
    )  # fmt: skip
