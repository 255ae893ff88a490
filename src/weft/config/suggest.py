"""What somebody may have meant: near spellings, and the names that other frameworks use."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# What people write, and where it stands in Weft (dotted from the top).
ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "epsilon": "optimizer.eps",
    "optim": "optimizer",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule.type",
    "lr_schedule": "schedule",
    "scheduler": "schedule",
    "warmup": "schedule.warmup_steps",
    "warmup_steps": "schedule.warmup_steps",
    "num_warmup_steps": "schedule.warmup_steps",
    "warmup_iters": "schedule.warmup_steps",
    "lr_warmup_steps": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_fraction",
    "min_lr": "schedule.final",
    "min_lr_ratio": "schedule.final",
    "steps": "training.steps",
    "max_steps": "training.steps",
    "num_steps": "training.steps",
    "total_steps": "training.steps",
    "train_steps": "training.steps",
    "train_iters": "training.steps",
    "max_iters": "training.steps",
    "epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "max_epochs": "training.epochs",
    "num_train_epochs": "training.epochs",
    "tokens": "training.tokens",
    "max_tokens": "training.tokens",
    "train_tokens": "training.tokens",
    "batch_size": "training.batch_tokens",
    "global_batch_size": "training.batch_tokens",
    "train_batch_size": "training.batch_tokens",
    "total_batch_size": "training.batch_tokens",
    "gradient_accumulation_steps": "training.batch_tokens",
    "grad_accum": "training.batch_tokens",
    "micro_batch": "training.micro_batch_size",
    "microbatch_size": "training.micro_batch_size",
    "device_batch_size": "training.micro_batch_size",
    "per_device_train_batch_size": "training.micro_batch_size",
    "per_device_eval_batch_size": "validation.micro_batch_size",
    "max_grad_norm": "training.grad_clip",
    "gradient_clip": "training.grad_clip",
    "gradient_clip_val": "training.grad_clip",
    "clip_grad": "training.grad_clip",
    "clip_grad_norm": "training.grad_clip",
    "precision": "training.dtype",
    "bf16": "training.dtype",
    "fp16": "training.dtype",
    "amp": "training.dtype",
    "loss_scale": "training.initial_loss_scale",
    "initial_scale_power": "training.initial_loss_scale",
    "init_scale": "training.initial_loss_scale",
    "growth_interval": "training.loss_scale_window",
    "communication_data_type": "training.reduce_dtype",
    "grad_reduce_dtype": "training.reduce_dtype",
    "float8": "training.fp8",
    "powersgd": "parallel.compress",
    "comm_hook": "parallel.compress",
    "torch_dtype": "training.dtype",
    "mixed_precision": "training.dtype",
    "torch_compile": "training.compile",
    "gradient_checkpointing": "training.activation_checkpointing",
    "seq_len": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "context_length": "data.sequence_length",
    "block_size": "data.sequence_length",
    "blend": "data.train",
    "data_blend": "data.train",
    "data_path": "data.train",
    "mixture": "data.train",
    "mix": "data.train",
    "mixture_weights": "data.curriculum",
    "sources": "data.train",
    "stages": "data.curriculum",
    "sample_packing": "data.packing",
    "best_fit": "data.packing",
    "reset_position_ids": "data.document_attention",
    "reset_attention_mask": "data.document_attention",
    "intra_document_attention": "data.document_attention",
    "document_masking": "data.document_attention",
    "doc_mask": "data.document_attention",
    "seq_length_warmup": "data.length_warmup",
    "sequence_length_warmup": "data.length_warmup",
    "seqlen_warmup": "data.length_warmup",
    "num_workers": "data.workers",
    "dataloader_num_workers": "data.workers",
    "dataset": "data.train",
    "datasets": "data.train",
    "train_data": "data.train",
    "train_file": "data.train",
    "val": "data.validation",
    "eval": "validation",
    "valid": "data.validation",
    "val_data": "data.validation",
    "eval_steps": "validation.every",
    "eval_interval": "validation.every",
    "val_check_interval": "validation.every",
    "logging_steps": "log.every",
    "log_interval": "log.every",
    "logging": "log",
    "report_to": "log.trackers",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "checkpointing": "checkpoint",
    "output_dir": "run.directory",
    "out_dir": "run.directory",
    "save_dir": "run.directory",
    "run_name": "run.name",
    "seed": "run.seed",
    "random_seed": "run.seed",
    "tokenizer_path": "tokenizer",
    "tokenizer_name": "tokenizer",
    "model_name": "model.preset",
    "model_name_or_path": "model.from",
    "pretrained": "model.from",
    "init_from": "model.from",
    "resume_from": "model.from",
    "resume_from_checkpoint": "model.from",
    "n_layer": "model.num_hidden_layers",
    "n_layers": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers",
    "layers": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads",
    "num_heads": "model.num_attention_heads",
    "heads": "model.num_attention_heads",
    "n_kv_heads": "model.num_key_value_heads",
    "num_kv_heads": "model.num_key_value_heads",
    "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size",
    "dim": "model.hidden_size",
    "width": "model.hidden_size",
    "d_ff": "model.intermediate_size",
    "ffn_dim": "model.intermediate_size",
    "ffn_hidden_size": "model.intermediate_size",
    "n_positions": "model.max_position_embeddings",
    "n_ctx": "model.max_position_embeddings",
    "rope_base": "model.rope_theta",
    "activation": "model.hidden_act",
    "activation_function": "model.hidden_act",
    "dropout": "model.hidden_dropout",
    "resid_pdrop": "model.hidden_dropout",
    "attn_pdrop": "model.attention_dropout",
    "embd_pdrop": "model.embedding_dropout",
    "norm_eps": "model.rms_norm_eps",
    "layer_norm_epsilon": "model.rms_norm_eps",
    "layer_norm_eps": "model.rms_norm_eps",
    "tie_embeddings": "model.tie_word_embeddings",
    "weight_tying": "model.tie_word_embeddings",
    "base": "extends",
    "inherit": "extends",
    "defaults": "extends",
    "include": "extends",
    "mesh": "parallel",
    "parallelism": "parallel",
    "fsdp": "parallel.dp_shard",
    "dp": "parallel.dp_shard",
    "fsdp_config": "parallel",
    "deepspeed": "parallel",
    "device_mesh": "parallel",
    "data_parallel_size": "parallel.dp_shard",
    "data_parallel_shard_degree": "parallel.dp_shard",
    "fsdp_size": "parallel.dp_shard",
    "data_parallel_replicate_degree": "parallel.dp_replicate",
    "hsdp": "parallel.dp_replicate",
    "num_replicas": "parallel.dp_replicate",
    "tensor_parallel": "parallel.tp",
    "tensor_parallel_size": "parallel.tp",
    "tensor_parallel_degree": "parallel.tp",
    "tensor_model_parallel_size": "parallel.tp",
    "tp_size": "parallel.tp",
    "sequence_parallel": "parallel.tp",
    "loss_parallel": "parallel.tp",
    "enable_loss_parallel": "parallel.tp",
    "pipeline_parallel": "parallel.pp",
    "pipeline_parallel_size": "parallel.pp",
    "pipeline_parallel_degree": "parallel.pp",
    "pipeline_model_parallel_size": "parallel.pp",
    "pp_size": "parallel.pp",
    "context_parallel": "parallel.cp",
    "context_parallel_size": "parallel.cp",
    "context_parallel_degree": "parallel.cp",
    "sequence_parallel_size": "parallel.cp",
    "ulysses_sequence_parallel_size": "parallel.cp",
    "expert_parallel": "parallel.ep",
    "expert_parallel_size": "parallel.ep",
    "expert_parallel_degree": "parallel.ep",
    "expert_model_parallel_size": "parallel.ep",
    "ep_size": "parallel.ep",
    "zero": "parallel.zero_stage",
    "zero_optimization": "parallel.zero_stage",
    "sharding_strategy": "parallel.zero_stage",
    "fsdp_sharding_strategy": "parallel.zero_stage",
    "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
    "no_sync": "parallel.reduce_gradients",
    "overlap_grad_reduce": "parallel.reduce_gradients",
    "fsdp_wrap": "parallel.layers_per_unit",
    "fsdp_auto_wrap_policy": "parallel.layers_per_unit",
    "fsdp_transformer_layer_cls_to_wrap": "parallel.layers_per_unit",
    "block_names": "parallel.layers_per_unit",
    "fsdp_forward_prefetch": "parallel.prefetch",
    "backward_prefetch": "parallel.prefetch",
    "cpu_offload": "parallel.offload",
    "fsdp_offload_params": "parallel.offload",
    "offload_param": "parallel.offload",
    "offload_optimizer": "parallel.offload",
    "context_parallel_rotate_method": "parallel.context",
    "cp_comm_type": "parallel.context",
    "pipeline_parallel_schedule": "parallel.schedule",
    "pp_schedule": "parallel.schedule",
    "pp_schedule_name": "parallel.schedule",
    "virtual_pipeline_model_parallel_size": "parallel.stages_per_rank",
    "num_layers_per_virtual_pipeline_stage": "parallel.stages_per_rank",
    "pipeline_parallel_split_points": "parallel.stage_layers",
    "num_layers_per_stage": "parallel.stage_layers",
    "num_microbatches": "training.micro_batch_size",
    "pipeline_parallel_microbatch_size": "training.micro_batch_size",
    "prompts": "samples.prompts",
    "trackers": "log.trackers",
}
# What is not just another name.
NOTES = {
    "training.batch_tokens": "tokens per step over all ranks, sequences x sequence_length",
    "training.micro_batch_size": "sequences per forward and rank",
    "training.dtype": "bfloat16, float32 or auto",
    "training.initial_loss_scale": "what loss scaling begins with, as 65536",
    "training.activation_checkpointing": "none, full, selective, every-N or budget-F",
    "parallel.tp": "ranks; sequence and loss parallelism come with it",
    "parallel.zero_stage": "1, 2 or 3",
    "parallel.layers_per_unit": "layers are the units; how many of them together",
    "parallel.offload": "none, parameters or optimizer",
    "parallel.context": "auto, all_to_all, all_gather or ring",
    "parallel.reduce_gradients": "last or every",
    "parallel.stages_per_rank": "how many of the stages",
    "parallel.stage_layers": "a list, as [8, 8, 9, 7]",
    "data.train": "one store, or a list of {store: ..., weight: ...}",
    "data.packing": "concatenate or best_fit",
    "data.document_attention": "true or false",
    "data.length_warmup": "as {start: 128, steps: 1000}",
    "optimizer.betas": "a list, as [0.9, 0.95]",
    "schedule.final": "a share of lr",
    "schedule.warmup_fraction": "a share of the run",
    "log.trackers": "a list, as [tensorboard]",
    "model.from": "a run or checkpoint of Weft, or a Hugging Face folder",
    "extends": "a file, or a list of them",
}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that `word` is most likely a misspelling of, if any."""
    pairs = {name.lower().replace("-", "_"): name for name in known}
    word = word.lower().replace("-", "_")
    swapped = [name for name in pairs if sorted(name) == sorted(word)]  # a slip of the fingers
    found = swapped or difflib.get_close_matches(word, pairs, n=1, cutoff=cutoff)
    return pairs[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?`, or nothing."""
    found = nearest(word, known, cutoff)
    return f"; did you mean {found!r}?" if found else ""


def meant_key(section: str, key: str, known: Iterable[str], everywhere: Iterable[str]) -> tuple[str | None, str]:
    """What a key that does not exist was most likely meant to be.

    Args:
        section: the dotted name of where it stands; "" at the top.
        key: the key.
        known: the keys that may stand there.
        everywhere: all dotted keys of a run's file.

    Returns:
        One of `known` or `everywhere`, or None; and a note on how it differs, or nothing.
    """
    known, everywhere = list(known), set(everywhere)
    within = f"{section}." if section else ""
    target = ELSEWHERE.get(key.lower().replace("-", "_"), "")
    inside = target.removeprefix(within) if target.startswith(within) else ""
    note = f" ({NOTES[target]})" if target in NOTES else ""
    if inside in known:
        return inside, note
    near = nearest(key, known, cutoff=0.75)
    if near is None and target in everywhere:
        return target, note
    if near is None:
        at_home = sorted(name for name in everywhere if name.rpartition(".")[2] == key and name != within + key)
        near = at_home[0] if at_home else nearest(key, known, cutoff=0.5)
    return near, ""


def unknown_key(meant: str | None, note: str, known: Iterable[str]) -> str:
    """What to say about a key that does not exist, given `meant_key`'s answer."""
    if meant is not None:
        return f"unknown key; did you mean {meant!r}?{note}"
    known = sorted(known)
    listed = ", ".join(known[:24]) + (", ..." if len(known) > 24 else "")
    return f"unknown key; remove it (known here: {listed})" if known else "unknown key; remove it"
