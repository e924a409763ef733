"""Verify that all ranks hold the same model before they exchange anything, and broadcast values. Used by `module`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncdist.errors import MismatchError
from asyncdist.groups import Group
from asyncdist.kernel import flat_memory

PACK_NBYTES = 1 << 20


class Verification:
    """Compares the model of this rank with those of the others, once, before values or gradients are first exchanged.

    Compares names, their order, shapes, dtypes, strides and ``requires_grad``. Cost: an all-gather of 32 bytes; whole
    descriptions are sent only on a mismatch.

    Of ``buffers`` it takes those whose values the ranks exchange, of ``arguments`` those that must be equal on all ranks.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[tuple[str, torch.Tensor]],
        buffers: Sequence[tuple[str, torch.Tensor]],
        arguments: Mapping[str, object],
    ) -> None:
        own: Description = [(f"argument {name!r}", {"value": value}) for name, value in arguments.items()]
        own += describe_tensors("parameter", parameters) + describe_tensors("buffer", buffers)
        self._group, self._own = group, own
        self._is_done = group.size() == 1

    def once(self) -> None:
        """Compare, unless that was done; all ranks call it.

        Raises:
            MismatchError: A rank has another model than rank 0. Every rank raises it; it names the first parameter that
                differs, and the rank.
        """
        if self._is_done:
            return
        self._is_done = True
        group = self._group
        digest = hashlib.sha256(json.dumps(self._own).encode()).digest()
        if len(set(_gathered(group, digest))) == 1:
            return
        models = _gathered(group, self._own)
        rank = next(rank for rank, model in enumerate(models) if model != models[0])
        peer = group.ranks[rank]
        reason = f"the ranks hold different models: {difference(models[0], models[rank], group.ranks[0], peer)}"
        raise MismatchError(peer, reason, group=group.name, rank=group.ranks[group.rank()])


def _gathered(group: Group, own: Any) -> list[Any]:
    found: list[Any] = [None] * group.size()
    group.all_gather_object(found, own, background=False).wait()
    return found


Description = list[tuple[str, dict[str, object]]]
"""Tensors and arguments in order, each with the properties that must be equal on all ranks."""


def describe_tensors(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> Description:
    """Return the properties that must be equal on all ranks, one entry per tensor."""
    return [
        (
            f"{kind} {name!r}",
            {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "strides": list(tensor.stride()),
                "requires_grad": tensor.requires_grad,
            },
        )
        for name, tensor in named
    ]


def difference(expected: Description, found: Description, root: int, peer: int) -> str:
    """Return a sentence on the first difference between the descriptions of ranks ``root`` and ``peer``."""
    for (name, at_root), (other_name, at_peer) in zip(expected, found, strict=False):
        if name != other_name:
            return f"where rank {root} has {name}, rank {peer} has {other_name}"
        for property_name, one in at_root.items():
            if one != at_peer[property_name]:
                shown = _show(one), _show(at_peer[property_name])
                return f"{name} has {property_name} {shown[0]} on rank {root}, but {shown[1]} on rank {peer}"
    longer, owner = (found, peer) if len(found) > len(expected) else (expected, root)
    return f"{longer[min(len(found), len(expected))][0]} exists on rank {owner} only"


def _show(value: object) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


def broadcast_values(group: Group, tensors: Iterable[torch.Tensor], src: int = 0) -> None:
    """Overwrite ``tensors`` (any dtypes) with those of the group's rank ``src``; shapes and strides must be equal.

    Large contiguous tensors are broadcast in place. The others are packed into messages of about 1 MiB, so that small
    tensors do not cost one round each.
    """
    if group.size() == 1:
        return
    with torch.no_grad():
        for pack in _packs([tensor.detach() for tensor in tensors if tensor.numel()]):
            if len(pack) == 1 and pack[0].is_contiguous():
                group.broadcast(_bytes_of(pack[0]), src, background=False).wait()
                continue
            joined = torch.cat([_bytes_of(tensor) for tensor in pack])
            group.broadcast(joined, src, background=False).wait()
            if group.rank() != src:
                parts = joined.split([tensor.nbytes for tensor in pack])
                for tensor, part in zip(pack, parts, strict=True):
                    # Viewing bytes as a dtype requires its alignment. A part of a pack may lack it.
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def broadcast_buffers(group: Group, named: Sequence[tuple[str, torch.Tensor]], added: Sequence[str], src: int) -> None:
    """Overwrite buffers by those of the group's rank ``src`` before or after a forward.

    Raises:
        MismatchError: The ranks have different buffers. It names those that this rank has ``added`` since the model was
            wrapped.
    """
    try:
        # `data` has a version counter of its own, so that the backward of an earlier forward does not raise.
        broadcast_values(group, (buffer.data for _, buffer in named), src)
    except MismatchError as error:
        names = ", ".join(map(repr, added)) or "no buffer"
        reason = (
            f"the ranks hold different buffers: this rank has registered {names} since the model was wrapped, which every "
            f"rank must do alike: {error.reason}"
        )
        raise MismatchError(
            error.peer, reason, group=error.group, rank=error.rank, op=error.op, seq=error.seq
        ) from error


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return flat_memory(tensor.contiguous()).raw


def _packs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    filling: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= PACK_NBYTES:
            yield [tensor]
            continue
        pack = filling.setdefault(tensor.device, [])
        pack.append(tensor)
        if sum(member.nbytes for member in pack) >= PACK_NBYTES:
            yield filling.pop(tensor.device)
    yield from filling.values()
