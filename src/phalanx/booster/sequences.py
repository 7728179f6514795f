"""Runs a model on this rank's part of every row: cuts what has tokens, tells attention of whole rows, and says where tokens stand."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.nn.functional import pad

from phalanx.anatomy import AttentionCall, AttentionSeam, OwnLoss, Seen, length_dependent_positions, own_positions, takes_cache
from phalanx.anatomy.attention_seam import Told
from phalanx.anatomy.balance_seam import balance_speakers
from phalanx.cluster import comm
from phalanx.data import num_rows
from phalanx.errors import PlanError, ShapeError
from phalanx.kernels.attention import Form
from phalanx.kernels.attention_sight import Sight
from phalanx.parallel.expert.share import PassShare
from phalanx.parallel.sequence import Cut, Grid, Rows, attention
from phalanx.parallel.sequence.cut import reach_of

# How labels meet the shift by one that a next-token loss makes: the loss makes none; it takes labels that were shifted before the
# cut; or it shifts itself, and each part gets one token more, whose prediction nothing asks for.
ALIGNED, KEYWORD, SHIFTED = "aligned", "keyword", "shifted"


# What entries a batch has, and how many dimensions each.
Kind = tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class Part:
    """This rank's part of a batch.

    `places` are those of its tokens, of which the first `num_real` are tokens of the rows and the rest stand at the last place;
    `num_extra` tokens behind them take no part in attention. `has_mask`: the batch says itself which tokens are hidden.
    """

    batch: Any
    rows: Rows
    places: torch.Tensor
    num_real: int
    num_extra: int
    has_mask: bool


def num_key_heads(model: nn.Module) -> int | None:
    """The heads of keys and values that the model's config tells of."""
    config = getattr(model, "config", None)
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)


class SplitSequences:
    """The cut of one model's sequences over a grid of ranks.

    `own` says how labels are counted, by the model itself or (`uses_own_loss` False) by a criterion; `place` puts a batch on the device.
    `share` tells layers which tokens only fill rows up. `salt` differs between ranks that hold other heads, which drop other weights.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        own: OwnLoss,
        place: Callable[[Any], Any],
        *,
        uses_own_loss: bool,
        share: PassShare | None = None,
        salt: int = 0,
    ):
        self.model, self.grid, self.own, self.place, self.uses_own_loss, self.salt = model, grid, own, place, uses_own_loss, salt
        self.share = share or PassShare()
        self.seam = AttentionSeam(model)
        accepted = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self.caches = takes_cache(model)
        # A mixture's balance loss counts every token that no attention mask hides, so it must be told what is padding.
        self.counts_tokens = "attention_mask" in accepted and bool(balance_speakers(model))
        self.label_style = self.label_styles()[0]
        # Where the model's own files ask for the numbers of all tokens; None while they are being found out.
        self.position_sites: set[tuple[str, int]] | None = None
        self.found_sites: set[tuple[str, int]] = set()
        self.files = {getattr(sys.modules.get(name), "__file__", None) for name in self.seam.modules}
        self.proven: set[tuple[Kind, bool]] = set()

    def label_styles(self) -> list[str]:
        """The ways in which labels may be cut, the likeliest first."""
        if not self.own.shifts_labels:
            return [ALIGNED, SHIFTED]
        return [KEYWORD] if self.uses_own_loss and self.own.takes_num_items else [SHIFTED, ALIGNED]

    def is_proven(self, batch: Any) -> bool:
        """Whether batches of this kind, and as long, were tried out: a mask may change what a model does, and short rows prove little."""
        kind, is_short = self.kind(batch)
        return bool(self.proven & {(kind, is_short), (kind, False)})

    def kind(self, batch: Any) -> tuple[Kind, bool]:
        """Its entries, and whether its rows are short."""
        return kind_of(batch), row_length(batch) <= 2 * self.grid.size

    @contextmanager
    def running(self, batch: Any) -> Iterator[Any]:
        """Yields this rank's part of the batch, on the device; forwards and backwards inside see the tokens of the whole rows."""
        with Passage(self, batch) as part:
            yield part

    def passage(self, batch: Any) -> Passage:
        """The same, to be entered for the forward and once more for each part of the backward."""
        return Passage(self, batch)

    # -- the batch -----------------------------------------------------------------------------------------------------

    def part(self, batch: Any) -> Part:
        """Cuts everything that has one entry for each token, and reads documents and padding from the whole rows."""
        length, rows = row_length(batch), num_rows(batch)
        self._refuse_length(length)
        _refuse_masks(batch, length)
        cut = Cut(length, self.grid.ring.size, self.grid.ulysses.size)
        indices = self.grid.ring.index, self.grid.ulysses.index
        places, num_real = cut.places(*indices).clamp(max=length - 1), cut.num_real(*indices)
        num_extra = int(self.label_style == SHIFTED)
        cutter = _Cutter(places[:num_real], cut.local_length, rows, length, num_extra, self.own.ignored)
        local = cutter.take(batch)
        if isinstance(batch, Mapping):
            local = dict(local)
            if self.label_style == KEYWORD and isinstance(batch.get("labels"), torch.Tensor):
                local["shift_labels"] = cutter.tokens(_shifted(batch["labels"], self.own.ignored), self.own.ignored)
            if self.takes_positions and batch.get("position_ids") is None:
                own = own_positions(self.model, batch)
                local["position_ids"] = pad(places, (0, num_extra), value=length - 1)[None] if own is None else cutter.tokens(own, 0)
            if self.counts_tokens and batch.get("attention_mask") is None and (num_extra or cut.padded > length):
                local["attention_mask"] = cutter.tokens(torch.ones(rows, length, dtype=torch.int64), 0)
            if self.caches:
                local["use_cache"] = False
        documents, hidden = _documents(batch, length), _hidden(batch, length)
        reach = reach_of(documents, hidden, length)
        local, documents, hidden = self.place((local, documents, hidden))
        has_mask = isinstance(batch, Mapping) and batch.get("attention_mask") is not None
        return Part(local, Rows(cut, documents, hidden, reach), places, num_real, num_extra, has_mask)

    def whole(self, batch: Any) -> Any:
        """The whole rows, on the device, for a run without any cut."""
        return self.place({**batch, "use_cache": False} if self.caches and isinstance(batch, Mapping) else batch)

    def _with_mask(self, batch: Any, cut: Cut) -> Any:
        """The batch with a stand-in for each mask of whole rows, which the attention seam knows again."""

        def known(mask: Any) -> Any:
            if isinstance(mask, Mapping):
                return {kind: known(one) for kind, one in mask.items()}
            if not _is_dense(mask):
                return mask
            return self.seam.stand_in(Seen(dense=mask), (*mask.shape[:2], cut.local_length, cut.local_length), mask.device)

        masks = {key: known(value) for key, value in batch.items() if _is_mask(key)} if isinstance(batch, Mapping) else {}
        return {**batch, **masks} if masks else batch

    def _refuse_length(self, length: int) -> None:
        limit = length_dependent_positions(self.model)
        if limit is not None and length > limit:
            raise PlanError(
                f"rows of {length} tokens, and beyond {limit} the model's positions depend on the length of what it sees",
                allowed=f"rows of at most {limit} tokens where the sequence is cut",
                remedy="another rope_type in the model's config",
            )

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attend(self, part: Part, call: AttentionCall) -> torch.Tensor:
        rows, length = part.rows, part.rows.cut.local_length
        if {call.q.shape[2], call.k.shape[2]} != {length + part.num_extra}:
            raise PlanError(
                f"{call.name} attends from {call.q.shape[2]} to {call.k.shape[2]} tokens where this rank's part has {length}",
                allowed="attention of the tokens of a row to each other",
                remedy="a plan that does not cut the sequence",
            )
        seen = call.seen
        rows = replace(rows, documents=rows.documents if seen.by_document else None, hidden=rows.hidden if seen.by_padding else None)
        if rows.documents is None and rows.hidden is None:
            rows = replace(rows, reach=None)
        if seen.shown is not None and not (seen.by_padding and part.has_mask):
            rows = replace(rows, hidden=self._whole_hidden(~seen.shown[:, :length], rows.cut), reach=None)
        if seen.dense is not None and seen.dense.shape[1] not in (1, call.q.shape[1]):
            raise PlanError(
                f"a mask for {seen.dense.shape[1]} heads reaches {call.name}, of which this rank has {call.q.shape[1]} heads",
                allowed="one mask for all heads where heads are divided",
                remedy="a plan without tp",
            )
        seed = int(torch.randint(2**31, ())) + self.salt if call.dropout and detect_fake_mode(call.q) is None else 0
        form = Form(scale=call.scale, softcap=call.softcap, dropout=call.dropout, seed=seed, dense=seen.dense)
        q, k, v = (tensor[:, :, :length] for tensor in (call.q, call.k, call.v))
        out = attention(q, k, v, Sight(seen.before, seen.after), form, rows, self.grid)
        return pad(out, (0, 0, 0, part.num_extra)) if part.num_extra else out

    def _whole_hidden(self, hidden: torch.Tensor, cut: Cut) -> torch.Tensor:
        """Which tokens of whole rows are hidden, from what every rank says of its own. Shapes: (B, local) -> (B, length)."""
        found = hidden.to(torch.uint8).contiguous()
        for axis in (self.grid.ulysses, self.grid.ring):
            everyone = found.new_empty((axis.size, *found.shape))
            comm.all_gather(everyone, found, axis)
            found = everyone
        whole = found.new_empty((hidden.shape[0], cut.padded))
        for ring_index in range(cut.ring):
            for ulysses_index in range(cut.ulysses):
                whole[:, cut.places(ring_index, ulysses_index).to(whole.device)] = found[ring_index, ulysses_index]
        return whole[:, : cut.length].bool()

    # -- positions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _numbered(self, part: Part) -> Iterator[None]:
        """Inside, `torch.arange` over all tokens, called by a model that takes no positions, gives their places in the row.

        Which calls mean tokens is found out on short rows of a length of their own, and tried out there.
        """
        if self.takes_positions:
            yield
            return
        original, length = torch.arange, part.rows.cut.local_length + part.num_extra
        places = pad(part.places, (0, part.num_extra), value=part.rows.cut.length - 1)

        def numbers(*arguments: Any, **keywords: Any) -> torch.Tensor:
            made = original(*arguments, **keywords)
            frame = sys._getframe(1)
            site = frame.f_code.co_filename, frame.f_lineno
            if site[0] not in self.files or _bounds(arguments, keywords) != (0, length, 1):
                return made
            if self.position_sites is None:
                self.found_sites.add(site)
            elif site not in self.position_sites:
                return made
            return places.to(device=made.device, dtype=made.dtype)

        torch.arange = numbers
        try:
            yield
        finally:
            torch.arange = original


class Passage:
    """One pass of a model over this rank's part of a batch, entered once or several times; others may run in between."""

    def __init__(self, sequences: SplitSequences, batch: Any):
        self.sequences, self.part = sequences, sequences.part(batch)
        self.told: Told = {}
        self.stack = ExitStack()

    def __enter__(self) -> Any:
        sequences, part = self.sequences, self.part
        with ExitStack() as stack:
            stack.enter_context(sequences.seam.exchanged(lambda call: sequences._attend(part, call), self.told))
            stack.enter_context(sequences._numbered(part))
            stack.enter_context(sequences.share.filled(part.num_real, part.rows.cut.local_length + part.num_extra))
            batch = sequences._with_mask(part.batch, part.rows.cut)
            self.stack = stack.pop_all()
        return batch

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


@dataclass(frozen=True, eq=False)
class _Cutter:
    """Takes some places of whatever has one entry for each token; what is missing up to `local_length` is filled."""

    places: torch.Tensor
    local_length: int
    num_rows: int
    length: int
    num_extra: int
    ignored: int

    def take(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return {
                key: value if _is_mask(key) and _is_dense(value) else self._entry(value, is_label=key == "labels")
                for key, value in batch.items()
            }
        if isinstance(batch, tuple | list):
            items = [self._entry(value, is_label=number == len(batch) - 1 > 0) for number, value in enumerate(batch)]
            return type(batch)(items)
        return self._entry(batch, is_label=False)

    def _entry(self, value: Any, is_label: bool) -> Any:
        if (
            not isinstance(value, torch.Tensor)
            or value.dim() < 2
            or value.shape[1] != self.length
            or value.shape[0] not in (1, self.num_rows)
        ):
            return value
        if not is_label:
            return self.tokens(value, 0)
        if not self.num_extra:
            return self.tokens(value, self.ignored)
        # The loss drops the first label and predicts the next ones from the tokens before them.
        moved = self.tokens(_shifted(value, self.ignored), self.ignored)[:, : self.local_length]
        return torch.cat([torch.full_like(moved[:, :1], self.ignored), moved], 1)

    def tokens(self, value: torch.Tensor, fill: float) -> torch.Tensor:
        part = value.index_select(1, self.places.to(value.device))
        missing = self.local_length + self.num_extra - part.shape[1]
        return pad(part, (*(0, 0) * (value.dim() - 2), 0, missing), value=fill) if missing else part


def row_length(batch: Any) -> int:
    """The number of tokens of every row: the second dimension of the first entry that has one.

    Raises: PlanError for a batch without tokens.
    """
    entries = batch if isinstance(batch, tuple | list) else [batch]
    if isinstance(batch, Mapping):
        entries = [batch[key] for key in ("input_ids", "inputs_embeds") if batch.get(key) is not None] or list(batch.values())
    for entry in entries:
        if isinstance(entry, torch.Tensor) and entry.dim() in (2, 3):
            return int(entry.shape[1])
    named = batch.items() if isinstance(batch, Mapping) else enumerate(entries)
    shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in named if isinstance(value, torch.Tensor))
    raise PlanError(
        f"the batch ({shapes or type(batch).__name__}) has no entry with a token dimension, and the plan cuts sequences",
        allowed="tensors of (rows, tokens) or (rows, tokens, width); models that make tokens of an image cut none",
        remedy="a plan without cp",
    )


def _is_mask(name: str) -> bool:
    return str(name).endswith("attention_mask")


def _is_dense(mask: Any) -> bool:
    """Whether a mask speaks of all queries and keys."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 4


def _refuse_masks(batch: Any, length: int) -> None:
    """Masks that are neither of every token nor of all queries and keys cannot be cut."""
    masks = {key: value for key, value in batch.items() if _is_mask(key)} if isinstance(batch, Mapping) else {}
    for name, value in masks.items():
        for mask in value.values() if isinstance(value, Mapping) else [value]:
            shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else ()
            if mask is not None and shape[1:] != (length,) and not (_is_dense(mask) and shape[2:] == (length, length)):
                raise ShapeError(
                    f"{name} has the shape {shape}" if shape else f"{name} is a {type(mask).__name__}",
                    allowed=f"(rows, {length}), or (rows or 1, heads or 1, {length}, {length}), for rows of {length} tokens",
                    remedy="a mask of the tokens of the batch alone",
                )


def kind_of(batch: Any) -> Kind:
    """By what a model may tell batches apart without a look at their numbers: which entries are given, and their dimensions."""
    if isinstance(batch, Mapping):
        named = [(str(key), value) for key, value in batch.items() if value is not None]
    else:
        named = [(str(number), value) for number, value in enumerate(batch if isinstance(batch, tuple | list) else [batch])]
    return tuple(sorted((name, value.dim() if isinstance(value, torch.Tensor) else -1) for name, value in named))


def _shifted(labels: torch.Tensor, ignored: int) -> torch.Tensor:
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignored)], 1)


def _documents(batch: Any, length: int) -> torch.Tensor | None:
    """The number of each token's document, as `transformers` tells them: positions that do not go up by one begin another.

    It looks only where the batch has no attention mask. None where every row is one document.
    """
    if not isinstance(batch, Mapping) or batch.get("attention_mask") is not None:
        return None
    positions = batch.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.shape[1] != length:
        return None
    documents = pad((positions.diff(dim=1) != 1).cumsum(1), (1, 0))
    if documents.device.type == "cpu" and detect_fake_mode(documents) is None and not bool(documents.any()):
        return None
    return documents.expand(num_rows(batch), -1)


def _hidden(batch: Any, length: int) -> torch.Tensor | None:
    """True for padding; None where the batch has none."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape[1:]) != (length,):
        return None
    hidden = mask == 0
    is_known = hidden.device.type == "cpu" and detect_fake_mode(hidden) is None
    return None if is_known and not bool(hidden.any()) else hidden


def _bounds(arguments: tuple, keywords: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Start, stop and step of a call of `torch.arange`."""
    start, stop, step = keywords.get("start", 0), keywords.get("end"), keywords.get("step", 1)
    if len(arguments) == 1:
        stop = arguments[0]
    elif arguments:
        start, stop, step = (*arguments, step)[:3]
    return start, stop, step
