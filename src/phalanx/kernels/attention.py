"""Attention of a block of queries to a block of keys, with the log-sum-exp of the scores, by which blocks are merged exactly.

`attend` and `differentiate` are the two halves; what makes the result differentiable, and what lies on other ranks, is their
caller's. `choice` names the kernel that computes a piece.

Shapes: B rows, H heads of queries, G heads of keys and values (a divisor of H), S queries, T keys, D head width, E value width.
Source: Dao, "FlashAttention-2" (2023), section 3.1: out and log-sum-exp of blocks, and the backward from both.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch

from phalanx.kernels import attention_cpu, attention_device, attention_masked, attention_package, attention_reference
from phalanx.kernels.attention_sight import Piece, Sight, Tokens, mask, pieces
from phalanx.kernels.attention_trial import is_sound

Pair = tuple[torch.Tensor, torch.Tensor]

# In the order in which they are preferred.
FUSED = (attention_cpu, attention_package, attention_device, attention_masked)


@dataclass(frozen=True, eq=False)
class Form:
    """How scores are formed: `scale` times the product, bent by `softcap` tanh(score / softcap) where given.

    Of the weights a part `dropout` is dropped, drawn from `seed`. `dense` is a mask for the whole row that the program itself
    gave: true where a key is seen, or added to the scores.
    Shapes: `dense` (B or 1, H or 1, whole row, whole row).
    """

    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    seed: int = 0
    dense: torch.Tensor | None = None


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which parts are summed: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def choice(q: torch.Tensor, v: torch.Tensor, form: Form, masked: bool) -> ModuleType:
    """The kernel for a piece: the first fused one that takes it and was found sound on its device, else `attention_reference`."""
    for kernel in FUSED:
        if kernel.takes(q, v, softcap=form.softcap, dropout=form.dropout, masked=masked) and is_sound(kernel, q):
            return kernel
    return attention_reference


def sound_kernels(device: torch.device) -> list[str]:
    """The fused kernels that this device has and that were found sound on it, by name."""
    like = torch.zeros(1, 1, 8, 64, device=device, dtype=torch.float32 if device.type == "cpu" else torch.bfloat16)
    usable = [kernel for kernel in FUSED if kernel.takes(like, like, softcap=None, dropout=0.0, masked=False) and is_sound(kernel, like)]
    return [kernel.__name__.rpartition(".")[2] for kernel in usable]


def attend(
    q_BHSD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTE: torch.Tensor, sight: Sight, queries: Tokens, keys: Tokens, form: Form
) -> Pair | None:
    """Returns out (B, H, S, E) and the log-sum-exp (B, H, S), or None where no query may see any key.

    A query that sees no key has out 0 and -inf. The log-sum-exp has at least float32. No gradient.
    """
    found = pieces(sight, queries, keys, num_rows=q_BHSD.shape[0], masked=form.dense is not None)
    if not found or 0 in q_BHSD.shape:
        return None
    if len(found) == 1 and found[0].queries == slice(0, q_BHSD.shape[2]):
        return _piece(q_BHSD, k_BGTD, v_BGTE, sight, queries, keys, form, found[0])
    wide = wide_dtype(q_BHSD)
    out = q_BHSD.new_zeros((*q_BHSD.shape[:3], v_BGTE.shape[3]), dtype=wide)
    lse = q_BHSD.new_full(q_BHSD.shape[:3], -torch.inf, dtype=wide)
    done = 0
    for piece in found:
        here = out[:, :, piece.queries], lse[:, :, piece.queries]
        part = _piece(q_BHSD, k_BGTD, v_BGTE, sight, queries, keys, form, piece)
        if piece.queries.start >= done:  # seen for the first time
            here[0].copy_(part[0]), here[1].copy_(part[1])
        else:
            merge(*here, *part)
        done = piece.queries.stop
    return out if out.dtype == q_BHSD.dtype else out.to(q_BHSD.dtype), lse


def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Takes the attention to more keys into `out` and `lse`, in place.

    Source: Liu et al., "Ring Attention" (2023); the two weights add up to 1, so one is a sigmoid and the sum a lerp.
    """
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)  # where neither saw a key, both are -inf
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
    lse.copy_(torch.logaddexp(lse, part_lse))


def differentiate(
    grad_BHSE: torch.Tensor,
    q_BHSD: torch.Tensor,
    k_BGTD: torch.Tensor,
    v_BGTE: torch.Tensor,
    out_BHSE: torch.Tensor,
    lse_BHS: torch.Tensor,
    sight: Sight,
    queries: Tokens,
    keys: Tokens,
    form: Form,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The part of dq, dk and dv that this block contributes; `out` and `lse` are those of all keys. None where nothing is seen."""
    found = pieces(sight, queries, keys, num_rows=q_BHSD.shape[0], masked=form.dense is not None)
    if not found or 0 in q_BHSD.shape:
        return None
    if len(found) == 1 and found[0].queries == slice(0, q_BHSD.shape[2]) and found[0].keys == slice(0, k_BGTD.shape[2]):
        return _piece_backward(grad_BHSE, q_BHSD, k_BGTD, v_BGTE, out_BHSE, lse_BHS, sight, queries, keys, form, found[0])
    wide = wide_dtype(q_BHSD)
    totals = tuple(torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q_BHSD, k_BGTD, v_BGTE))
    for piece in found:
        parts = _piece_backward(grad_BHSE, q_BHSD, k_BGTD, v_BGTE, out_BHSE, lse_BHS, sight, queries, keys, form, piece)
        for total, part, where in zip(totals, parts, (piece.queries, piece.keys, piece.keys), strict=True):
            total[:, :, where].add_(part)
    return totals  # type: ignore[return-value]


def _piece(q, k, v, sight: Sight, queries: Tokens, keys: Tokens, form: Form, piece: Piece) -> Pair:
    kernel = choice(q, v, form, piece.kind == "masked")
    seen = _seen(sight, queries, keys, form, piece, q.device)
    tensors = q[:, :, piece.queries], k[:, :, piece.keys], v[:, :, piece.keys]
    return kernel.forward(*tensors, form=form, causal=piece.kind == "causal", seen=seen, seed=_seed(form, queries, keys, piece))


def _piece_backward(grad, q, k, v, out, lse, sight: Sight, queries: Tokens, keys: Tokens, form: Form, piece: Piece):
    kernel = choice(q, v, form, piece.kind == "masked")
    seen = _seen(sight, queries, keys, form, piece, q.device)
    rows = piece.queries
    tensors = grad[:, :, rows], q[:, :, rows], k[:, :, piece.keys], v[:, :, piece.keys], out[:, :, rows], lse[:, :, rows]
    return kernel.backward(*tensors, form=form, causal=piece.kind == "causal", seen=seen, seed=_seed(form, queries, keys, piece))


def _seen(sight: Sight, queries: Tokens, keys: Tokens, form: Form, piece: Piece, device: torch.device) -> torch.Tensor | None:
    """The mask of a piece: bool, or added to the scores where the program's own mask is."""
    if piece.kind != "masked":
        return None
    queries, keys = queries.take(piece.queries), keys.take(piece.keys)
    seen = mask(sight, queries, keys, device)
    if form.dense is None:
        return seen
    dense = form.dense.index_select(2, queries.places(device)).index_select(3, keys.places(device))
    if seen is None:
        return dense
    return dense & seen if dense.dtype == torch.bool else dense.masked_fill(~seen, -torch.inf)


def _seed(form: Form, queries: Tokens, keys: Tokens, piece: Piece) -> int:
    """A seed of its own for every piece, told by where it lies, so that the backward draws the same."""
    first = queries.take(piece.queries).ranges[0][0] * 1_000_003 + keys.take(piece.keys).ranges[0][0]
    return (form.seed * 6_364_136_223_846_793_005 + first) % 2**62 if form.dropout else 0
