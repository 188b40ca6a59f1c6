"""What a key that does not exist was meant to be.

Looks, in this order: the same key (or a common name for it) anywhere in the schema, then the most similar key of the
section it stands in, then the most similar key anywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import lru_cache

from moegraph.specs.fields import walk

# Names from other programs' configuration files, and the spec path that says the same.
SYNONYMS = {
    "learning_rate": "train.optimizer.lr",
    "max_lr": "train.optimizer.lr",
    "adam_eps": "train.optimizer.eps",
    "adam_betas": "train.optimizer.betas",
    "wd": "train.optimizer.weight_decay",
    "num_epochs": "train.steps",
    "epochs": "train.steps",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "iterations": "train.steps",
    "batch_size": "train.tokens_per_step",
    "global_batch_size": "train.tokens_per_step",
    "train_batch_size": "train.tokens_per_step",
    "gradient_accumulation_steps": "layout.microbatches",
    "accumulation": "layout.microbatches",
    "num_microbatches": "layout.microbatches",
    "grad_clip": "train.clip_norm",
    "gradient_clipping": "train.clip_norm",
    "max_grad_norm": "train.clip_norm",
    "warmup_steps": "train.schedule.warmup",
    "decay_steps": "train.schedule.decay",
    "min_lr": "train.schedule.final",
    "lr_schedule": "train.schedule",
    "lr_scheduler": "train.schedule",
    "random_seed": "train.seed",
    "save_dir": "train.output_dir",
    "output": "train.output_dir",
    "logging_steps": "train.log_every",
    "eval_every": "train.validation.every",
    "eval_steps": "train.validation.every",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "keep_latest_k": "checkpoint.keep_last",
    "resume_from_checkpoint": "checkpoint.resume",
    "load_checkpoint": "checkpoint.resume",
    "dataset": "data.source",
    "data_path": "data.source",
    "sequence_length": "data.seq_len",
    "seq_length": "data.seq_len",
    "block_size": "data.seq_len",
    "context_length": "model.max_seq_len",
    "max_position_embeddings": "model.max_seq_len",
    "hidden_size": "model.d_model",
    "dim": "model.d_model",
    "n_embd": "model.d_model",
    "embedding_dim": "model.d_model",
    "num_hidden_layers": "model.num_layers",
    "n_layers": "model.num_layers",
    "n_layer": "model.num_layers",
    "vocab": "model.vocab_size",
    "rms_norm_eps": "model.norm.eps",
    "layer_norm_eps": "model.norm.eps",
    "tie_word_embeddings": "model.tie_embeddings",
    "initializer_range": "model.init.std",
    "num_attention_heads": "model.attention.num_heads",
    "n_heads": "model.attention.num_heads",
    "heads": "model.attention.num_heads",
    "num_key_value_heads": "model.attention.num_kv_heads",
    "n_kv_heads": "model.attention.num_kv_heads",
    "kv_heads": "model.attention.num_kv_heads",
    "use_qk_norm": "model.attention.qk_norm",
    "attention_bias": "model.attention.qkv_bias",
    "sliding_window": "model.attention.window.size",
    "rope_theta": "model.attention.rope.theta",
    "rope_scaling": "model.attention.rope.scaling",
    "partial_rotary_factor": "model.attention.rope.fraction",
    "intermediate_size": "model.dense.d_ff",
    "ffn_dim": "model.dense.d_ff",
    "first_k_dense_replace": "model.dense.layers",
    "mlp_only_layers": "model.dense.layers",
    "moe_intermediate_size": "model.moe.d_ff",
    "n_experts": "model.moe.num_experts",
    "num_local_experts": "model.moe.num_experts",
    "n_routed_experts": "model.moe.num_experts",
    "num_experts_per_tok": "model.moe.top_k",
    "topk": "model.moe.top_k",
    "k": "model.moe.top_k",
    "n_shared_experts": "model.moe.shared.num_experts",
    "shared_experts": "model.moe.shared",
    "router_aux_loss_coef": "model.moe.balance.coef",
    "aux_loss_coef": "model.moe.balance.coef",
    "router_z_loss_coef": "model.moe.balance.z_coef",
    "norm_topk_prob": "model.moe.router.norm.kind",
    "routed_scaling_factor": "model.moe.router.scale",
    "n_group": "model.moe.router.groups.n",
    "topk_group": "model.moe.router.groups.keep",
    "dtype": "precision.compute",
    "torch_dtype": "precision.compute",
    "data_parallel_size": "layout.dp",
    "expert_parallel_size": "layout.ep",
    "pipeline_parallel_size": "layout.pp",
    "grad_checkpointing": "passes.recompute",
    "activation_checkpointing": "passes.recompute",
    "gradient_checkpointing": "passes.recompute",
}


def nearest_key(key: str, section_keys: Iterable[str], section_path: str) -> str | None:
    """The spec path that `key`, found in the section at `section_path`, was probably meant to be.

    Returns a bare key when it belongs to the same section, a whole path otherwise, None if nothing is near.
    """
    word = _fold(key)
    here = {_fold(each): each for each in section_keys}
    if word in here:
        return here[word]
    if close := difflib.get_close_matches(word, here, n=1, cutoff=0.75):
        return here[close[0]]
    index = _index()
    paths = index.get(word) or ([SYNONYMS[word]] if word in SYNONYMS else [])
    if paths:
        return _local(_closest(paths, section_path), section_path)
    if close := difflib.get_close_matches(word, here, n=1, cutoff=0.6):
        return here[close[0]]
    if close := difflib.get_close_matches(word, [*index, *SYNONYMS], n=1, cutoff=0.8):
        paths = index.get(close[0]) or [SYNONYMS[close[0]]]
        return _local(_closest(paths, section_path), section_path)
    return None


def nearest_word(word: str, words: Iterable[str]) -> str | None:
    """The most similar of `words`, if any is near."""
    folded = {_fold(each): each for each in words}
    # In short words, one letter more or less is a slip and another letter is another word: fp16 is not fp64.
    close = difflib.get_close_matches(_fold(word), folded, n=1, cutoff=0.6 if len(word) > 5 else 0.8)
    return folded[close[0]] if close else None


def _fold(key: str) -> str:
    return key[:64].lower().replace("-", "_")


@lru_cache(maxsize=1)
def _index() -> dict[str, list[str]]:
    index: dict[str, list[str]] = {}
    for path, _, key, _ in walk():
        if path not in index.setdefault(_fold(key), []):
            index[_fold(key)].append(path)
    return index


def _closest(paths: list[str], section_path: str) -> str:
    """Of several places for a key, the one that shares most with where it was written, and then the shallowest."""

    def distance(path: str) -> tuple[int, int]:
        shared = 0
        for left, right in zip(path.split("."), section_path.split("."), strict=False):
            if left != right:
                break
            shared += 1
        return -shared, path.count(".")

    return min(paths, key=distance)


def _local(path: str, section_path: str) -> str:
    section, _, key = path.rpartition(".")
    return key if section == section_path else path
