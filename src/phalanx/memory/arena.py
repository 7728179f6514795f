"""A strict budget of bytes, and the compute tier that allocates from one.

On a machine without an accelerator the compute tier is memory of the process like any other; what makes it a tier is that every
byte of state in it is taken from the budget, and that what does not fit raises instead of growing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.errors import CapacityError


@dataclass
class Budget:
    """How many bytes may be held at once. `reserved` is what others hold beside: activations, temporaries.

    Units: bytes. Raises: CapacityError from whatever would exceed `capacity`, before it happens.
    """

    name: str
    capacity: int
    used: int = 0
    reserved: int = 0
    peak: int = 0

    @property
    def free(self) -> int:
        return self.capacity - self.used - self.reserved

    def take(self, num_bytes: int) -> None:
        self._require(self.used + num_bytes + self.reserved)
        self.used += num_bytes

    def give(self, num_bytes: int) -> None:
        self.used -= num_bytes

    def reserve(self, num_bytes: int) -> None:
        """Sets what is kept free for others from now on."""
        self._require(self.used + num_bytes)
        self.reserved = num_bytes

    def _require(self, needed: int) -> None:
        if needed > self.capacity:
            raise CapacityError(
                f"{needed} bytes are needed of the {self.name} tier, whose budget is {self.capacity}",
                allowed=f"at most {self.capacity} bytes at once",
                remedy=f"{self.name} = {needed}, or a lower tier with more room",
            )
        self.peak = max(self.peak, needed)


class Arena:
    """The compute tier: flat tensors whose memory comes from a budget and goes back to it.

    A tensor keeps its identity while its memory comes and goes, so views of it stay valid.
    """

    def __init__(self, budget: Budget, device: torch.device):
        self.budget, self.device = budget, device

    def hollow(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor without memory."""
        tensor = torch.empty(num_elements, dtype=dtype, device=self.device)
        tensor.untyped_storage().resize_(0)
        return tensor

    def new(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with memory, of any content."""
        self.budget.take(num_elements * dtype.itemsize)
        return torch.empty(num_elements, dtype=dtype, device=self.device)

    def fill(self, tensor: torch.Tensor) -> None:
        """Gives a tensor its memory; a no-op where it has it."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 and tensor.nbytes:
            self.budget.take(tensor.nbytes)
            storage.resize_(tensor.nbytes)

    def empty(self, tensor: torch.Tensor) -> None:
        """Takes a tensor's memory back; a no-op where it has none."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.budget.give(tensor.nbytes)
            storage.resize_(0)
