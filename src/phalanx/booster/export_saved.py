"""A directory of `transformers` out of the checkpoint of a run, in one process that never has the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.anatomy.file_names import FileNames
from phalanx.checkpoint.convert import require_sound
from phalanx.checkpoint.export import write_safetensors
from phalanx.checkpoint.files import Files
from phalanx.checkpoint.manifest import STATE, Manifest
from phalanx.checkpoint.stored import read_whole
from phalanx.errors import CheckpointError

CONFIGURATIONS = ("config", "generation_config")


def form_of(model: nn.Module, class_name: str, dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
    """What a checkpoint keeps of a model beside its tensors, so that it can be exported without the program that trained it."""
    form: dict[str, Any] = {"class": class_name, "dtypes": dtypes}
    for part in CONFIGURATIONS:
        configuration = getattr(model, part, None)
        if hasattr(configuration, "to_json_string"):
            form[part] = configuration.to_json_string(use_diff=False)
    return form


def save_configurations(model: nn.Module, class_name: str, path: Path) -> None:
    """The model's configurations, where it has some; the first names the class that reads the model back."""
    for part in CONFIGURATIONS:
        configuration = getattr(model, part, None)
        if hasattr(configuration, "save_pretrained"):
            if part == "config":
                configuration.architectures = [class_name]
            configuration.save_pretrained(path)


def export_saved(
    path: Path, target: Path, *, number: int = 0, progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None
) -> list[Path]:
    """Writes model `number` of the run that was saved at `path` as `booster.save_model` would have; returns the files of weights.

    Cost: reads the checkpoint, then its weights; memory of one file of weights and of one tensor.
    Raises: DamageError where the checkpoint is damaged; CheckpointError where it holds no such model, or one of a class unknown here.
    """
    source, saved = require_sound(path, progress)
    with Files(source, saved) as files:
        models = files.read_state(STATE).get("models") or []
        if number >= len(models):
            raise CheckpointError(f"{path} holds {len(models)} models", allowed="the number of one, counted from 0")
        form = models[number].get("form")
        if form is None:
            found = f"{path} does not say what its model is: an earlier Phalanx saved it"
            raise CheckpointError(found, remedy="booster.load and booster.save_model in the program that trains it")
        model = _hollow(form, path)
        written = write_safetensors(target, _weights(saved, files, form, FileNames(model), f"{number}/" if number else ""))
        save_configurations(model, form["class"], target)
    return written


def _hollow(form: dict[str, Any], path: Path) -> nn.Module:
    """The model without values, for its names; a module without any where the class is a person's own, whose names are those in files."""
    if "config" not in form:
        return nn.Module()
    import transformers

    kind = getattr(transformers, form["class"], None)
    if kind is None:
        found = f"the model in {path} is a {form['class']}, which transformers {transformers.__version__} does not have"
        raise CheckpointError(found, remedy="booster.load and booster.save_model in the program that trains it")
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(json.loads(form["config"])))
    if "generation_config" in form:
        model.generation_config = transformers.GenerationConfig.from_dict(json.loads(form["generation_config"]))
    return model


def _weights(saved: Manifest, files: Files, form: dict[str, Any], names: FileNames, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for kind in ("model", "buffer"):
        start = f"{prefix}{kind}/"
        for saved_name, tensor in saved.tensors.items():
            if saved_name.startswith(start):
                name = saved_name.removeprefix(start)
                value = read_whole(tensor, files)
                dtype = form["dtypes"].get(name, value.dtype) if kind == "model" else value.dtype
                yield from names.to_files(name, value.to(dtype)).items()
