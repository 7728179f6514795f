"""Whether the stream of each stack may be cut by sequence: tried on a small copy, one half of the tokens at a time.

Groups are given whole sequences, as they gather them, and what their rows gave is cut; whatever lies between must say of a half what
it said of the whole. A position that is counted from the start of what is there, a mean over tokens, or an attention that is in no
group says something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from phalanx.anatomy.proof import Different, Proved, are_close, removing
from phalanx.anatomy.specimen import Specimen, is_linear, stacks_of

Key = int | str


def sequence_fault(specimen: Specimen, seams: list[Proved]) -> str | None:
    """The module that needs other tokens than those of its part, and why; None where none was seen to."""
    stacks = {stack: [block for _, block in blocks] for stack, blocks in stacks_of(specimen.model) if stack}
    inside = [item for item in seams if item.group.rows[0].startswith(tuple(f"{stack}." for stack in stacks))]
    if any(item.group.kind == "heads" and (item.entry is None or item.entry.stream is None) for item in inside):
        return None  # refused by name where it is split
    try:
        whole = _Pass(specimen, stacks, inside)
        if whole.shortest < 2:
            return None
        for half in (0, 1):
            _Pass(specimen, stacks, inside, whole, half)
    except Different as difference:
        return str(difference)
    except Exception as error:  # whatever a model raises about shapes that do not fit
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


class _Pass:
    """One forward: without `whole` it remembers what it saw, else its streams have one `half` of the tokens, and it compares."""

    def __init__(
        self,
        specimen: Specimen,
        stacks: dict[str, list[nn.Module]],
        seams: list[Proved],
        whole: _Pass | None = None,
        half: int = 0,
    ):
        self.whole, self.half = whole, half
        self.seen: dict[str, list[torch.Tensor]] = {}
        self.met: dict[str, int] = {}
        self.rows, self.length, self.shortest = 0, 0, 2
        model = specimen.model
        hooks: list[Any] = []
        for stack, blocks in stacks.items():
            hooks.append(blocks[0].register_forward_pre_hook(self._begin, with_kwargs=True))
            hooks.append(blocks[-1].register_forward_hook(self._end(stack)))
        for item in seams:
            entry = item.entry if item.group.kind == "heads" else None
            columns = [name for name in item.group.columns if is_linear(model.get_submodule(name))]
            for name in [entry.module] if entry is not None else columns:
                key = None if entry is None else entry.stream
                hooks.append(model.get_submodule(name).register_forward_pre_hook(self._enter(name, key), with_kwargs=True, prepend=True))
            hooks += [model.get_submodule(name).register_forward_hook(self._leave(name)) for name in item.group.rows]
        self.open = set(stacks)
        with removing(hooks), torch.no_grad():
            self._run(specimen)

    def _run(self, specimen: Specimen) -> None:
        try:
            specimen.run()
        except Different:
            raise
        except Exception:
            if self.whole is None or self.open:  # losses behind the stacks, as one over all routers, have seams of their own
                raise

    def _begin(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        arguments: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
        key = next(iter(arguments))
        self.rows, self.length = arguments[key].shape[:2]
        self.shortest = min(self.shortest, self.length)
        if self.whole is not None:
            arguments[key] = self._cut(arguments[key])
        return _as_given(arguments, args, kwargs)

    def _enter(self, name: str, key: Key | None) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            arguments: dict[Key, Any] = {**dict(enumerate(args)), **kwargs}
            place = next(iter(arguments)) if key is None else key
            arguments[place] = self._meet(f"the input of {name}", arguments[place])
            return _as_given(arguments, args, kwargs)

        return hook

    def _leave(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            if self.whole is None:
                return self._meet(name, output)
            return self._cut(self._of_whole(name))

        return hook

    def _end(self, stack: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> Any:
            several = isinstance(output, (tuple, list))
            first = self._meet(f"the end of {stack}", output[0] if several else output)
            self.open.discard(stack)
            return type(output)((first, *output[1:])) if several else first

        return hook

    def _meet(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Compares a part with that of the whole, and gives out the whole."""
        if self.whole is None:
            self.seen.setdefault(name, []).append(tensor.clone())
            return tensor
        full = self._of_whole(name)
        expected = self._cut(full)
        if tensor.shape != expected.shape or not are_close(tensor, expected):
            raise Different(f"{name} has other numbers where a part of the sequence is there")
        return full.clone()

    def _of_whole(self, name: str) -> torch.Tensor:
        assert self.whole is not None
        number = self.met.get(name, 0)
        self.met[name] = number + 1
        return self.whole.seen[name][number]

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        middle = self.length // 2
        start, stop = (0, middle) if self.half == 0 else (middle, self.length)
        if tensor.dim() == 2 and tensor.shape[0] == self.rows * self.length:
            return tensor.view(self.rows, self.length, -1)[:, start:stop].flatten(0, 1)
        return tensor[:, start:stop].clone()


def _as_given(arguments: dict[Key, Any], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return tuple(arguments[place] for place in range(len(args))), {key: arguments[key] for key in kwargs}
