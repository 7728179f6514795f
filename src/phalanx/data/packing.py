"""Packing of documents into rows of one length, with the borders between documents as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from phalanx.errors import ConfigError

IGNORED = -100


def pack(documents: Iterable[Sequence[int]], length: int, *, pad_token: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Packs token sequences into rows of `length`, in order, each row filled to its end before the next begins.

    A document that does not fit goes on in the next row as a segment of its own, whose first token repeats the last one of
    the segment before: so no token is lost, and each but a document's first is predicted exactly once. Labels are not
    shifted (the model shifts them): the first token of a segment has label -100 and is never predicted from the document
    before. `position_ids` restart at 0 and `document_ids` count up at every segment of a row. The last row is filled
    up by a segment of `pad_token` without labels.

    Attention must not cross segments, and it is the model that has to keep it from that. Models of transformers read the
    borders from `position_ids` when there is no attention mask *and no cache* (`use_cache=False`); others take
    `segment_mask` or `cu_seqlens` of the document ids.

    Shapes: all four are (length,), int64; rows of a batch are stacked by the default collate function.
    Raises: ConfigError where `length` is below 2 or the documents hold no token.
    """
    if length < 2:
        raise ConfigError(f"rows of {length} tokens have nothing to predict", allowed="a length of at least 2")
    segments: list[list[int]] = []
    free, seen = length, False
    for document in documents:
        rest = _as_list(document)
        while rest:
            seen = True
            segments.append(rest[:free])
            placed = len(segments[-1])
            free -= placed
            # The last token placed is the context from which the next segment's first new token is predicted.
            rest = rest[placed - 1 :] if placed < len(rest) else []
            if free == 0:
                yield _row(segments)
                segments, free = [], length
    if segments:
        yield _row(segments, padding=[pad_token] * free)
    if not seen:
        raise ConfigError("the documents hold no token", remedy="at least one document that is not empty")


def cu_seqlens(document_ids: torch.Tensor) -> torch.Tensor:
    """The borders of all segments of a batch, laid end to end, as kernels for variable lengths want them.

    Shapes: (rows, length) or (length,) -> (segments + 1,), int32, from 0 to the number of tokens.
    """
    ids = document_ids.reshape(-1, document_ids.shape[-1])
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = begins.reshape(-1).nonzero().reshape(-1)
    return torch.cat([starts, starts.new_tensor([ids.numel()])]).to(torch.int32)


def segment_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """True where a query may see a key: not later, and in the same segment.

    Shapes: (rows, length) -> (rows, 1, queries, keys), bool, as `scaled_dot_product_attention` takes it.
    """
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same.tril()


def _as_list(document: Sequence[int]) -> list[int]:
    return document.tolist() if hasattr(document, "tolist") else list(document)


def _row(segments: list[list[int]], padding: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    parts = [*segments, list(padding)] if padding else segments
    labels = [label for segment in segments for label in (IGNORED, *segment[1:])] + [IGNORED] * len(padding)
    columns = {
        "input_ids": [token for part in parts for token in part],
        "labels": labels,
        "position_ids": [place for part in parts for place in range(len(part))],
        "document_ids": [number for number, part in enumerate(parts) for _ in part],
    }
    return {name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()}
