"""The names and shapes under which `transformers` keeps a model's weights in files, where these differ from those in memory.

A mixture, for example, has its experts stacked in one parameter, and one by one in its files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.anatomy.loss_source import is_pretrained
from phalanx.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """A tensor in a file, and the pattern by which it was found to be a part of a parameter; None where it is the parameter itself."""

    file_name: str
    pattern: str | None


class FileNames:
    """Translates one parameter at a time; models that are not of `transformers` have the same names in files and in memory."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.own = {name for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]}
        self._renamings: list = []
        self._converters: list = []
        if is_pretrained(model):
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming

            transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
            self._renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
            self._converters = [item for item in transforms if isinstance(item, WeightConverter)]

    def to_files(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a file has for one parameter or buffer."""
        if not is_pretrained(self.model):
            return {name: tensor}
        from transformers.core_model_loading import revert_weight_conversion

        found = revert_weight_conversion(self.model, {name: tensor})  # type: ignore[arg-type]
        return {key: value.contiguous() for key, value in found.items()}

    def sources(self, file_names: Iterable[str]) -> dict[str, list[Source]]:
        """For each name in memory, the tensors of the files that make it up, in their order."""
        if not is_pretrained(self.model):
            return {name: [Source(name, None)] for name in file_names}
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        found: dict[str, list[Source]] = {}
        for file_name in sorted(file_names, key=dot_natural_key):
            name, pattern = file_name, None
            if file_name not in self.own:
                name, pattern = rename_source_key(file_name, self._renamings, self._converters)
            found.setdefault(name, []).append(Source(file_name, pattern))
        return found

    def join(self, name: str, sources: Sequence[Source], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The parameter that the tensors of its sources make up.

        Raises: CheckpointError where they do not.
        """
        if len(sources) == 1 and sources[0].pattern is None:
            return tensors[0]
        converter = next((item for item in self._converters if sources[0].pattern in item.source_patterns), None)
        if converter is None:
            raise CheckpointError(f"{name} comes {len(sources)} times", allowed="files that hold each weight once")
        converter = deepcopy(converter)
        for source, tensor in zip(sources, tensors, strict=True):
            converter.add_tensor(name, source.file_name, source.pattern, tensor)
        value = converter.convert(name, model=self.model, config=self.model.config).get(name)
        if value is None:
            raise CheckpointError(f"{sources[0].file_name} and {len(sources) - 1} more do not make up {name}")
        return value[0] if isinstance(value, list) else value
