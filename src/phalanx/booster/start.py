"""The start of a model under a plan: the weights and buffers of the world's first rank, on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from phalanx import materialize
from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.errors import ConfigError
from phalanx.memory.engine import broadcast_from_first
from phalanx.memory.partition import clean_name, find_slots


class Names:
    """What the parameters of a person's model are called and made of, also of those that only other ranks hold.

    `of` gives names by identity, `aliases` the name of the parameter behind every name, `dtypes` its dtype by name.
    """

    def __init__(self, model: nn.Module):
        slots = find_slots(model)
        self.of = {slot.identity: slot.name for slot in slots}
        self.dtypes = {slot.name: slot.dtype for slot in slots}
        named = model.named_parameters(remove_duplicate=False)
        self.aliases = {clean_name(name): self.of[id(parameter)] for name, parameter in named}


class StartState:
    """Makes all ranks begin with the same values; taken before any pass cuts the model, so that all ranks see the same names.

    Cost: a broadcast of each tensor that has memory; one tensor at a time beside the model.
    Raises: ConfigError where ranks bring different models, or tensors without values.
    """

    def __init__(self, model: nn.Module, world: Axis, device: torch.device):
        self.model, self.world, self.device = model, world, device
        self.is_lazy = materialize.is_lazy(model)
        self.parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._require_same_model()
        self.names = Names(model)
        self.tensors = [*model.named_parameters(), *model.named_buffers()] if self.is_lazy else []
        if not self.is_lazy:
            self._require_values()
            self._share_parameters()
            self._place_buffers()

    @property
    def fill(self) -> Callable | None:
        """For a model without memory: hands (name, full value) of every parameter to its argument, and places buffers."""
        return self._fill if self.is_lazy else None

    def _require_same_model(self) -> None:
        """Tensors that differ in number or shape would meet in one collective, which then hangs or mixes them up."""
        mine = list(self._listing())
        digests = comm.gather_objects(zlib.crc32("\n".join(mine).encode()), self.world)
        if len(set(digests)) == 1:
            return
        listings = comm.gather_objects(mine, self.world)
        rank = next(rank for rank, listing in enumerate(listings) if listing != listings[0])
        ours, theirs = listings[0], listings[rank]
        at = next((at for at, (one, other) in enumerate(zip(ours, theirs)) if one != other), min(len(ours), len(theirs)))
        first, other = (listing[at] if at < len(listing) else "nothing more" for listing in (ours, theirs))
        raise ConfigError(
            f"ranks bring different models to boost: rank 0 has {first} where rank {rank} has {other}",
            allowed="the same model on every rank; its values may differ, and become those of rank 0",
            remedy="build the model alike on all ranks",
        )

    def _listing(self) -> Iterator[str]:
        for kind, named in (("parameter", self.model.named_parameters()), ("buffer", self.model.named_buffers())):
            for name, tensor in named:
                state = ("lazy" if self.is_lazy else "") + (" frozen" if kind == "parameter" and not tensor.requires_grad else "")
                yield f"{state} {kind} {clean_name(name)} {list(tensor.shape)} {tensor.dtype}".strip()

    def _require_values(self) -> None:
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if tensor.is_meta:
                raise ConfigError(
                    f"'{name}' is a meta tensor, which has no value to start from",
                    allowed="models with values, or built under px.lazy()",
                    remedy="with px.lazy(): in place of torch.device('meta')",
                )

    def _share_parameters(self) -> None:
        if self.world.size == 1:
            return
        for parameter in self.model.parameters():
            value = broadcast_from_first(parameter.detach().to(self.device), self.world)
            if parameter.is_contiguous():
                parameter.data.copy_(value)
            else:
                parameter.data = value.to(parameter.device)

    def _place_buffers(self) -> None:
        placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a buffer that modules share stays shared; the old one keeps its id
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if id(buffer) not in placed:
                        placed[id(buffer)] = buffer, broadcast_from_first(buffer.to(self.device), self.world)
                    module._buffers[name] = placed[id(buffer)][1]

    def _fill(self, receive: Callable[[str, torch.Tensor], None]) -> None:
        """Replays the construction of a lazy model: parameters go to `receive`, buffers to all places that share them."""
        places: dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]] = {}  # the old buffer is kept with its id
        for module in self.model.modules():
            for attribute, buffer in module._buffers.items():
                if buffer is not None:
                    places.setdefault(id(buffer), (buffer, []))[1].append((module, attribute))

        def place(name: str, value: torch.Tensor) -> None:
            value = broadcast_from_first(value.to(self.device), self.world)
            if name in self.parameters:
                receive(clean_name(name), value)
                return
            for module, attribute in places[id(self.model.get_buffer(name))][1]:
                module._buffers[attribute] = value

        materialize.replay(self.tensors, place)
