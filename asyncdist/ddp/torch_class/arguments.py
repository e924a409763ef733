"""The arguments of `torch.nn.parallel.DistributedDataParallel`, as `module` accepts or refuses them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from asyncdist.ddp import buckets
from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.groups import Group, is_initialized, resolve_group

WITH_TORCH = (
    'torch\'s DistributedDataParallel on the back end of asyncdist.torch_backend (init_process_group("asyncdist"))'
)
"""The class to use for what this one refuses."""


def group_of(process_group: Any, device_mesh: Any) -> tuple[Group, Any]:
    """Return the group to average over, and torch's process group if it was given as one.

    A process group of torch on the back end "asyncdist" denotes its `Group`. Without arguments the group is the default
    group; in a process that has none, torch's default group.

    Raises:
        UsageError: Both arguments are given, the mesh has several dimensions, or another back end serves the group.
        NotInitializedError: There is no default group.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise UsageError("pass process_group or device_mesh, not both")
        if device_mesh.ndim != 1:
            raise UsageError(f"device_mesh must have one dimension, not {device_mesh.ndim}: pass mesh['name'] of one")
        root = device_mesh._get_root_mesh()
        if root is not device_mesh and root.ndim > 1:
            raise UnsupportedError(
                "device_mesh is a dimension of a larger mesh, as for tensor parallelism, whose parameters this class does "
                f"not average: use {WITH_TORCH}, or FSDP2"
            )
        process_group = device_mesh.get_group(0)
    if process_group is None and not is_initialized():
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            process_group = distributed.group.WORLD
            if not isinstance(getattr(process_group, "group", None), Group):
                process_group = None
    inner = getattr(process_group, "group", None)
    return (inner, process_group) if isinstance(inner, Group) else (resolve_group(process_group), None)


def default_group_if_any() -> Group | None:
    """Return the group of a model without ``process_group``, or None."""
    try:
        return group_of(None, None)[0]
    except UsageError:
        return None


def refuse(module: object, mixed_precision: object) -> None:
    """Raise UsageError for what is not a module, and UnsupportedError for ``mixed_precision``."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"DistributedDataParallel wraps a torch.nn.Module, not {module!r}")
    if mixed_precision is not None:
        raise UnsupportedError(
            "mixed_precision is not supported: compute with torch.autocast, and register asyncdist.ddp.hooks.bf16 with "
            "register_async_comm_hook() to send gradients in bfloat16"
        )


def default_limits(group: Group) -> tuple[int, int]:
    """Return the caps in bytes of the first bucket and of all later ones, for a model without ``bucket_cap_mb``."""
    if group.shares_memory:
        return buckets.limits_of(buckets.DEFAULT_CAP_NBYTES)
    return buckets.limits_of(buckets.cap_for_link(group.context.model.beta))


def bucket_limits(cap_mb: float | str | None, caps_mb: Sequence[float] | None, group: Group) -> Sequence[int]:
    """Return the caps of the buckets in bytes; with ``"auto"`` those of the first step.

    Raises:
        UsageError: Both arguments are given although the first one is ``"auto"``, or it is another string.
        ValueError: A cap is less than a byte.
    """
    if cap_mb == "auto" and caps_mb:
        raise UsageError("pass bucket_cap_mb='auto' or bucket_cap_mb_list, not both")
    if caps_mb:
        return [buckets.caps(each)[1] for each in caps_mb]
    return default_limits(group) if cap_mb is None or cap_mb == "auto" else buckets.caps(cap_mb)


def delayed_names(
    module: nn.Module, named: Sequence[tuple[str, nn.Parameter]] | None, trigger: nn.Parameter | None
) -> frozenset[str]:
    """Return the names of the parameters whose all-reduce is delayed.

    Raises:
        UsageError: One of the two arguments is missing, or one of them names no parameter of the module.
    """
    if (named is None) is not (trigger is None):
        raise UsageError("delay_all_reduce_named_params and param_to_hook_all_reduce are passed together or not at all")
    if named is None or trigger is None:
        return frozenset()
    own = dict(module.named_parameters())
    if not any(trigger is parameter and parameter.requires_grad for parameter in own.values()):
        raise UsageError("param_to_hook_all_reduce is not a parameter of the module that requires a gradient")
    for name, parameter in named:
        if own.get(name) is not parameter:
            raise UsageError(
                f"delay_all_reduce_named_params contains {name!r}, but the module has no such parameter of this name: pass "
                "pairs of module.named_parameters()"
            )
    return frozenset(name for name, _ in named)


def check_model(module: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise UsageError for a model that cannot be averaged."""
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(f"parameter {name!r} has no shape yet: run one forward before wrapping a lazy module")
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise UsageError("no parameter of this module requires a gradient: use the module without wrapping it")
    types = sorted({parameter.device.type for _, parameter in parameters})
    if len(types) > 1:
        raise UsageError(
            f"the parameters are on devices of several types, {' and '.join(types)}: move them to one type"
        )
    averaged = {name for name, parameter in parameters if parameter.requires_grad}
    for name, each in module.named_modules():
        if isinstance(each, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"module {name!r} is a torch.nn.SyncBatchNorm, which does not communicate over this group, so each rank "
                "would use its own statistics: convert the model with asyncdist.SyncBatchNorm.convert_sync_batchnorm(model)"
            )
        if (
            isinstance(each, nn.Embedding | nn.EmbeddingBag)
            and each.sparse
            and f"{name}.weight".lstrip(".") in averaged
        ):
            raise UnsupportedError(
                f"module {name!r} is an embedding with sparse gradients, which are not averaged: build it with "
                f"sparse=False, or use {WITH_TORCH}"
            )


def devices(
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    parameters: Sequence[tuple[str, nn.Parameter]],
) -> tuple[list[int] | None, int | None]:
    """Return the indices of the device of the inputs, and of the outputs; None where the module decides.

    Raises:
        UsageError: There are several devices, or the module is not on one accelerator.
    """
    if not device_ids and output_device is None:
        return None, None
    if device_ids and len(device_ids) > 1:
        raise UsageError(f"device_ids takes one device per process, not {list(device_ids)}: start a rank for each")
    own = {parameter.device for _, parameter in parameters}
    if not device_ids or len(own) > 1 or next(iter(own)).type == "cpu":
        where = ", ".join(sorted(map(str, own)))
        name = "device_ids" if device_ids else "output_device"
        raise UsageError(f"{name} requires a module on one accelerator, but this one is on {where}: leave it out")
    index, output = _index(device_ids[0]), device_ids[0] if output_device is None else output_device
    return [index], _index(output)


def _index(device: int | torch.device | str) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0


def moved(value: Any, device: torch.device) -> Any:
    """Return ``value`` with the tensors in its lists, tuples and dictionaries on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    return value
