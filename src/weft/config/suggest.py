"""Suggests known names for unknown names, by similar spelling and by the names of other frameworks."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Keys of Weft -> their names in other frameworks.
_OTHER_NAMES = {
    "optimizer.lr": "learning_rate lr max_lr",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "optimizer": "optim",
    "schedule": "lr_scheduler lr_schedule scheduler",
    "schedule.type": "lr_scheduler_type",
    "schedule.warmup_steps": "warmup warmup_steps num_warmup_steps warmup_iters lr_warmup_steps",
    "schedule.warmup_fraction": "warmup_ratio",
    "schedule.final": "min_lr min_lr_ratio",
    "training.steps": "steps max_steps num_steps total_steps train_steps train_iters max_iters",
    "training.epochs": "epochs num_epochs max_epochs num_train_epochs",
    "training.tokens": "tokens max_tokens train_tokens",
    "training.batch_tokens": (
        "batch_size global_batch_size train_batch_size total_batch_size gradient_accumulation_steps grad_accum"
    ),
    "training.micro_batch_size": (
        "micro_batch microbatch_size device_batch_size per_device_train_batch_size num_microbatches "
        "pipeline_parallel_microbatch_size"
    ),
    "validation.micro_batch_size": "per_device_eval_batch_size",
    "training.grad_clip": "max_grad_norm gradient_clip gradient_clip_val clip_grad clip_grad_norm",
    "training.dtype": "precision bf16 fp16 amp torch_dtype mixed_precision",
    "training.initial_loss_scale": "loss_scale initial_scale_power init_scale",
    "training.loss_scale_window": "growth_interval",
    "training.reduce_dtype": "communication_data_type grad_reduce_dtype",
    "training.fp8": "float8",
    "parallel.compress": "powersgd comm_hook",
    "training.compile": "torch_compile",
    "training.activation_checkpointing": "gradient_checkpointing",
    "data.sequence_length": "seq_len seq_length max_seq_len max_seq_length context_length block_size",
    "data.train": "blend data_blend data_path mixture mix sources dataset datasets train_data train_file",
    "data.curriculum": "mixture_weights stages",
    "data.packing": "sample_packing best_fit",
    "data.document_attention": (
        "reset_position_ids reset_attention_mask intra_document_attention document_masking doc_mask"
    ),
    "data.length_warmup": "seq_length_warmup sequence_length_warmup seqlen_warmup",
    "data.workers": "num_workers dataloader_num_workers",
    "data.validation": "val valid val_data",
    "validation": "eval",
    "validation.every": "eval_steps eval_interval val_check_interval",
    "log.every": "logging_steps log_interval",
    "log": "logging",
    "log.trackers": "report_to trackers",
    "checkpoint.every": "save_steps save_interval save_every",
    "checkpoint.keep_last": "save_total_limit",
    "checkpoint": "checkpointing",
    "run.directory": "output_dir out_dir save_dir",
    "run.name": "run_name",
    "run.seed": "seed random_seed",
    "tokenizer": "tokenizer_path tokenizer_name",
    "model.preset": "model_name",
    "model.from": "model_name_or_path pretrained init_from resume_from resume_from_checkpoint",
    "model.num_hidden_layers": "n_layer n_layers num_layers layers",
    "model.num_attention_heads": "n_head n_heads num_heads heads",
    "model.num_key_value_heads": "n_kv_heads num_kv_heads",
    "model.hidden_size": "n_embd d_model dim width",
    "model.intermediate_size": "d_ff d_inner ffn_dim ffn_hidden_size ffn_size mlp_size n_inner",
    "model.max_position_embeddings": "n_positions n_ctx",
    "model.rope_theta": "rope_base",
    "model.hidden_act": "activation activation_function",
    "model.hidden_dropout": "dropout resid_pdrop",
    "model.attention_dropout": "attn_pdrop",
    "model.embedding_dropout": "embd_pdrop",
    "model.rms_norm_eps": "norm_eps layer_norm_epsilon layer_norm_eps",
    "model.tie_word_embeddings": "tie_embeddings weight_tying",
    "extends": "base inherit defaults include",
    "parallel": "mesh parallelism fsdp_config deepspeed device_mesh",
    "parallel.dp_shard": "fsdp dp data_parallel_size data_parallel_shard_degree fsdp_size",
    "parallel.dp_replicate": "data_parallel_replicate_degree hsdp num_replicas",
    "parallel.tp": (
        "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size "
        "sequence_parallel loss_parallel enable_loss_parallel"
    ),
    "parallel.pp": (
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size"
    ),
    "parallel.cp": (
        "context_parallel context_parallel_size context_parallel_degree sequence_parallel_size "
        "ulysses_sequence_parallel_size"
    ),
    "parallel.ep": "expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "parallel.zero_stage": "zero zero_optimization sharding_strategy fsdp_sharding_strategy",
    "parallel.reshard_after_forward": "fsdp_reshard_after_forward",
    "parallel.reduce_gradients": "no_sync overlap_grad_reduce",
    "parallel.layers_per_fsdp_unit": "fsdp_wrap fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap block_names",
    "parallel.prefetch": "fsdp_forward_prefetch backward_prefetch",
    "parallel.offload": "cpu_offload fsdp_offload_params offload_param offload_optimizer",
    "parallel.cp_method": "context_parallel_rotate_method cp_comm_type",
    "parallel.pp_schedule": "pipeline_parallel_schedule pp_schedule_name",
    "parallel.stages_per_rank": "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage",
    "parallel.stage_layers": "pipeline_parallel_split_points num_layers_per_stage",
    "samples.prompts": "prompts",
    "adapter.r": "rank lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "target_modules lora_target",
}
ELSEWHERE = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}
# Keys of earlier versions -> their current names.
RENAMED = {
    "parallel.schedule": "parallel.pp_schedule",
    "parallel.context": "parallel.cp_method",
    "parallel.layers_per_unit": "parallel.layers_per_fsdp_unit",
}
# Keys whose values differ from those of other frameworks.
NOTES = {
    "training.batch_tokens": "tokens per step over all ranks: sequences x sequence_length",
    "training.micro_batch_size": "sequences per forward pass and rank",
    "training.dtype": "bfloat16, float32 or auto",
    "training.initial_loss_scale": "the initial loss scale, such as 65536",
    "training.activation_checkpointing": "none, full, selective, every-N or budget-F",
    "parallel.tp": "number of ranks; includes sequence and loss parallelism",
    "parallel.zero_stage": "1, 2 or 3",
    "parallel.layers_per_fsdp_unit": "number of layers per FSDP unit",
    "parallel.offload": "none, parameters or optimizer",
    "parallel.cp_method": "auto, all_to_all, all_gather or ring",
    "parallel.reduce_gradients": "last or every",
    "parallel.stages_per_rank": "number of stages",
    "parallel.stage_layers": "a list, such as [8, 8, 9, 7]",
    "data.train": "one store, or a list of {store: ..., weight: ...}",
    "data.packing": "concatenate, best_fit or pad",
    "data.document_attention": "true or false",
    "data.length_warmup": "such as {start: 128, steps: 1000}",
    "optimizer.betas": "a list, such as [0.9, 0.95]",
    "schedule.final": "a fraction of lr",
    "schedule.warmup_fraction": "a fraction of the run",
    "log.trackers": "a list, such as [tensorboard]",
    "model.from": "a run, a checkpoint, or a Hugging Face folder",
    "extends": "a file, or a list of files",
}


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the known word that `word` most likely misspells; None if no known word is similar.

    Args:
        cutoff: minimum similarity, from 0 to 1.
    """
    pairs = {name.lower().replace("-", "_"): name for name in known}
    word = word.lower().replace("-", "_")
    swapped = [name for name in pairs if sorted(name) == sorted(word)]  # transposed letters
    found = swapped or difflib.get_close_matches(word, pairs, n=1, cutoff=cutoff)
    return pairs[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns `; did you mean 'x'?`, or an empty string if no known word is similar.

    Args:
        cutoff: minimum similarity, from 0 to 1.
    """
    found = nearest(word, known, cutoff)
    return f"; did you mean {found!r}?" if found else ""


def meant_key(section: str, key: str, known: Iterable[str], everywhere: Iterable[str]) -> tuple[str | None, str]:
    """Returns the key that the user most likely meant by an unknown key.

    Args:
        section: dotted key of the section; "" at the top level.
        key: the unknown key.
        known: the keys of the section.
        everywhere: all dotted keys of a run's file.

    Returns:
        One of `known` or `everywhere`, or None if no key is similar; and a note on how to write the value of the
        returned key, or "".
    """
    known, everywhere = list(known), set(everywhere)
    name, colon, value = key.partition(":")
    if colon and name in known:
        return name, f" (with a space after the colon: {name}: {value})"
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
        elsewhere = sorted(name for name in everywhere if name.rpartition(".")[2] == key and name != within + key)
        near = elsewhere[0] if elsewhere else nearest(key, known, cutoff=0.5)
    return near, ""


def unknown_key(meant: str | None, note: str, known: Iterable[str]) -> str:
    """Returns the message for an unknown key.

    Args:
        meant, note: the result of `meant_key`.
        known: the keys of the section.
    """
    if meant is not None:
        return f"unknown key; did you mean {meant!r}?{note}"
    known = sorted(known)
    listed = ", ".join(known[:24]) + (", ..." if len(known) > 24 else "")
    return f"unknown key; remove it (known here: {listed})" if known else "unknown key; remove it"
