"""What must hold between keys (`config/data_rules.py`: within `data:`, and between it and the data)."""

from __future__ import annotations

import os

from weft.config.data_rules import check_data_section, check_headers, run_steps, sequences_of
from weft.config.draft import Draft
from weft.config.experts import wrong_experts
from weft.config.foreign import longest as longest_foreign
from weft.config.legal_mesh import SIZES, reasons_against
from weft.config.mesh import ParallelSection
from weft.config.model import RopeScaling
from weft.config.own import check_parts
from weft.config.precision import check_precision


def apply_rules(draft: Draft, *, check_data: bool) -> None:
    """Fill in what follows from other keys, and note what does not fit together."""
    _heads(draft)
    _layers(draft)
    _rotations(draft)
    _experts(draft)
    _latent(draft)
    check_parts(draft)
    _length_of_run(draft)
    _positions(draft)
    _batch(draft)
    _name(draft)
    check_data_section(draft)
    samples = check_headers(draft) if check_data else None
    _mesh(draft)
    _warm_up(draft, samples)
    _only_rows(draft)
    _recomputed(draft)
    check_precision(draft, samples)
    if draft.get("samples.prompts") and "tokenizer" in draft.values and draft.get("tokenizer") is None:
        draft.problem(
            "samples.prompts", "there is no tokenizer to read them with; set tokenizer, or remove the prompts"
        )


def _heads(draft: Draft) -> None:
    heads, width = draft.get("model.num_attention_heads"), draft.get("model.hidden_size")
    groups, head = draft.get("model.num_key_value_heads"), draft.get("model.head_dim")
    if heads is None or width is None or draft.get("model.mla.kv_lora_rank") is not None:
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


def _layers(draft: Draft) -> None:
    layers, window = draft.get("model.num_hidden_layers"), draft.get("model.sliding_window")
    for name in ("model.layer_types", "model.no_rope_layers"):
        given = draft.get(name)
        if given is not None and layers is not None and len(given) != layers:
            draft.problem(name, f"{len(given)} entries for {layers} layers; give one each", "model.num_hidden_layers")
    if window is None:
        slides = "sliding_attention" in (draft.get("model.layer_types") or [])
        for name, said in (("model.layer_types", slides), ("model.sliding_window_pattern", True)):
            if said and draft.get(name) is not None:
                draft.problem(name, "how many tokens does the sliding window have? set model.sliding_window")


def _rotations(draft: Draft) -> None:
    found = {key: draft.get(f"model.rope_scaling.{key}") for key in RopeScaling.model_fields}
    width, heads, head = (draft.get(f"model.{key}") for key in ("hidden_size", "num_attention_heads", "head_dim"))
    share, latent = draft.get("model.partial_rotary_factor"), draft.get("model.mla.qk_rope_head_dim")
    if found["rope_type"] is None or not (latent or head or (width and heads)):
        return
    rotary_dim = latent or int((head or width // heads) * (1.0 if share is None else share))
    scaling = RopeScaling.model_construct(**{key: value for key, value in found.items() if value is not None})
    unfit = scaling.unfit(rotary_dim)
    if unfit is not None:
        draft.problem("model.rope_scaling", f"{unfit}; set it")


def _experts(draft: Draft) -> None:
    def get(name: str):
        return draft.get(f"model.moe.{name}")

    experts, each, groups, kept = (get(n) for n in ("num_experts", "num_experts_per_tok", "n_group", "topk_group"))
    if experts is None or each is None:
        return
    if draft.get("model.mlp") == "plain":
        draft.problem("model.mlp", "experts are gated; remove the key, or model.moe", "model.moe")
    layers, dense = draft.get("model.num_hidden_layers"), get("first_k_dense_replace")
    far = [layer for layer in get("mlp_only_layers") or [] if layers is not None and not 0 <= layer < layers]
    if far and layers is not None:
        what = f"there is no layer {far[0]}; they are counted from 0 to {layers - 1}"
        draft.problem("model.moe.mlp_only_layers", what, "model.num_hidden_layers")
    elif layers is not None and dense is not None and dense >= layers:
        what = f"{dense} of {layers} layers have an MLP, so none has experts; lower it, or remove model.moe"
        draft.problem("model.moe.first_k_dense_replace", what, "model.num_hidden_layers")
    if wrong := wrong_experts(experts, each, groups, kept):
        key, what = wrong
        draft.problem(f"model.moe.{key}", what, "model.moe.num_experts_per_tok")


def _latent(draft: Draft) -> None:
    """What latent attention has no use for."""
    if draft.get("model.mla.kv_lora_rank") is None:
        return
    for name in ("head_dim", "num_key_value_heads", "qk_norm", "clip_qkv"):
        given = draft.get(f"model.{name}")
        if given and not (name == "num_key_value_heads" and given == draft.get("model.num_attention_heads")):
            draft.problem(f"model.{name}", "latent attention (model.mla) has none; remove the key", "model.mla")


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
    longest, key, theirs = (
        draft.get("model.max_position_embeddings"),
        "max_position_embeddings",
        draft.get("model.config"),
    )
    if theirs is not None:
        longest, key = longest_foreign(theirs), "config.max_position_embeddings"
    if "data.sequence_length" not in draft.values:
        return
    length = draft.get("data.sequence_length")
    if length is None:
        # A class of the user's own, or of transformers, of which no longest may be known.
        own = isinstance(draft.get("model"), dict) or theirs is not None
        if draft.tree.get("data") is None or not (own or longest):
            return  # told already: what the data or the model are is not known
        draft.fill("data.sequence_length", min(1024, longest or 1024), "from the model's max_position_embeddings")
    elif longest is not None and length > longest:
        learned = " (a learned table)" if draft.get("model.position") == "learned" else ""
        draft.problem(
            "data.sequence_length",
            f"{length} is longer than the model's {longest} positions{learned}; "
            f"shorten it, or set model.{key}: {length}",
            f"model.{key}",
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
    """The mesh, on as many ranks as torchrun says, or as it needs at least."""
    told = any(problem.key.partition(".")[0] == "parallel" for problem in draft.problems)
    keys = {f"parallel.{name}" for name in ParallelSection.model_fields} - {"parallel.compress"}
    if told or not keys <= draft.values.keys():
        return
    known = all(key in draft.values for key in ("training.batch_tokens", "training.micro_batch_size"))
    ranks = os.environ.get("WORLD_SIZE", "")
    number = int(ranks) if ranks.isdigit() and int(ranks) > 0 else None
    for reason in reasons_against(draft.get, sequences_of(draft) if known else None, number):
        draft.problem(reason.key, reason.what, *(f"parallel.{axis}" for axis in SIZES))


def _only_rows(draft: Draft) -> None:
    """Only rows of the built-in decoder can be trained alone, and only rows that it has."""
    first, size = draft.get("training.only_rows_from"), draft.get("model.vocab_size")
    if first is None:
        return
    if "model.hidden_size" not in draft.values:
        if isinstance(draft.get("model"), dict):
            what = "this is the built-in decoder's: of another model it is not known what rows are; remove the key"
            draft.problem("training.only_rows_from", what)
    elif size is not None and first >= size:
        draft.problem(
            "training.only_rows_from",
            f"{first}, and the model has rows 0 to {size - 1} (model.vocab_size {size}); name the first new one "
            "(`weft resize` adds some)",
            "model.vocab_size",
        )
    elif draft.get("model.load_optimizer"):
        what = "that optimizer's state is of all parameters, and training.only_rows_from trains rows of two; remove one"
        draft.problem("model.load_optimizer", what)


def _recomputed(draft: Draft) -> None:
    mode, layers = draft.get("training.activation_checkpointing"), draft.get("model.num_hidden_layers")
    kind, _, each = (mode or "").partition("-")
    if kind == "every" and layers is not None and int(each) > layers:
        what = f"{mode}, and the model has {layers} layers, so none would be recomputed; lower it, or set none"
        draft.problem("training.activation_checkpointing", what, "model.num_hidden_layers")


def _warm_up(draft: Draft, samples: int | None) -> None:
    steps, fraction = draft.get("schedule.warmup_steps"), draft.get("schedule.warmup_fraction")
    if steps is not None and fraction is not None:
        draft.problem("schedule.warmup_steps", "warmup_fraction is set as well; keep one of them")
        return
    if not isinstance(steps, int):
        return
    total = run_steps(draft, samples)
    if total is not None and steps > total:
        draft.problem(
            "schedule.warmup_steps",
            f"{steps} steps of warm-up, but the run has {total}; set it to {max(1, total // 20)}, or lengthen the run",
            "training.steps",
        )
