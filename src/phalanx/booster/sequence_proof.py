"""Whether a model may run on parts of its sequences: tried out on short rows before the first step, since a wrong answer is silent.

The model runs once on whole rows and once on parts of them. Every module's output is compared with that of the whole; the first
whose inputs agree and whose outputs do not mixes tokens on a way of its own. Then the losses are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode

from phalanx.booster.model_calls import evaluating
from phalanx.booster.sequences import Part, SplitSequences, row_length
from phalanx.cluster import comm
from phalanx.cluster.mesh import Axis
from phalanx.data import num_rows, take_rows
from phalanx.errors import PhalanxError, PlanError
from phalanx.memory.stream import tensors_in

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
MOST_ROWS = 2
# What a layer's scale begins with where it begins small.
LARGEST_SHUT = 0.1
# Tokens of a part in the trial: odd, so that few other dimensions of a model have this size.
PART_TOKENS = 11

Evaluate = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]


def prove(sequences: SplitSequences, batch: Any, evaluate: Evaluate, world: Axis) -> None:
    """Runs short rows of `batch` whole and in parts; `evaluate(batch)` gives their loss sum and count.

    Cost: forwards of at most `PART_TOKENS` tokens a rank and rows of `MOST_ROWS`, once.
    Raises: PlanError on every rank, naming the module that mixes tokens, or the loss that does not add up.
    """
    kind = sequences.kind(batch)
    if any(detect_fake_mode(tensor) is not None for tensor in tensors_in(batch)):
        sequences.position_sites = set()
        sequences.proven.add(kind)
        return
    batch = _longest(batch, world)
    short = _short(batch, sequences.grid.size)
    model, sequences.position_sites = sequences.model, None
    styles = sorted(sequences.label_styles(), key=lambda style: style != sequences.label_style)
    with torch.no_grad(), evaluating(model), _opened(model):
        with _recorded(model) as whole:
            expected = torch.stack([value.double() for value in evaluate(sequences.whole(short))])
        problem = unequal = None
        for style in styles:
            sequences.label_style = style
            with sequences.running(short) as local, _recorded(model) as parts, _refusing(sequences):
                found = torch.stack([value.double() for value in evaluate(local)])
            problem = _first(_mixing_module(whole, parts, sequences.part(short)), world)
            if problem is not None:
                break
            unequal = _first(_unequal_loss(expected, found, sequences), world)
            if unequal is None:
                break
        if unequal is None:
            problem = problem or _first(_told_problem(sequences, short, evaluate, world), world)
    sequences.position_sites = sequences.found_sites
    if problem is not None:
        raise _refusal(problem, sequences)
    if unequal is not None:
        raise _refusal_of_loss(unequal, sequences)
    sequences.proven |= {kind, sequences.kind(batch)}


def _longest(batch: Any, world: Axis) -> Any:
    """The batch whose rows are longest on any rank: all try out the same then, and agree on what is proven, whatever lengths follow."""
    lengths = comm.gather_objects(row_length(batch), world)
    if len(set(lengths)) == 1:
        return batch
    rows = take_rows(batch, 0, min(MOST_ROWS, num_rows(batch)), num_rows(batch))
    plain = _mapped(rows, lambda name, value: value.cpu() if isinstance(value, torch.Tensor) else value)
    return comm.broadcast_object(plain, world, lengths.index(max(lengths)))


def _refusal(problem: str, sequences: SplitSequences) -> PlanError:
    return PlanError(
        f"{problem}, and the plan cuts sequences over {sequences.grid.size} ranks",
        allowed="modules that treat each token by itself, and attention through transformers or scaled_dot_product_attention",
        remedy="a plan without cp",
    )


def _refusal_of_loss(unequal: str, sequences: SplitSequences) -> PlanError:
    """Of a model that is right on parts, and of whose numbers a loss is made that is not."""
    return PlanError(
        f"{unequal}, and the plan cuts sequences over {sequences.grid.size} ranks. Parts are filled up to one length, and a mean over "
        "every element counts what fills them",
        allowed="a mean over labels that are not -100, or a sum over tokens that an entry of the batch marks: it is 0 in what fills a part",
        remedy="a criterion that returns (loss_sum, count) of the tokens that count",
    )


@contextmanager
def _refusing(sequences: SplitSequences) -> Iterator[None]:
    """What a model raises on parts of rows that ran whole says that it cannot be cut."""
    try:
        yield
    except PhalanxError:
        raise
    except Exception as error:
        raise _refusal(f"the model raises {type(error).__name__} on parts of rows, but not on whole ones ({error})", sequences) from error


def _short(batch: Any, size: int) -> Any:
    """The first tokens of the first rows, none of them hidden and all with a label: so many that a part has to be filled up."""
    total, length = num_rows(batch), row_length(batch)
    rows, tokens = take_rows(batch, 0, min(MOST_ROWS, total), total), min(length, size * PART_TOKENS - 1)
    tokens -= tokens % size == 0

    def shorten(name: str, value: Any) -> Any:
        if name.endswith("attention_mask") and isinstance(value, Mapping):
            return {kind: shorten(name, mask) for kind, mask in value.items()}
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return value
        if name.endswith("attention_mask"):
            return torch.ones_like(value[:, :tokens]) if value.dim() == 2 else value[..., :tokens, :tokens].contiguous()
        if name == "labels" and not value.is_floating_point():  # then every label counts, and one that is lost is missed
            value = value.clamp(min=0)
        return value[:, :tokens].contiguous() if value.shape[1] == length else value  # as models get them, which may view them flat

    return _mapped(rows, shorten)


def _told_problem(sequences: SplitSequences, short: Any, evaluate: Evaluate, world: Axis) -> str | None:
    """What differs where masks hide the first two tokens and the last, and positions begin anew, under whatever names they come."""
    length = row_length(short)
    hidden = [0, 1, length - 1]
    told = _mapped(short, lambda name, value: _told(value, hidden) if name != "labels" and length >= 5 else value)
    is_same = all(before is after for before, after in zip(tensors_in(short), tensors_in(told), strict=True))
    if all(comm.gather_objects(is_same, world)):  # ranks with other rows may find nothing to change, but take part
        return None
    with _recorded(sequences.model) as whole:
        evaluate(sequences.whole(told))
    with sequences.running(told) as local, _recorded(sequences.model) as parts, _refusing(sequences):
        evaluate(local)
    return _mixing_module(whole, parts, sequences.part(told), hidden)


def _told(value: Any, hidden: list[int]) -> Any:
    """What may be a mask with some tokens hidden, what may be positions with a document more; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.is_floating_point():
        return value
    if bool(((value == 0) | (value == 1)).all()):
        return value.index_fill(1, torch.tensor(hidden, device=value.device), 0)
    numbers = torch.arange(value.shape[1], device=value.device, dtype=value.dtype)
    return numbers.remainder(value.shape[1] // 2).expand(value.shape) if bool((value == numbers).all()) else value


def _mapped(batch: Any, change: Callable[[str, Any], Any]) -> Any:
    """The batch with every entry changed; the last of a tuple is called "labels"."""
    if isinstance(batch, Mapping):
        return {name: change(str(name), value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(change("labels" if 0 < number == len(batch) - 1 else "", value) for number, value in enumerate(batch))
    return change("", batch)


@contextmanager
def _opened(model: nn.Module) -> Iterator[None]:
    """Gates that training opens later stand open, since what they shut off is seen by no trial.

    A parameter of one small value throughout has others while its own module runs: after a sharded one has come, before it goes.
    """
    opened: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def before(module: nn.Module, args: Any) -> None:
        shut = [parameter.data for parameter in module.parameters(recurse=False) if _is_shut(parameter.data)]
        opened.append([(values, values.clone()) for values in shut])
        for values in shut:
            values.copy_(torch.arange(values.numel(), device=values.device).cos().view(values.shape) / 2)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for values, kept in opened.pop():
            values.copy_(kept)

    handles = [module.register_forward_pre_hook(before) for module in model.modules()]
    handles += [module.register_forward_hook(after, prepend=True, always_call=True) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_shut(values: torch.Tensor) -> bool:
    if type(values) is not torch.Tensor or values.is_meta or not values.is_floating_point() or not values.numel():
        return False
    return bool((values == values.flatten()[0]).all() & (values.abs() < LARGEST_SHUT).all())


Record = tuple[str, list[torch.Tensor], list[torch.Tensor]]


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[Record]]:
    """Lists (module's name, inputs, outputs) of every call, in the order in which they end."""
    records: list[Record] = []
    handles = []
    for name, module in model.named_modules():

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            copies = [[tensor.detach().clone() for tensor in tensors_in(value)] for value in ((args, kwargs), output)]
            records.append((name or type(module).__name__, copies[0], copies[1]))

        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _mixing_module(whole: list[Record], parts: list[Record], part: Part, hidden: Sequence[int] = ()) -> str | None:
    """None where the model's output is that of whole rows; else the module that brings in what is not.

    Places in `hidden` are not looked at. Inside, only calls that both runs made are compared: experts see tokens in other numbers.
    """
    real = part.places[: part.num_real].tolist()
    look = _Look(part, torch.tensor([number for number, place in enumerate(real) if place not in hidden], dtype=torch.long))
    if look.agrees_at_the_end(whole, parts):
        return None
    calls, seen_at = _numbered(parts), None
    for key, (name, inputs, outputs) in _numbered(whole).items():
        if key not in calls or look.agree(outputs, calls[key][2]):
            continue
        seen_at = seen_at or name
        if any(look.has_tokens(*pair) for pair in zip(inputs, calls[key][1])) and look.agree(inputs, calls[key][1]):
            first = "" if seen_at == name else f" (first seen in the output of {seen_at})"
            return f"{name} mixes tokens or counts them on a way of its own{first}"
    return f"the output of {seen_at or 'the model'} is another where the sequence is cut"


def _numbered(records: list[Record]) -> dict[tuple[str, int], Record]:
    """Every call by its module's name and its number among the calls of that module."""
    calls: dict[str, int] = {}
    found = {}
    for record in records:
        calls[record[0]] = calls.get(record[0], -1) + 1
        found[record[0], calls[record[0]]] = record
    return found


class _Look:
    """Compares tensors of whole rows with those of a part: at this rank's places, by their numbers `keep`."""

    def __init__(self, part: Part, keep: torch.Tensor):
        self.keep, self.places = keep, part.places[keep]
        self.length, self.local = part.rows.cut.length, part.rows.cut.local_length + part.num_extra

    def agrees_at_the_end(self, whole: list[Record], parts: list[Record]) -> bool:
        """Whether the last outputs that have tokens agree, and what the model returns."""
        returned = [pair for pair in zip(whole[-1][2], parts[-1][2]) if pair[0].dim()]
        if not returned:
            calls = _numbered(parts)
            last = [zip(record[2], calls[key][2]) for key, record in _numbered(whole).items() if key in calls]
            with_tokens = [[pair for pair in pairs if self.has_tokens(*pair)] for pairs in last]
            returned = next((pairs for pairs in reversed(with_tokens) if pairs), [])
        return all(self.same(*pair) for pair in returned)

    def agree(self, whole: list[torch.Tensor], parts: list[torch.Tensor]) -> bool:
        return all(self.same(left, right) for left, right in zip(whole, parts))

    def has_tokens(self, whole: torch.Tensor, found: torch.Tensor) -> bool:
        return bool(self._token_dims(whole, found))

    def same(self, whole: torch.Tensor, found: torch.Tensor) -> bool:
        """Masks, and what has neither equal shapes nor one dimension of tokens, are not judged."""
        if whole.dtype == torch.bool or not whole.dim():
            return True
        dims = self._token_dims(whole, found)
        if whole.shape == found.shape and self._equal(whole, found):
            return True
        return any(self._equal_tokens(whole, found, dim) for dim in dims) if dims else whole.shape != found.shape

    def _equal_tokens(self, whole: torch.Tensor, found: torch.Tensor, dim: int) -> bool:
        """Whether the tokens of this rank agree; rows and tokens may lie in one dimension."""
        whole = whole.unflatten(dim, (-1, self.length)).index_select(dim + 1, self.places.to(whole.device))
        found = found.unflatten(dim, (-1, self.local)).index_select(dim + 1, self.keep.to(found.device))
        return self._equal(whole, found)

    @staticmethod
    def _equal(whole: torch.Tensor, found: torch.Tensor) -> bool:
        if not whole.numel():
            return True
        if not whole.is_floating_point():
            return torch.equal(whole, found)
        difference = float((whole.double() - found.double()).abs().nan_to_num(torch.inf).max())
        return difference <= TOLERANCE.get(whole.dtype, 1e-3) * max(float(whole.double().abs().max()), 1e-30)

    def _token_dims(self, whole: torch.Tensor, found: torch.Tensor) -> list[int]:
        """The one dimension in which a part of the rows is shorter than the whole; where it has their length, those that may be it."""
        if whole.dim() != found.dim():
            return []
        is_of_tokens = lambda dim: whole.shape[dim] * self.local == found.shape[dim] * self.length and not whole.shape[dim] % self.length  # noqa: E731
        if whole.shape == found.shape:
            return [dim for dim in range(whole.dim()) if is_of_tokens(dim)]
        dims = [dim for dim in range(whole.dim()) if whole.shape[dim] != found.shape[dim]]
        return dims if len(dims) == 1 and is_of_tokens(dims[0]) else []


def _unequal_loss(expected: torch.Tensor, found: torch.Tensor, sequences: SplitSequences) -> str | None:
    total = found.clone()
    for axis in (sequences.grid.ring, sequences.grid.ulysses):
        comm.all_reduce(total, axis).wait()
    (loss, count), (part_loss, part_count) = expected.tolist(), total.tolist()
    tolerance = max((TOLERANCE.get(parameter.dtype, 0.0) for parameter in sequences.model.parameters()), default=1e-3)
    if count == part_count and abs(loss - part_loss) <= tolerance * max(abs(loss), 1e-30):
        return None
    if loss != loss and part_loss != part_loss:
        return None
    return f"the loss of whole rows is {loss:.6g} over {count:g} items, and of their parts {part_loss:.6g} over {part_count:g}"


def _first(problem: str | None, world: Axis) -> str | None:
    """The first rank's problem, on every rank."""
    return next((found for found in comm.gather_objects(problem, world) if found is not None), None)
