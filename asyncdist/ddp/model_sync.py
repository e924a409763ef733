"""Verify before the first step that all ranks hold the same model, and broadcast rank 0's values. Called by `module`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.errors import MismatchError
from asyncdist.groups.group import Group
from asyncdist.memory.buffers import flat_memory

PACK_NBYTES = 1 << 20


def verify(
    group: Group, parameters: Sequence[tuple[str, torch.Tensor]], buffers: Sequence[tuple[str, torch.Tensor]] = ()
) -> None:
    """Raise `MismatchError` on every rank, naming parameter and rank, unless all ranks hold the model of rank 0.

    Compares names, shapes, dtypes, strides and ``requires_grad``. Cost: a broadcast of 16 bytes and an all-reduce of 8
    bytes per rank; whole descriptions are sent only on a mismatch.
    """
    own = describe_model("parameter", parameters) + describe_model("buffer", buffers)
    text = json.dumps(own).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
    root = torch.tensor([digest, len(text)], device="cpu")
    group.broadcast(root, 0, background=False).wait()
    # For each rank whose model differs from rank 0's, the bytes of its description.
    differing = torch.zeros(group.size(), dtype=torch.int64, device="cpu")
    if root.tolist() != [digest, len(text)]:
        differing[group.rank()] = len(text)
    group.all_reduce(differing, ReduceOp.SUM, background=False).wait()
    for rank, nbytes in enumerate(differing.tolist()):
        if nbytes:
            expected = json.loads(_broadcast_text(group, text, int(root[1]), 0))
            found = json.loads(_broadcast_text(group, text, nbytes, rank))
            peer = group.ranks[rank]
            reason = f"the ranks hold different models: {difference(expected, found, group.ranks[0], peer)}"
            raise MismatchError(peer, reason, group=group.name, rank=group.ranks[group.rank()])


def _broadcast_text(group: Group, own: bytes, nbytes: int, src: int) -> bytes:
    text = torch.frombuffer(bytearray(own if group.rank() == src else nbytes), dtype=torch.uint8)
    group.broadcast(text, src, background=False).wait()
    return bytes(text.tolist())


Description = list[list[object]]


def describe_model(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> Description:
    """Return the properties that must be equal on all ranks, one entry per tensor."""
    return [
        [f"{kind} {name!r}", list(tensor.shape), str(tensor.dtype), list(tensor.stride()), tensor.requires_grad]
        for name, tensor in named
    ]


def difference(expected: Description, found: Description, root: int, peer: int) -> str:
    """Return a sentence on the first difference between the descriptions of ranks ``root`` and ``peer``."""
    properties = ("shape", "dtype", "strides", "requires_grad")
    for at_root, at_peer in zip(expected, found, strict=False):
        if at_root[0] != at_peer[0]:
            return f"where rank {root} has {at_root[0]}, rank {peer} has {at_peer[0]}"
        for name, one, other in zip(properties, at_root[1:], at_peer[1:], strict=True):
            if one != other:
                return f"{at_root[0]} has {name} {_show(one)} on rank {root}, but {_show(other)} on rank {peer}"
    longer, owner = (found, peer) if len(found) > len(expected) else (expected, root)
    return f"{longer[min(len(found), len(expected))][0]} exists on rank {owner} only"


def _show(value: object) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value).removeprefix("torch.")


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
