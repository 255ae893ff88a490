"""Computes the memory of a training step from formulas, without torch.

The peak is the largest of a few moments: the loss, the backward pass of each block, and the reduction of the last
gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain

from weft.config.derive import batch_sequences, sequence_length, split_batch
from weft.config.mesh import mesh_shape
from weft.config.model import ModelSection
from weft.config.run import RunConfig
from weft.errors import UserError
from weft.parallel.stages import embeds_at_end, stage_ranges, stages_of_rank
from weft.planner.schedules import in_flight
from weft.planner.tensors import Sizes, masks_bytes, norm_tensors, saved_tensors
from weft.planner.work import KEPT_LOGITS, WIDTHS, Shares, Work, block_work, embedding_work, head_work

# Tensors per parameter of a block; embedding and head have two, by AdamW. A custom optimizer counts like AdamW.
STATES = {"adamw": 2, "muon": 1}
# Two assumptions, which no GPU has confirmed yet: what the allocator cannot reuse, as a share of what a step allocates
# and frees; and the bytes of a GPU's context, libraries' workspaces and NCCL's buffers.
FRAGMENTATION = 0.08
DEVICE_BYTES = 1 << 30
CHUNKED_LOGITS = 1 << 20  # logits that a CPU upcasts at a time (weft.kernels.cross_entropy)


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank at its peak, by part."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    buffers: float = 0.0
    fragmentation: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""  # not by `parts`, which is slow: searches compare hundreds of thousands of sums
        changing = self.activations + self.logits + self.gathered + self.buffers + self.fragmentation
        return self.parameters + self.gradients + self.optimizer + changing

    def parts(self) -> dict[str, float]:
        """Returns the bytes by part."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class _Piece:
    saved: float  # bytes kept from forward to backward
    full: float  # bytes that exist while its backward runs, with those that are recomputed
    transient: float  # bytes of gradients within its backward
    parameters: float  # after tp and ep
    local: float  # on this rank


def memory_of(
    config: RunConfig,
    devices: int,
    *,
    dtype: str | None = None,
    cpu: bool = False,
    only: int | None = None,
    chunks: bool | None = None,
) -> list[Memory]:
    """Returns the memory of one rank of each rank of the pipeline, in their order.

    Args:
        config: a run. Its data need not exist.
        devices: number of ranks.
        dtype: dtype of the computation. Default: `training.dtype`, with "bfloat16" for "auto".
        cpu: whether kernels are those of a CPU. Then nothing is added for a GPU's context and fragmentation.
        only: the only pipeline rank whose memory is computed. Default: all.
        chunks: whether the loss computes a few logits at a time, as on a CPU. Default: `cpu`.

    Raises:
        UserError: the model is not the built-in decoder, its vocabulary is unknown, or the mesh is not possible.
    """
    ranks = _Ranks(config, devices, dtype, cpu=cpu, chunks=cpu if chunks is None else chunks)
    return [ranks.peak(number) for number in (range(ranks.mesh.pp) if only is None else [only])]


class _Ranks:
    """The ranks of a run: what one of them keeps at each moment of a step."""

    def __init__(self, config: RunConfig, devices: int, dtype: str | None, *, cpu: bool, chunks: bool):
        model, training, self.parallel = config.model, config.training, config.parallel
        if not isinstance(model, ModelSection):
            raise UserError(f"model.type: {model.type}, but plans are for type: decoder; use weft parallelize")
        if model.vocab_size is None:
            raise UserError("model.vocab_size: not known without a tokenizer; set it for the plan")
        self.model, self.cpu, self.mesh = model, cpu, mesh_shape(config.parallel, devices)
        self.chunk = 0 if training.compile else CHUNKED_LOGITS if chunks else KEPT_LOGITS  # compiled: in place
        chosen = dtype or (training.dtype if training.dtype != "auto" else "bfloat16")
        state = "float64" if chosen == "float64" else "float32"
        self.width, self.state = WIDTHS[chosen], WIDTHS[state]
        self.reduced = WIDTHS[state if training.reduce_dtype == "auto" else training.reduce_dtype]
        self.on_device, plain = self.parallel.offload != "parameters", self.parallel.compress is None
        self.single = devices == self.mesh.dp_replicate and self.on_device and plain and self.reduced == self.state
        length, given = sequence_length(config), training.micro_batch_size
        per_rank, micro = split_batch(batch_sequences(config), length, self.mesh, given, self.parallel)
        self.count = -(-per_rank // micro)
        self.shares = Shares(model, micro, length, self.mesh, self.width, self.state, fused=bool(training.compile))
        self.checkpointing, self.vocabulary = training.activation_checkpointing, model.vocab_size
        self.stays = not self.parallel.reshards or (self.mesh.fsdp == 1 and self.on_device)  # full, after forward
        self.states = STATES.get(config.optimizer.type, 2)
        self.accumulates = self.count > 1 and not self.parallel.reduces_every
        self.copies = 0.0 if self.single and self.width == self.state else float(self.width)
        self.residual = self.shares.tokens / self.mesh.tp * model.hidden_size * self.state
        self.rows = 1 if model.num_labels else max(1, self.vocabulary // self.mesh.tp)
        self.separate = not embeds_at_end(model)
        self.copied = self.rows * model.hidden_size * (self.mesh.pp > 1 and model.tie_word_embeddings)
        logits = self.shares.tokens * self.rows
        self.kept_logits = logits * self.width * (1 + model.num_nextn_predict_layers) * (logits <= KEPT_LOGITS)
        self.normed = norm_tensors(self.shares, cpu=self.cpu)
        self.masks = masks_bytes(self.shares) if self.cpu else 0.0
        self.stages = self._stages(length)
        self.worst, self._ends, self._kept = cache(self._worst), cache(self._ends_of), cache(self._kept_in)

    def _stages(self, length: int) -> list[list[_Piece]]:
        sizes = Sizes(self.shares, self.state, self.cpu, self.parallel.cp_method, self.checkpointing)
        layers, known, blocks = self.model.num_hidden_layers, {}, []
        for layer in range(self.model.all_layers):
            key = self.model.has_experts(layer), self.model.slides(layer), layer >= layers, self._recomputes(layer)
            blocks.append(known.get(key) or known.setdefault(key, self._block(sizes, layer)))
        if self.mesh.pp == 1:
            return [blocks]
        ranges = stage_ranges(self.model, self.parallel.model_copy(update={"pp": self.mesh.pp}), length)
        found = [[blocks[layer] for layer in span] for span in ranges]
        found[-1] += blocks[layers:]
        return found

    def _recomputes(self, layer: int) -> bool:
        mode, _, number = self.checkpointing.partition("-")
        return mode != "none" and (mode != "every" or (layer + 1) % int(number) == 0)

    def _block(self, sizes: Sizes, layer: int) -> _Piece:
        kept = saved_tensors(sizes, layer)
        saved = everything = kept.everything
        if self._recomputes(layer):
            mode, _, number = self.checkpointing.partition("-")
            least = {"selective": kept.inputs + kept.selective, "budget": float(number or 0) * kept.everything}
            saved = max(kept.inputs, least.get(mode, 0.0))
            everything += kept.unsaved * (mode == "selective")
        return _Piece(saved, max(saved, everything), kept.transient, *self._numbers(block_work(self.shares, layer)))

    def _numbers(self, work: Work) -> tuple[float, float]:
        experts = self.mesh.fsdp // self.mesh.ep
        local = work.parameters / self.mesh.fsdp + work.expert_parameters / experts
        return work.parameters + work.expert_parameters, local

    def peak(self, rank: int) -> Memory:
        """Returns the memory of a pipeline rank at its peak."""
        pp, virtual, schedule, count = self.mesh.pp, self.parallel.virtual_stages, self.parallel.pp_schedule, self.count
        owned, lives = [0], ((1, 0, True), (1, 0, False)) if self.accumulates else ((1, 0, True),)
        if pp > 1:
            most = 4 * pp * virtual  # later micro-batches repeat the earlier ones
            if schedule not in ("gpipe", "looped_bfs") and count > most:
                count = most
            owned, lives = stages_of_rank(self.parallel, rank, pp), in_flight(schedule, rank, pp, virtual, count)
        moments = (self._moment(owned, live, place, bool(first)) for *live, place, first in lives)
        found = max(chain(moments, self._update(owned)), key=lambda one: one.total)
        if self.cpu:
            return found
        changing = found.activations + found.logits + found.gathered + found.buffers
        more = {"buffers": found.buffers + DEVICE_BYTES, "fragmentation": FRAGMENTATION * changing}
        return Memory(**(found.parts() | more))

    def _state(self, owned: list[int]) -> tuple[float, float]:
        """Returns the bytes of parameters, which are also those of sharded gradients, and of the optimizer's state."""
        roots = sum(local for stage in owned for _, local in self._ends(stage)) * self.state
        blocks = sum(piece.local for stage in owned for piece in self.stages[stage]) * self.state
        optimizer = (blocks * self.states + roots * 2) * (self.parallel.offload == "none")
        return (blocks + roots) * self.on_device, optimizer

    def _buffers(self, owned: list[int]) -> float:
        """Returns the bytes of one receive buffer for each micro-batch and neighbor, and of a copied tied embedding."""
        last = len(self.stages) - 1
        received = self.count * self.residual * sum((stage > 0) + (stage < last) for stage in owned)
        return received + self.copied / self.mesh.fsdp * self.state * (last in owned)

    def _moment(self, owned: list[int], live: list[int], place: int, first: bool) -> Memory:
        """Returns the memory at the peak of a backward pass, the `first` or a later one of the stage `owned[place]`.

        Args:
            owned: the stages of the rank.
            live: for each of them, the number of micro-batches that it keeps.
        """
        parameters, optimizer = self._state(owned)
        kept = sum(number * self._kept(stage) for number, stage in zip(live, owned, strict=True))
        kept += self._buffers(owned) - self._kept(owned[place])
        rest = [stage for at, stage in enumerate(owned) if at != place]
        others = sum(piece.parameters for stage in rest for piece in self.stages[stage])
        other_ends = sum(total for stage in rest for total, _ in self._ends(stage))
        sums = (others + other_ends) * self.reduced * self.accumulates
        stays = others * self.stays + other_ends * (self.stays or not self.separate)
        moment = self.worst(owned[place], self.stays, first)
        return Memory(
            parameters, moment.gradients + sums, optimizer, moment.activations + kept,
            moment.logits, moment.gathered + stays * self.copies, moment.buffers,
        )  # fmt: skip

    def _worst(self, stage: int, stays: bool, first: bool) -> Memory:
        return max(self._backward(stage, stays=stays, first=first), key=lambda one: one.total)

    def _update(self, owned: list[int]) -> Iterator[Memory]:
        """Yields the first gather of a micro-batch, the reduction after a pipeline's passes, and the update."""
        parameters, optimizer = self._state(owned)
        received = self._buffers(owned)
        ends = [end for stage in owned for end in self._ends(stage)] or [(0.0, 0.0)]
        units = [piece.parameters for stage in owned for piece in self.stages[stage]]
        everything = sum(units) + sum(end[0] for end in ends)
        waiting = everything * self.reduced * self.accumulates
        if self.mesh.fsdp > 1:  # the result of an all-gather, and parameters into which it is copied
            gathered = 2 * max(end[0] for end in ends) * self.copies
            yield Memory(parameters, waiting * (self.mesh.pp == 1), optimizer, received, gathered=gathered)
        if self.mesh.pp > 1:
            size, local = max((*ends, (max(units), max(units) / self.mesh.fsdp)))
            kept = everything if self.stays else (everything - sum(units)) * (not self.separate)
            gathered = max(0.0, kept - size) * self.copies
            buffer = size * self.reduced * (self.mesh.fsdp > 1)
            yield Memory(parameters, waiting + local * self.state, optimizer, received, 0, gathered, buffer)
        if self.states == 1 and self.parallel.offload == "none":
            yield Memory(parameters, parameters, optimizer, received, buffers=self._orthogonalized(owned))

    def _orthogonalized(self, owned: list[int]) -> float:
        """Returns the bytes with which Muon orthogonalizes all matrices of one shape, of which it needs full ones."""
        layers, shapes, at = self.model.num_hidden_layers, Counter[tuple[int, int]](), 0
        plain = Shares(self.model, 1, 1)
        for stage, blocks in enumerate(self.stages):
            for layer in range(at, at + len(blocks)):
                if stage in owned:
                    for one in block_work(plain, min(layer, layers)).matmuls:
                        shapes[one.k, one.n] += one.count
            at += len(blocks)
        # Stacked in float32; with the product before and after an iteration, and two Gram matrices, in bfloat16.
        return max(count * k * n * (8 + 4 * min(k, n) / max(k, n)) for (k, n), count in shapes.items())

    def _kept_in(self, stage: int) -> float:
        """Returns the bytes that a micro-batch keeps in a stage."""
        kept, last = sum(piece.saved for piece in self.stages[stage]), len(self.stages) - 1
        if stage == last:  # the final norm
            kept += self.residual * self.normed + self.shares.tokens * self.model.hidden_size * self.width
            kept += self.kept_logits
        return kept + self.masks + self.residual * (stage < last)  # sent to the next stage

    def _ends_of(self, stage: int) -> list[tuple[float, float]]:
        """Returns the numbers of parameters of the units of embedding and head: after `tp`, and on this rank."""
        last = len(self.stages) - 1
        works = [embedding_work(self.shares, self.vocabulary)] if stage == 0 else []
        works += [head_work(self.shares, self.vocabulary)] if stage == last else []
        pairs = [self._numbers(work) for work in works]
        if self.separate:
            return pairs
        copy = self.copied * (stage == last)
        return [(sum(total for total, _ in pairs) + copy, sum(local for _, local in pairs))]

    def _backward(self, stage: int, *, stays: bool, first: bool) -> Iterator[Memory]:
        """Yields moments of a stage's `first` backward pass, or of the last; `stays`: parameters stay gathered."""
        blocks, unit, sums = self.stages[stage], self.parallel.layers_per_fsdp_unit, self.accumulates
        groups = [blocks[at : at + unit] for at in range(0, len(blocks), unit)]
        sizes, ends = [sum(piece.parameters for piece in group) for group in groups], self._ends(stage)
        root, last = sum(total for total, _ in ends), stage == len(self.stages) - 1
        reduces = self.mesh.pp == 1 and not (sums and first)
        reduced = 0.0 if self.mesh.fsdp == 1 else self.reduced
        head = self.rows * self.model.hidden_size
        begins, casts = self.reduced * (sums and first), self.width != self.reduced
        waiting = (sum(sizes) + root) * self.reduced * (sums and not first)  # unsharded sums of earlier micro-batches
        root *= stays or not self.separate  # what stays gathered during all of backward
        sharded, before, root_grads = 0.0, 0.0, 0.0
        saved = self._kept(stage) - self.kept_logits * last

        def finish(size: float, local: float, kept: float, gathered: float) -> Memory:
            """Returns the moment after the backward of a unit, which reduces its gradients or adds them to others."""
            nonlocal waiting, sharded, before
            held, own = waiting + sharded + root_grads, local * self.state * self.on_device
            if not reduces:
                waiting += size * begins
                return Memory(0, held + size * max(begins, self.width), 0, kept, 0, gathered)
            more = 0 if sums else max(own, size * self.width)  # full gradients are freed before the shard is allocated
            waiting, sharded, before = waiting - size * self.reduced * sums, sharded + own, size * reduced
            return Memory(0, held + more, 0, kept, 0, gathered, before)

        gathered = (root + (sum(sizes) if stays else sizes[-1])) * self.copies
        if last:
            own = ends[-1][0] * (self.separate and not stays) * self.copies
            for logits, grads in self._head():
                yield Memory(0, waiting + grads, 0, saved, logits, gathered + own)
            saved -= self.residual * (self.normed - 1) + self.shares.tokens * self.model.hidden_size * self.width
            if self.separate:
                yield finish(*ends[-1], saved + self.residual, gathered)
            else:
                # A tied weight's gradient waits for the embedding's: only their sum is added to earlier micro-batches'.
                root_grads = head * self.width * (stage == 0 or casts or first or not sums)
        for number in reversed(range(len(groups))):
            group, size = groups[number], sizes[number]
            ahead = sum(sizes[max(0, number - max(1, self.parallel.prefetch)) : number])
            gathered = (root + (sum(sizes) if stays else size + ahead)) * self.copies
            held = waiting + sharded + root_grads
            widest = max(group, key=lambda one: one.full - one.saved + one.transient)
            grads = size * self.width / 3 + widest.transient
            yield Memory(0, held + grads, 0, saved + widest.full - widest.saved, 0, gathered, before)
            saved -= sum(piece.saved for piece in group)
            yield Memory(0, held + size * self.width, 0, saved + 2 * self.residual, 0, gathered, before)
            gathered -= size * (not stays) * self.copies  # FSDP2 reshards a unit before it reduces the unit's gradients
            yield finish(size, sum(piece.local for piece in group), saved + self.residual, gathered)
        stayed = sum(sizes) * stays * self.copies
        if stage == 0:
            more = head * (self.width + begins * casts)  # the embedding's gradient
            held = waiting + sharded + root_grads + more
            yield Memory(0, held, 0, self.residual / 2, 0, root * self.copies + stayed, before)
        if reduces and (stage == 0 or not self.separate):
            root_grads = 0.0
            yield finish(*ends[0], 0, stayed)

    def _head(self) -> Iterator[tuple[float, float]]:
        """Yields moments of the head's backward pass: bytes of logits, and of gradients of its weights."""
        tokens, hidden, wide = self.shares.tokens, self.model.hidden_size, max(4, self.width)
        weight, found = self.rows * hidden, tokens * hidden * self.width
        in_place = self.cpu and wide == self.width and not (self.model.logit_softcap or self.model.num_labels)
        casts = 4 if self.model.logit_softcap else 1 if wide == self.width else 2  # tensors in float32
        kept = self.kept_logits > 0
        block = (tokens if kept else max(1, KEPT_LOGITS // self.rows)) * self.rows
        logits = (self.kept_logits or block * self.width) + found
        if in_place:  # exponentials take the logits' place; hidden states are scaled before and after a product
            logits += 2 * min(found, block / self.rows * hidden * self.width)
            yield logits, weight * wide * (1 if kept else 2)
            return
        yield logits + min(block, self.chunk) * wide * casts, 0.0 if kept else weight * wide
        yield logits, weight * (self.width if kept else 2 * wide + (wide > self.width) * self.width)
