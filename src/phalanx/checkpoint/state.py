"""Nested values to JSON and safetensors and back, exactly: no pickle, so reading a checkpoint never runs code."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from typing import Any

import torch

from phalanx.checkpoint.shard_file import dtype_name
from phalanx.errors import CheckpointError

TAG = "$"
# Subclasses that optimizers and schedulers of PyTorch keep in their state; anything else is refused rather than flattened.
MAPPINGS = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
SEQUENCES = {"tuple": tuple, "size": torch.Size}
ALLOWED = "None, bool, int, float, str, bytes, torch tensors and dtypes, and lists, tuples and dicts of them"


def encode(value: Any, where: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """The JSON form of a value, and its tensors by the keys that the JSON form names.

    Raises: CheckpointError naming the path of the first value that cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        return _encode(value, where, tensors), tensors
    except RecursionError:
        raise CheckpointError(f"{where} contains itself, or is nested too deeply to be stored") from None


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if kind is list:
        return [_encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        dtype_name(value, where)
        key = f"{len(tensors)}:{where}"
        tensors[key] = value
        return {TAG: "tensor", "key": key}
    if kind is bytes:
        return {TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
    for tag, sequence in SEQUENCES.items():
        if kind is sequence:
            return {TAG: tag, "items": [_encode(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]}
    for tag, mapping in MAPPINGS.items():
        if kind is mapping:
            return _encode_mapping(value, tag, where, tensors)
    remedy = "value.item()" if kind.__module__ == "numpy" else "store the values it is made of"
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold", allowed=ALLOWED, remedy=remedy
    )


def _encode_mapping(value: dict, tag: str, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A plain object where JSON can say it; pairs where keys are not text or the type is special."""
    if tag == "dict" and TAG not in value and all(type(key) is str for key in value):
        return {key: _encode(item, f"{where}[{key!r}]", tensors) for key, item in value.items()}
    pairs = [[_encode(key, f"{where} key {key!r}", tensors), _encode(item, f"{where}[{key!r}]", tensors)] for key, item in value.items()]
    return {TAG: tag, "items": pairs}


def decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value that `encode` was given. Tensors come back on the host."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(TAG)
    if tag is None:
        return {key: decode(item, tensors) for key, item in value.items()}
    if tag in MAPPINGS:
        return MAPPINGS[tag]({decode(key, tensors): decode(item, tensors) for key, item in value["items"]})
    if tag in SEQUENCES:
        return SEQUENCES[tag](decode(item, tensors) for item in value["items"])
    if tag == "tensor":
        return tensors[value["key"]]
    if tag == "bytes":
        return base64.b64decode(value["base64"])
    if tag == "float":
        return float(value["value"])
    if tag == "dtype" and isinstance(dtype := getattr(torch, value["name"], None), torch.dtype):
        return dtype
    raise CheckpointError(f"the state holds a value of unknown kind {tag!r}", remedy="a newer Phalanx")
