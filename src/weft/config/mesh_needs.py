"""Defines the rules that a mesh must satisfy: the conditions of each axis on the model, the data and the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weft.config.derive import split_batch
from weft.config.mesh import V_SHAPED, MeshShape, ParallelSection, can_exchange_heads
from weft.config.model_rules import known_model
from weft.config.python_source import NotFound, find_class
from weft.config.signature import has_attribute
from weft.config.transformers_model import LIMITS

GetValue = Callable[[str], Any]  # returns a checked value by its dotted key; None if it is not set or not known


@dataclass(frozen=True)
class Reason:
    """Why a mesh is not legal.

    Attributes:
        key: dotted key at which the reason is reported.
        what: the message.
    """

    key: str
    what: str


class Needs:
    """The rules for the mesh of a run, and the values of the run that the rules need.

    Args:
        get: returns a checked value by its dotted key; a rule is skipped if one of its values is not known.
        section: the section `parallel`.
        sequences: number of sequences in the global batch; None if it is not known.
    """

    def __init__(self, get: GetValue, section: ParallelSection, sequences: int | None):
        self.section, self.sequences = section, sequences
        self.compresses = get("parallel.compress.rank") is not None
        self.only_rows, self.qat = get("training.only_rows_from"), get("training.qat.type")
        self.compiles, self.micro = bool(get("training.compile")), get("training.micro_batch_size")
        self.graphs = get("training.compile") == "reduce-overhead"
        self.length = get("data.sequence_length")
        lengths = (("data.sequence_length", self.length), ("data.length_warmup.start", get("data.length_warmup.start")))
        self.lengths = [(key, length) for key, length in lengths if length]
        self.type = get("model.type")
        self.layers: int | None = None
        self.experts: int | None = None
        self.ahead = 0  # multi-token prediction layers
        self.heads: tuple[int, int] | None = None  # query heads, and key/value heads
        self.split: list[tuple[int, str, str]] = []  # dimensions that `tp` splits: size, description, remedy
        self.shared = False  # whether several tensor parallel ranks can have the same key/value head
        self.custom: list[tuple[str, str]] = []  # custom components that need all heads and tokens: key and class
        if self.type == "decoder":
            self._read(get)
        self._feeds: dict[tuple[int, int], Reason | None] = {}

    def _read(self, get: GetValue) -> None:
        """Sets the attributes that the rules need from the keys of a built-in decoder."""
        model = known_model(get)
        moe, heads, groups = model.moe, model.num_attention_heads, model.num_key_value_heads
        self.layers, self.experts = model.num_hidden_layers, moe and moe.num_experts
        self.ahead = model.num_nextn_predict_layers or 0
        if heads is not None:
            self.heads = heads, groups or heads
            self.split.append((heads, f"{heads} attention heads (model.num_attention_heads)", ""))
            self.shared = not (model.qk_norm and model.qk_norm_over == "width")
        inner = model.inner_width if model.hidden_size is not None else None
        if inner is not None and any(moe is None or not moe.has_experts(layer) for layer in range(self.layers or 0)):
            self.split.append((inner, f"the MLP's hidden size, {inner:,} (model.intermediate_size)", ""))
        each = moe and (moe.moe_intermediate_size or inner)
        if each is not None:
            self.split.append((each, f"the experts' hidden size, {each:,} (model.moe.moe_intermediate_size)", ""))
        if (rows := model.vocab_size) is not None:
            remedy = "set model.pad_vocab_to_multiple: {tp}, or, if vocab_size is set, make it {up}"
            self.split.append((rows, f"the vocabulary's {rows:,} rows (model.vocab_size)", remedy))
        keys = ("position", "attention_implementation")
        self.custom = [(f"model.{key}", getattr(model, key)) for key in keys if ":" in (getattr(model, key) or "")]

    def fits(self, shape: MeshShape) -> bool:
        """Whether a mesh is legal."""
        return next(self.reasons(shape), None) is None

    def allows(self, axis: str, size: int) -> bool:
        """Whether a size of an axis is legal, regardless of the other axes."""
        return next(self.of_axes(MeshShape(**{axis: size})), None) is None

    def reasons(self, shape: MeshShape) -> Iterator[Reason]:
        """Yields all reasons against a mesh."""
        yield from self.of_axes(shape)
        yield from self._of_all(shape)

    # ---- rules for single axes

    def of_axes(self, shape: MeshShape) -> Iterator[Reason]:
        """Yields reasons against the sizes of single axes."""
        if self.type not in (None, "decoder"):
            yield from self._other_models(shape)
        if self.graphs:
            yield from self._cuda_graphs(shape)
        if shape.tp > 1 and self.section.async_tp and not self.compiles:
            what = "async_tp needs compiled code; set training.compile: true, or remove the key"
            yield Reason("parallel.async_tp", what)
        if shape.tp > 1 and self.qat == "int8_int4":
            what = f"{shape.tp} would split the activations, of which int8_int4 (training.qat) rounds full tokens"
            yield Reason("parallel.tp", f"{what}; set tp: 1, or training.qat.type: int4")
        if shape.tp > 1:
            for size, what, remedy in self.split:
                if size % shape.tp:
                    more = f"; {remedy.format(tp=shape.tp, up=-(-size // shape.tp) * shape.tp)}" if remedy else ""
                    yield Reason("parallel.tp", f"{shape.tp} does not divide {what}{more}")
            heads, groups = self.heads or (0, 0)
            if groups != heads and groups % shape.tp and not (self.shared and shape.tp % groups == 0):
                more = ", which share one norm (model.qk_norm_over)"
                if self.shared:
                    more = f", nor is it a multiple of {groups}"
                what = f"{shape.tp} does not divide {groups} key/value heads (model.num_key_value_heads){more}"
                yield Reason("parallel.tp", what)
        if shape.cp > 1:
            yield from self._exchange(shape)
        if shape.cp * shape.tp > 1 and self.section.plan is None:
            axis, seen = ("tp", "heads") if shape.tp > 1 else ("cp", "tokens")
            for key, chosen in self.custom:
                what = f"{chosen} would receive only a part of the {seen} ({axis} {shape.sizes[axis]})"
                yield Reason(key, f"{what}; choose a built-in component")
            yield from self._rows(shape)
        if shape.ep > 1 and self.type == "decoder":
            if self.experts is None:
                yield Reason("parallel.ep", f"{shape.ep}, but the model has no experts (model.moe)")
            elif self.experts % shape.ep:
                what = f"{shape.ep} does not divide the {self.experts} experts (model.moe.num_experts)"
                yield Reason("parallel.ep", what)
        if shape.pp > 1:
            yield from self._stages(shape)

    def _stages(self, shape: MeshShape) -> Iterator[Reason]:
        for key, chosen in self.custom:
            if key == "model.position":
                yield Reason(key, f"{chosen} would be copied into each pipeline stage; choose a built-in component")
        if self.only_rows is not None and self.type == "decoder":
            what = f"{self.only_rows}, but most pipeline stages have no such row to train; remove the key"
            yield Reason("training.only_rows_from", what)
        if self.layers is not None and shape.pp * self.section.virtual_stages > self.layers:
            each = f" x {self.section.virtual_stages}" if self.section.virtual_stages > 1 else ""
            what = f"{shape.pp}{each} stages, but the model has {self.layers} layers (model.num_hidden_layers)"
            if self.section.stages_per_rank and (fewer := self.layers // shape.pp) > 1:
                what += f"; set stages_per_rank: {fewer}"
            yield Reason("parallel.pp", what)

    def _other_models(self, shape: MeshShape) -> Iterator[Reason]:
        for axis in ("pp", "cp", "tp", "ep"):
            size, key = shape.sizes[axis], f"parallel.{axis}"
            if size > 1 and self.type == "hf":
                yield Reason(key, f"{size}, but a model of type hf is {LIMITS}")
            elif size > 1 and axis == "pp" and self.section.plan is not None:
                continue  # stages of the plan
            elif size > 1 and axis != "tp":
                what = f"{size}, but a custom model supports only dp_replicate, dp_shard and (with weft_sharding) tp"
                yield Reason(key, what)
            elif size > 1 and self.section.plan is None and has_table(self.type) is False:
                what = f"{size}, but {self.type} does not define how its matrices are sharded"
                yield Reason(key, f"{what}; add a table weft_sharding to the class (docs/parallel-own-model.md)")

    def _cuda_graphs(self, shape: MeshShape) -> Iterator[Reason]:
        """Yields reasons why CUDA graphs cannot replay blocks, whose parameters must stay in place on one GPU."""
        remedy = "set training.compile: true"
        for axis in (axis for axis, size in shape.sizes.items() if size > 1 and axis != "dp_replicate"):
            more = ", or dp_replicate: -1 and dp_shard: 1" if axis == "dp_shard" else f", or {axis}: 1"
            what = f"reduce-overhead needs the whole model on one GPU, but parallel.{axis} is {shape.sizes[axis]}"
            yield Reason("training.compile", f"{what}; {remedy}{more}")
        if self.section.offload == "parameters" or self.compresses:
            key = "parallel.compress" if self.compresses else "parallel.offload: parameters"
            yield Reason("training.compile", f"reduce-overhead does not work with {key}; {remedy}, or remove that key")

    def _exchange(self, shape: MeshShape) -> Iterator[Reason]:
        if self.section.cp_method != "all_to_all" or self.exchanges(shape):
            return
        heads, groups = self.heads or (0, 0)
        what = f"{heads} attention" if heads // shape.tp % shape.cp else f"{groups} key/value"
        each = f" / tp {shape.tp}" if shape.tp > 1 else ""
        yield Reason(
            "parallel.cp_method", f"all_to_all, but cp {shape.cp} does not divide {what} heads{each}; set auto"
        )

    def exchanges(self, shape: MeshShape) -> bool:
        """Whether `cp_method: all_to_all` is possible on a mesh (see `can_exchange_heads`)."""
        return self.heads is None or can_exchange_heads(self.heads, shape.tp, shape.cp)

    def sequence_unit(self, shape: MeshShape) -> int:
        """Returns the number of which the length of every sequence must be a multiple."""
        gathers = shape.cp > 1 and (self.section.cp_method in ("all_gather", "ring") or not self.exchanges(shape))
        # With gathered keys and values, a rank has one slice from the front of a sequence and one from its end.
        return shape.cp * (math.lcm(2, shape.tp) if gathers else shape.tp)

    def _rows(self, shape: MeshShape) -> Iterator[Reason]:
        unit = self.sequence_unit(shape)
        for key, length in self.lengths:
            if length % unit:
                axes = [axis for axis in ("cp", "tp") if shape.sizes[axis] > 1]
                parts = " x ".join(f"{axis} {shape.sizes[axis]}" for axis in axes)
                what = f"{parts} cannot split sequences of {length:,} tokens ({key}); choose a multiple of {unit}"
                yield Reason(f"parallel.{axes[0]}", what)

    # ---- rules between axes

    def _of_all(self, shape: MeshShape) -> Iterator[Reason]:
        if shape.fsdp % shape.ep:
            what = (
                f"{shape.ep} does not divide dp_shard {shape.dp_shard} x cp {shape.cp}, from which its ranks are taken"
            )
            yield Reason("parallel.ep", what)
        if self.compresses and shape.dp_replicate == 1:
            what = "compresses the all-reduce between replicas, but the mesh has one replica; set dp_replicate"
            yield Reason("parallel.compress", f"{what}, or remove the section")
        number = self.section.reshard_after_forward
        if number is not None and not isinstance(number, bool) and number > 1:
            yield from self._reshards(shape, number)
        if shape.pp == 1:
            return
        counts, stages = self.section.stage_layers, shape.pp * self.section.virtual_stages
        if counts is not None and len(counts) != stages:
            what = f"{len(counts)} stages, but pp {shape.pp} with {self.section.pp_schedule} has {stages}"
            yield Reason("parallel.stage_layers", f"{what}; list the layers of each stage, or remove the key")
        if self.sequences and self.length:
            where = shape.pp, shape.data_ranks
            if where not in self._feeds:
                self._feeds[where] = self._micro_batches(shape, self.sequences, self.length)
            if (reason := self._feeds[where]) is not None:
                yield reason

    def _reshards(self, shape: MeshShape, number: int) -> Iterator[Reason]:
        key, experts = "parallel.reshard_after_forward", shape.fsdp // shape.ep
        # PyTorch creates the process groups of N ranks one after another; ranks that are not part of all of them would
        # wait for each other.
        if shape.fsdp > 1 and shape.fsdp % number:
            yield Reason(key, f"{number} does not divide dp_shard {shape.dp_shard} x cp {shape.cp}; set true or false")
        elif number < shape.fsdp and shape.pp * shape.tp > 1:
            yield Reason(key, f"{number} of {shape.fsdp} ranks is not supported with pp or tp; set true or false")
        elif shape.ep > 1 and experts not in (1, number):
            what = f"{number}, but experts are sharded over {experts} ranks (dp_shard x cp / ep)"
            yield Reason(key, f"{what}; set {experts}, true or false")

    def _micro_batches(self, shape: MeshShape, sequences: int, length: int) -> Reason | None:
        """Returns a reason if the schedule does not support the number of micro-batches per step; else None.

        Args:
            sequences: number of sequences in the global batch.
            length: number of tokens per sequence.
        """
        section, pp = self.section, shape.pp
        per_rank, micro = split_batch(sequences, length, shape, self.micro, section)
        count = -(-per_rank // micro)
        if section.supports(count, pp):
            return None
        smaller = [size for size in range(micro - 1, 0, -1) if section.supports(-(-per_rank // size), pp)]
        even = [size for size in smaller if per_rank % size == 0]
        if smaller:
            remedy = f"set training.micro_batch_size: {(even or smaller)[0]}"
        else:
            enough = next(number for number in range(count, count + 2 * pp + 1) if section.supports(number, pp))
            remedy = f"set training.batch_tokens: {enough * micro * shape.data_ranks * length}"
        wanted = f"fewer than {2 * pp} micro-batches, or a multiple of {pp}"
        if section.pp_schedule in (*V_SHAPED, "1f1b"):
            wanted = f"at least {pp * section.virtual_stages} micro-batches"
        what = f"{section.pp_schedule} over {pp} ranks needs {wanted}"
        return Reason(
            "parallel.pp", f"{what}, but a step has {count} ({per_rank} sequences, {micro} per micro-batch); {remedy}"
        )


def has_table(type_: str) -> bool | None:
    """Whether a custom model class defines the attribute `weft_sharding`; None if its source does not show this."""
    module, _, name = type_.partition(":")
    try:
        source = find_class(module, name)
    except NotFound:
        return None
    return None if source is None else has_attribute(source, "weft_sharding")
