"""Check the positions, lengths and documents that a caller gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isentrope.core.compile import values_are_readable
from isentrope.core.rotation import is_transformed
from isentrope.utils.messages import format_value

PositionIds = Tensor | tuple[Tensor, Tensor]


def check_position_ids(
    position_ids: PositionIds, batch: int, queries: int, keys: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the positions of queries and of keys, None where they are not given.

    One tensor with as many entries as keys gives the keys' positions, and each query has that of its own slot; one with
    as many entries as queries gives the queries', and keys stay at 0 … keys - 1; a pair gives both.
    """
    arguments = position_ids if isinstance(position_ids, tuple) else (position_ids,)
    tensors = [torch.atleast_2d(_to_integers(ids, "position_ids", device)) for ids in arguments]
    for ids in tensors:
        if ids.dim() != 2 or ids.shape[0] not in (1, batch):
            raise ValueError(f"position_ids: expected ({batch}, length) or (length,), got {tuple(ids.shape)}")
    if len(tensors) == 2 and (tensors[0].shape[1], tensors[1].shape[1]) == (queries, keys):
        return tensors[0], tensors[1]
    if len(tensors) == 1 and tensors[0].shape[1] == keys and queries <= keys:
        return None, tensors[0]
    if len(tensors) == 1 and tensors[0].shape[1] == queries:
        return tensors[0], None
    raise ValueError(
        f"position_ids: expected {keys} positions for the keys, {queries} for the queries, or a pair of both, "
        f"got {' and '.join(str(tuple(ids.shape)) for ids in tensors)}"
    )


def read_lengths(lengths: Tensor | Sequence[int] | None, device: torch.device) -> tuple[int, ...] | None:
    """Return lengths as numbers; None where a GPU would be waited for, or a graph or transform is at work."""
    if device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
        return None
    if type(lengths) is Tensor and lengths.dtype == torch.int64 and lengths.dim() == 1 and lengths.device == device:
        return tuple(lengths.tolist())
    listed = isinstance(lengths, (list, tuple)) and all(type(length) is int for length in lengths)
    return tuple(lengths or ()) if listed else None


def check_lengths(lengths: Tensor | Sequence[int], batch: int, keys: int, device: torch.device) -> Tensor:
    """Return the unpadded length of each row, (batch,)."""
    count = _to_integers(lengths, "lengths", device)
    if count.shape != (batch,):
        raise ValueError(f"lengths: expected shape ({batch},), one number a row, got {tuple(count.shape)}")
    if values_are_readable(count) and bool(((count < 0) | (count > keys)).any()):
        raise ValueError(f"lengths: expected values in 0 … {keys} (the number of keys), got {count.tolist()}")
    return count


def check_documents(documents: Tensor, batch: int, keys: int, device: torch.device) -> Tensor:
    """Return document ids, (batch or 1, keys)."""
    integers = _to_integers(documents, "Document(ids)", device)
    ids = torch.atleast_2d(integers)
    if ids.shape not in ((1, keys), (batch, keys)):
        raise ValueError(f"Document(ids): expected shape ({keys},) or ({batch}, {keys}), got {tuple(integers.shape)}")
    return ids


def _to_integers(value: Tensor | Sequence[int], name: str, device: torch.device) -> Tensor:
    try:
        empty = isinstance(value, tuple | list) and not value  # which would be of floats
        tensor = torch.as_tensor(value, dtype=torch.int64 if empty else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected a tensor of integers, got {format_value(value)}") from error
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise ValueError(f"{name}: expected integers, got {tensor.dtype}")
    return tensor.to(device=device, dtype=torch.int64)
