"""Builds what a recipe names: the stock `transformers` model and its optimizer."""

from __future__ import annotations

import difflib

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from phalanx.errors import ConfigError
from phalanx.materialize import lazy
from phalanx.train.recipe import ModelSettings, OptimizerSettings


def build_config(settings: ModelSettings, vocabulary: int, end_token: int) -> PretrainedConfig:
    """The config of the model, with the vocabulary of the tokenizer.

    Raises: ConfigError for a type without a language model, and for a field that the type's config does not have.
    """
    types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if settings.type not in types:
        nearest = difflib.get_close_matches(settings.type, types, n=1)
        raise ConfigError(f"model.type {settings.type!r} is no language model of transformers", remedy=nearest[0] if nearest else "llama")
    known = set(AutoConfig.for_model(settings.type).to_dict())
    for key in settings.config:
        if key not in known:
            nearest = difflib.get_close_matches(key, sorted(known), n=1)
            raise ConfigError(f"the config of {settings.type} has no field {key!r}", remedy=nearest[0] if nearest else None)
    own = {"vocab_size": vocabulary, "bos_token_id": end_token, "eos_token_id": end_token, "use_cache": False}
    return AutoConfig.for_model(settings.type, **(own | settings.config))


def build_model(config: PretrainedConfig, seed: int) -> nn.Module:
    """The model with fresh weights that depend on the seed alone; they take no memory before the booster cuts them up."""
    with torch.random.fork_rng(devices=[]), lazy():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config)


def build_hollow(config: PretrainedConfig) -> nn.Module:
    """The model for a look at what it computes, not at its values: each parameter is one zero, shown in the parameter's shape."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shown: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                zero = nn.Parameter(torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
                module._parameters[name] = shown.setdefault(parameter, zero)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return model


def build_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    """AdamW; vectors (norms, biases) are not decayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2))
