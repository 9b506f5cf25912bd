"""Former names of settings, which are refused with the new name."""

RENAMED = {
    f"{section}.{old}": f"{section}.{new}"
    for section, names in {
        "data": {
            "outside": "out_of_scope_label",
            "split": "split_column",
            "split_by": "group_column",
            "valid_part": "validation_fold",
        },
        "augment": {"pivot": "back_translation_model"},
        "model": {"positions": "max_position_embeddings", "local_attention": "attention_window"},
        "optim": {
            "clip_norm": "max_grad_norm",
            "lr_rows": "lr_reference_batch_size",
            "layer_decay": "layerwise_lr_decay",
        },
        "train": {
            "rows_per_update": "global_batch_size",
            "micro_batch": "micro_batch_size",
            "tokens_per_pass": "max_tokens_per_micro_batch",
            "shard": "zero_stage",
            "tensor": "tensor_parallel_size",
            "pipeline": "pipeline_parallel_size",
            "context": "context_parallel_size",
            "sequence": "sequence_parallel",
            "schedule": "pipeline_schedule",
            "keep": "keep_checkpoints",
            "balance": "load_balancing",
        },
        "distill": {
            "relations": "relation_loss_weight",
            "hidden": "hidden_loss_weight",
            "copied": "augmented_rows_path",
            "copies": "augmented_copies",
            "unlabelled": "unlabeled_rows_path",
        },
        "compress": {
            "unlabelled": "unlabeled_rows_path",
            "vocabulary_pieces": "min_vocab_size",
            "vocabulary_most": "max_vocab_size",
        },
        "quantize": {"flips": "max_changed_predictions", "table": "embedding_dtype"},
        "gate": {
            "loss": "max_score_drop",
            "lost": "max_negative_flips",
            "slice_loss": "max_slice_drop",
            "student_loss": "student_max_score_drop",
            "student_slice_loss": "student_max_slice_drop",
            "student_lost": "student_max_negative_flips",
            "speedup": "min_speedup",
            "megabytes": "max_megabytes",
            "memory_mb": "max_memory_mb",
            "seconds": "latency_seconds",
        },
        "cluster": {"stall_s": "hang_timeout_s", "max_crashes": "max_failures"},
        "tune": {
            "held_back": "holdout_fraction",
            "first_rung": "min_resource_fraction",
            "full_runs": "budget_full_runs",
            "rows": "budget_rows",
            "final_rows": "final_budget_rows",
            "money": "max_cost",
            "minutes": "max_minutes",
            "price": "worker_cost_per_hour",
            "points": "points_to_evaluate",
            "concurrent": "max_concurrent_trials",
        },
        "serve": {
            "max_batch_rows": "max_batch_size",
            "max_batch_s": "max_batch_latency_s",
            "max_queue_rows": "max_queued_inputs",
            "max_queue_tokens": "max_queued_tokens",
            "deadline_s": "request_timeout_s",
            "shadow": "shadow_fraction",
            "shadow_rows": "shadow_min_rows",
            "shadow_agreement": "shadow_min_agreement",
            "shadow_slower": "shadow_max_latency_ratio",
            "shadow_s": "shadow_timeout_s",
        },
    }.items()
    for old, new in names.items()
}
"""Dotted name -> dotted name."""
