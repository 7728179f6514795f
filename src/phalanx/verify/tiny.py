"""Tiny `transformers` models by type: odd sizes, small initial weights, norm weights and biases that are not their defaults."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.errors import ConfigError

# Offered to every config; each takes those that it knows (under its own spelling: config classes map common names).
SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": 5,
    "image_size": 8,
    "patch_size": 4,
    "head_dim": 4,
}

# Attention with latent keys and values, experts beside shared ones, one dense layer before.
LATENT: dict[str, Any] = {
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}

# What a type needs beyond that. Sections name the nested config they go to.
BY_TYPE: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "gpt2": {"num_hidden_layers": 4},
    "gpt-neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 4},
    "gemma3-text": {"sliding_window": 4, "query_pre_attn_scalar": 4},
    "mistral": {"sliding_window": 4},
    "phi": {"partial_rotary_factor": 0.5},
    "gpt-neox": {"rotary_pct": 0.5},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 3, "intermediate_size": 12},
    "gpt-oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 12, "sliding_window": 4},
    "deepseek-v2": {**LATENT, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek-v3": {**LATENT, "n_group": 3, "topk_group": 2},
    "t5": {"d_kv": 4, "d_ff": 48, "num_decoder_layers": 2, "decoder_start_token_id": 0},
    "bart": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
    "whisper": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "num_mel_bins": 5,
        "max_source_positions": 7,
        "max_target_positions": 16,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}

TYPES = (
    *("llama", "gpt2", "bert", "vit", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3-text", "opt", "bloom", "phi", "phi3"),
    *("gpt-neox", "gpt-neo", "olmo2", "stablelm", "starcoder2", "granite", "cohere", "falcon"),
    *("mixtral", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v2", "deepseek-v3"),
    *("roberta", "distilbert", "electra", "albert", "deit", "t5", "bart", "whisper"),
)
NAMES = tuple(f"tiny-{name}" for name in TYPES)


def build_tiny(name: str) -> tuple[nn.Module, str]:
    """A tiny model by its name, `tiny-` and a `transformers` model type with dashes, and the kind of batch it takes.

    Raises: ConfigError for a type that `transformers` does not have.
    """
    from transformers import CONFIG_MAPPING

    dashed = name.removeprefix("tiny-")
    kind_of = {str(key).replace("_", "-"): key for key in CONFIG_MAPPING}
    if not name.startswith("tiny-") or dashed not in kind_of:
        raise ConfigError(
            f"there is no built-in model '{name}'",
            allowed="tiny- and a transformers model type with dashes, a directory with a config.json, or module.py:function",
            remedy="tiny-llama",
        )
    config_class = CONFIG_MAPPING[kind_of[dashed]]
    return build_from_config(make_config(config_class, BY_TYPE.get(dashed, {})))


def make_config(config_class: type, overrides: dict[str, Any]) -> Any:
    """A tiny config: the common sizes that the class knows, every dropout 0, and the overrides."""
    known = set(inspect.signature(config_class.__init__).parameters)
    renamed = getattr(config_class, "attribute_map", {})
    values = {name: value for name, value in SIZES.items() if name in known or name in renamed or name == "num_labels"}
    values |= {name: 0.0 for name in known if "drop" in name and _default_is_number(config_class, name)}
    return config_class(**{**values, **overrides})


def _default_is_number(config_class: type, name: str) -> bool:
    default = inspect.signature(config_class.__init__).parameters[name].default
    return isinstance(default, int | float) and not isinstance(default, bool)


def build_from_directory(path: Path) -> tuple[nn.Module, str]:
    """The model that a directory's config.json describes, with random weights, and the kind of batch it takes."""
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json", allowed="a directory as save_pretrained() writes it", remedy="tiny-llama")
    try:
        config = AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{path}/config.json describes no model: {reason.rstrip('.')}", allowed="a config.json as save_pretrained() writes it"
        ) from error
    return build_from_config(config)


def build_from_config(config: Any) -> tuple[nn.Module, str]:
    """The model class that a config is trained with, with weights that hide no fault, and its kind of batch."""
    import transformers

    class_name, kind = _class_and_kind(config)
    if not hasattr(transformers, class_name):
        raise ConfigError(f"transformers has no class {class_name}, which the config names", remedy="module.py:function that builds it")
    model = getattr(transformers, class_name)(config)
    randomize_vectors(model)
    return model, kind


def _class_and_kind(config: Any) -> tuple[str, str]:
    """The class named by the config, else the first task of a fixed order that has a class for its type."""
    named = (getattr(config, "architectures", None) or [None])[0]
    if named is not None:
        return named, kind_of_class(named, config)
    from transformers.models.auto import modeling_auto

    tables = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"] if getattr(config, "is_encoder_decoder", False) else []
    for table in [*tables, "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"]:
        class_name = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(config.model_type)
        if class_name is not None:
            class_name = class_name if isinstance(class_name, str) else class_name[0]
            return class_name, kind_of_class(class_name, config)
    raise ConfigError(
        f"there is no batch to train a '{config.model_type}' on",
        allowed="language models (causal, masked, encoder-decoder), image, text and speech models",
        remedy="module.py:function that returns (model, batch)",
    )


def kind_of_class(class_name: str, config: Any) -> str:
    """The kind of batch that a model class takes, by what its name says."""
    if getattr(config, "is_encoder_decoder", False):
        return "speech" if hasattr(config, "num_mel_bins") else "seq2seq"
    for ending, kind in (("ImageClassification", "image"), ("SequenceClassification", "classes"), ("MaskedLM", "masked")):
        if class_name.endswith(ending):
            return kind
    return "causal"


@torch.no_grad()
def randomize_vectors(model: nn.Module) -> None:
    """Moves every parameter of at most one dimension off its initial value: norms of 1 and biases of 0 hide wrong reductions."""
    for parameter in model.parameters():
        if parameter.dim() <= 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
