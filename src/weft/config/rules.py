"""What must hold between keys, and between the keys and the data."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from weft.config.derive import DEFAULT_SEQUENCES, count_steps
from weft.config.draft import Draft
from weft.config.errors import UserError
from weft.config.mesh import ParallelSection, mesh_shape


def apply_rules(draft: Draft, *, check_data: bool) -> None:
    """Fill in what follows from other keys, and note what does not fit together."""
    _heads(draft)
    _length_of_run(draft)
    _positions(draft)
    _batch(draft)
    _name(draft)
    _mesh(draft)
    samples = _data(draft) if check_data else None
    _warm_up(draft, samples)
    if draft.get("samples.prompts") and "tokenizer" in draft.values and draft.get("tokenizer") is None:
        draft.problem(
            "samples.prompts", "there is no tokenizer to read them with; set tokenizer, or remove the prompts"
        )


def _heads(draft: Draft) -> None:
    heads, width = draft.get("model.num_attention_heads"), draft.get("model.hidden_size")
    groups, head = draft.get("model.num_key_value_heads"), draft.get("model.head_dim")
    if heads is None or width is None:
        return
    if head is None and width % heads:
        draft.problem(
            "model.num_attention_heads",
            f"{heads} heads do not divide the width: hidden_size {width} is no multiple of it; "
            f"choose {_divisor_near(width, heads)} heads, or set head_dim",
            "model.hidden_size",
        )
    elif draft.get("model.position") == "rope" and (head or width // heads) % 2:
        draft.problem(
            "model.head_dim",
            f"rotary positions turn pairs, and a head has {head or width // heads} dimensions; make it even",
            "model.num_attention_heads",
            "model.hidden_size",
        )
    if groups is not None and heads % groups:
        draft.problem(
            "model.num_key_value_heads",
            f"{groups} key-value heads do not divide {heads} attention heads; choose {_divisor_near(heads, groups)}",
            "model.num_attention_heads",
        )


def _divisor_near(number: int, wanted: int) -> int:
    """The divisor next to `wanted`; 1 if none is near."""
    for distance in range(1, 4096):
        for divisor in (wanted - distance, wanted + distance):
            if 0 < divisor <= number and number % divisor == 0:
                return divisor
    return 1


def _length_of_run(draft: Draft) -> None:
    names = ("training.steps", "training.tokens", "training.epochs")
    given = [name for name in names if draft.get(name) is not None]
    broken = [name for name in names if name not in draft.values]
    if len(given) > 1:
        words = " and ".join(name.removeprefix("training.") for name in given)
        for name in given:
            draft.problem(name, f"{words} both say how long the run is; keep one")
            break
    elif not given and not broken and not any(p.key == "training" for p in draft.problems):
        draft.problem("training", "how long is the run? set one of steps, tokens or epochs")


def _positions(draft: Draft) -> None:
    """The sequence length: its default, and the longest that the model takes."""
    longest = draft.get("model.max_position_embeddings")
    if "data.sequence_length" not in draft.values:
        return
    length = draft.get("data.sequence_length")
    if length is None:
        draft.fill("data.sequence_length", min(1024, longest or 1024), "from the model's max_position_embeddings")
    elif longest is not None and length > longest:
        learned = " (a learned table)" if draft.get("model.position") == "learned" else ""
        draft.problem(
            "data.sequence_length",
            f"{length} is longer than the model's {longest} positions{learned}; "
            f"shorten it, or set model.max_position_embeddings: {length}",
            "model.max_position_embeddings",
        )


def _batch(draft: Draft) -> None:
    length, tokens = draft.get("data.sequence_length"), draft.get("training.batch_tokens")
    if not length or "training.batch_tokens" not in draft.values:
        return
    if tokens is not None and tokens % length:
        lower, upper = tokens // length * length, -(-tokens // length) * length
        choice = f"{lower} or {upper}" if lower else str(upper)
        draft.problem(
            "training.batch_tokens",
            f"{tokens} tokens are not whole sequences of {length}; set {choice}",
            "data.sequence_length",
        )
        return
    micro, sequences = draft.get("training.micro_batch_size"), sequences_of(draft)
    if micro is not None and sequences is not None and micro > sequences:
        draft.problem(
            "training.micro_batch_size",
            f"{micro} sequences per forward, but the whole batch has {sequences}; "
            f"set {sequences} or less, or raise training.batch_tokens",
            "training.batch_tokens",
        )


def sequences_of(draft: Draft) -> int | None:
    """Sequences per step, if known."""
    length, tokens = draft.get("data.sequence_length"), draft.get("training.batch_tokens")
    if not length or "training.batch_tokens" not in draft.values:
        return None
    return DEFAULT_SEQUENCES if tokens is None else tokens // length


def _name(draft: Draft) -> None:
    name = draft.get("run.name")
    if "run.name" not in draft.values:
        return
    if name is None:
        file = draft.tree.file or "run"
        stem = os.path.basename(file).rsplit(".", 1)[0] or "run"
        draft.fill("run.name", stem, "the file's name")
    elif not name.strip() or name in (".", "..") or any(c in name for c in "/\\\0\n"):
        draft.problem("run.name", f"{name!r} cannot be a folder's name; where runs are kept is run.directory")


def _mesh(draft: Draft) -> None:
    keys = ("dp_replicate", "dp_shard")
    sizes = {key: draft.get(f"parallel.{key}") for key in keys}
    if None in sizes.values():
        return
    ranks = os.environ.get("WORLD_SIZE", "")
    known = int(ranks) if ranks.isdigit() and int(ranks) > 0 else None
    try:
        if known is not None:
            mesh_shape(ParallelSection(**sizes), known)
        else:  # legal on some number of ranks?
            whole = max(1, sizes["dp_replicate"]) * max(1, sizes["dp_shard"])
            mesh_shape(ParallelSection(**sizes), whole)
    except UserError as error:
        key, _, what = error.what.partition(": ")
        draft.problem(key, what, *(f"parallel.{name}" for name in keys))


def _warm_up(draft: Draft, samples: int | None) -> None:
    steps, fraction = draft.get("schedule.warmup_steps"), draft.get("schedule.warmup_fraction")
    if steps is not None and fraction is not None:
        draft.problem("schedule.warmup_steps", "warmup_fraction is set as well; keep one of them")
        return
    sequences = sequences_of(draft)
    if not isinstance(steps, int) or sequences is None:
        return
    total = count_steps(
        steps=draft.get("training.steps"),
        tokens=draft.get("training.tokens"),
        epochs=draft.get("training.epochs"),
        sequences=sequences,
        length=draft.get("data.sequence_length"),
        samples=samples,
    )
    if total is not None and steps > total:
        draft.problem(
            "schedule.warmup_steps",
            f"{steps} steps of warm-up, but the run has {total}; set it to {max(1, total // 20)}, or lengthen the run",
            "training.steps",
        )


# ---- the headers of the data


def _data(draft: Draft) -> int | None:
    """Open the headers. Returns the number of training sequences, if known."""
    from weft.config.headers import read_store_header, read_tokenizer_header

    folder = draft.get("tokenizer")
    tokenizer = _opened(draft, "tokenizer", read_tokenizer_header) if isinstance(folder, str) else None
    train = _opened(draft, "data.train", read_store_header)
    held_out = _opened(draft, "data.validation", read_store_header)
    length = draft.get("data.sequence_length")
    for key, store in (("data.train", train), ("data.validation", held_out)):
        if store is not None and length is not None and store.num_tokens < length + 1:
            draft.problem(
                key,
                f"{draft.get(key)} has {store.num_tokens:,} tokens, which is shorter than one sequence "
                f"(sequence_length {length} and the token after it); shorten data.sequence_length or pack more text",
            )
    same = "pack both with one tokenizer"
    if tokenizer is not None and _differ(train, tokenizer.digest):
        draft.problem(
            "data.train",
            f"{draft.get('data.train')} was packed with another tokenizer than {folder}; "
            "name the one that packed it, or pack it again",
        )
    reference = train.tokenizer_digest if train is not None else tokenizer.digest if tokenizer is not None else None
    if reference is not None and _differ(held_out, reference):
        draft.problem(
            "data.validation",
            f"{draft.get('data.validation')} was packed with another tokenizer than the training data; {same}",
        )
    _vocabulary(draft, tokenizer, train)
    return (train.num_tokens - 1) // length if train is not None and length else None


def _opened(draft: Draft, key: str, read: Callable[[str], Any]) -> Any:
    path = draft.get(key)
    if not isinstance(path, str):
        return None
    try:
        return read(path)
    except UserError as error:
        draft.problem(key, str(error))
        return None


def _differ(store: Any, digest: str) -> bool:
    return store is not None and store.tokenizer_digest is not None and store.tokenizer_digest != digest


def _vocabulary(draft: Draft, tokenizer: Any, train: Any) -> None:
    """`model.vocab_size`: no less than the tokenizer's; that, if it is not set."""
    needed, whose = None, ""
    if tokenizer is not None:
        needed, whose = tokenizer.vocab_size, f"tokenizer {draft.get('tokenizer')}"
    elif train is not None and train.vocab_size is not None:
        needed, whose = train.vocab_size, f"tokenizer of {draft.get('data.train')}"
    if "model.vocab_size" not in draft.values or "model.hidden_size" not in draft.values:
        return
    size = draft.get("model.vocab_size")
    if size is None and needed is not None:
        draft.fill("model.vocab_size", needed, f"from the {whose}")
    elif size is None and not draft.problems:
        draft.problem("model.vocab_size", "required: no tokenizer says how many tokens there are; add it")
    elif size is not None and needed is not None and size < needed:
        draft.problem(
            "model.vocab_size",
            f"{size} is smaller than the {whose}, which has {needed:,} tokens; set {needed} or remove the key",
        )
