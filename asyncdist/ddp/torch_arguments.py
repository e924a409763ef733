"""Arguments and further names of `torch.nn.parallel.DistributedDataParallel`, as `module` accepts or refuses them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from asyncdist.ddp import buckets, model_sync
from asyncdist.ddp.hooks import casts
from asyncdist.ddp.hooks.bucket import GradientBucket
from asyncdist.ddp.reducer import Reducer
from asyncdist.ddp.sync_batchnorm import SyncBatchNorm
from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.groups.default_world import is_initialized, resolve_group
from asyncdist.groups.group import Group

if TYPE_CHECKING:
    from asyncdist.ddp.hooks.running import AwaitedHook

_WITH_TORCH = (
    'torch\'s DistributedDataParallel on the back end of asyncdist.torch_backend (init_process_group("asyncdist"))'
)

# -- groups -----------------------------------------------------------------------------------------


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
                f"not average: use {_WITH_TORCH}, or FSDP2"
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
    """Return the group of a model without ``process_group``; None if there is none."""
    try:
        return group_of(None, None)[0]
    except UsageError:
        return None


def notify_join(model: Any) -> bool:
    """Tell torch's context `Join` that a forward begins; return whether the model is inside such a context."""
    config = vars(model).get("_join_config")
    if config is None or not config.enable:
        return False
    from torch.distributed.algorithms.join import Join

    work: Any = Join.notify_join_context(model)
    if work is not None:
        work.wait()
    return True


# -- checks of arguments and models -----------------------------------------------------------------


def refuse(module: object, mixed_precision: object) -> None:
    """Raise UsageError for what is not a module, and UnsupportedError for ``mixed_precision``."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"DistributedDataParallel wraps a torch.nn.Module, not {module!r}")
    if mixed_precision is not None:
        raise UnsupportedError(
            "mixed_precision is not supported: compute with torch.autocast, and register asyncdist.ddp.hooks.bf16 with "
            "register_async_comm_hook() to send gradients in bfloat16"
        )


def bucket_limits(cap_mb: float | str | None, caps_mb: Sequence[float] | None) -> Sequence[int]:
    """Return the caps of the buckets in bytes; with ``"auto"`` those of the first step.

    Raises:
        UsageError: Both arguments are given although the first one is ``"auto"``, or it is another string.
        ValueError: A cap is less than a byte.
    """
    if cap_mb == "auto":
        if caps_mb:
            raise UsageError("pass bucket_cap_mb='auto' or bucket_cap_mb_list, not both")
        return buckets.caps()
    return [buckets.caps(each)[1] for each in caps_mb or ()] or buckets.caps(cap_mb)


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
                f"sparse=False, or use {_WITH_TORCH}"
            )


def refuse_collectives(module: nn.Module) -> None:
    """Raise UsageError if the forward of a layer needs all ranks, also those that have run out of inputs."""
    for name, each in module.named_modules():
        if isinstance(each, SyncBatchNorm):
            raise UsageError(
                f"module {name!r} is a SyncBatchNorm, whose forward needs all ranks: pass "
                "throw_on_early_termination=True to join()"
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


def ignore(module: nn.Module, names: Any) -> None:
    """Exclude parameters and buffers of ``module`` by name, as torch's static method does."""
    module._ddp_params_and_buffers_to_ignore = names
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in names:
            tensor._ddp_ignored = True  # type: ignore[attr-defined]


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


# -- hooks ------------------------------------------------------------------------------------------


class BufferHook:
    """What a forward calls instead of broadcasting buffers; `location` is "PRE_FORWARD" or "POST_FORWARD"."""

    def __init__(self, state: object, hook: Callable[[Any, dict[str, torch.Tensor]], Any], location: Any) -> None:
        self.location = getattr(location, "name", location)
        if not callable(hook):
            raise UsageError(f"a buffer hook is a function of (state, buffers by name), not {hook!r}")
        if self.location not in ("PRE_FORWARD", "POST_FORWARD"):
            raise UsageError(f"comm_hook_location is 'PRE_FORWARD' or 'POST_FORWARD', not {location!r}")
        self._state, self._hook = state, hook

    def call(self, buffers: dict[str, torch.Tensor]) -> list[Any]:
        """Call the hook, and return the futures for which the end of backward waits."""
        # The backward of an earlier forward must not raise because the hook has changed a buffer.
        unchanged = torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(buffers.values()))
        with torch.no_grad(), unchanged:
            return list(self._hook(self._state, buffers) or ())


def builtin_hook(kind: Any) -> AwaitedHook:
    """Return the hook for torch's ``BuiltinCommHookType``."""
    hooks: dict[str, AwaitedHook] = {"ALLREDUCE": casts.average, "FP16_COMPRESS": casts.fp16}
    found = hooks.get(getattr(kind, "name", str(kind)))
    if found is None:
        raise UsageError(f"{kind!r} is not a built-in communication hook: pass ALLREDUCE or FP16_COMPRESS")
    return found


def fused_step(kind: type, wanted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AwaitedHook:
    """Return a hook that averages a bucket and then steps a functional optimizer for each of its parameters.

    Raises:
        UsageError: torch has no functional form of the optimizer.
    """
    from torch.distributed.optim import as_functional_optim

    try:
        optimizer: Any = as_functional_optim(kind, *args, **kwargs)
    except ValueError as error:
        raise UsageError(
            f"{kind.__name__} cannot step in backward: {error}; call its step() after backward()"
        ) from error
    chosen = None if wanted is None else set(wanted)

    async def average_and_step(bucket: GradientBucket, group: Group) -> torch.Tensor:
        averages = await casts.average(bucket, group)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if chosen is None or parameter in chosen:
                optimizer.step_param(parameter, gradient)
        return averages

    return average_and_step


# -- logging data and names that only torch's class has ---------------------------------------------


def logging_data(model: Any, reducer: Reducer) -> dict[str, Any]:
    """Return torch's logging data: strings and whole numbers, times in nanoseconds."""
    trained = [parameter for _, parameter in model._parameters_to_sync() if parameter.requires_grad]
    sizes = [sum(model.module.get_parameter(name).nbytes for name in names) for names in reducer.layout]
    data: dict[str, Any] = {
        "module_name": type(model.module).__name__,
        "backend_name": "asyncdist",
        "world_size": model.process_group.size(),
        "rank": model.process_group.rank(),
        "device_ids": ", ".join(map(str, model.device_ids or ())),
        "output_device": -1 if model.output_device is None else model.output_device,
        "broadcast_buffers": int(bool(model.forward_sync_buffers)),
        "bucket_cap_bytes": model.bucket_bytes_cap,
        "find_unused_parameters": int(model.find_unused_parameters),
        "gradient_as_bucket_view": int(model.gradient_as_bucket_view),
        "static_graph": int(model.static_graph),
        "is_multi_device_module": int(model.is_multi_device_module),
        "has_sync_bn": int(any(type(each).__name__ == "SyncBatchNorm" for each in model.module.modules())),
        "dtypes": ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in trained})),
        "num_parameter_tensors": len(trained),
        "total_parameter_size_bytes": sum(each.nbytes for each in trained),
        "bucket_sizes": ", ".join(map(str, sizes)),
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        "can_set_static_graph": int(not reducer.may_lack_gradients),
    }
    if reducer.hook_name is not None:
        data["comm_hook"] = reducer.hook_name
    if reducer.has_rebuilt_buckets:
        data["rebuilt_bucket_sizes"] = data["bucket_sizes"]
    step = reducer.last_step
    if step is not None:
        started = min(bucket.started for bucket in step.buckets)
        overlap = sum(max(0.0, min(each.finished, step.backward_finished) - each.started) for each in step.buckets)
        data |= {
            "num_buckets_reduced": len(step.buckets),
            "backward_compute_time": round((step.backward_finished - step.backward_started) * 1e9),
            "backward_comm_time": round((step.finished - started) * 1e9),
            "backward_compute_comm_overlap_time": round(overlap * 1e9),
        }
    return data


COMPUTED: dict[str, Callable[[Any, Reducer], Any]] = {
    "broadcast_bucket_size": lambda model, reducer: model_sync.PACK_NBYTES,
    "bucket_bytes_cap": lambda model, reducer: reducer.limits[-1],
    "bucket_bytes_cap_default": lambda model, reducer: tuple(reducer.limits) == buckets.caps(),
    "bucket_bytes_cap_list": lambda model, reducer: list(reducer.limits),
    "is_multi_device_module": lambda model, reducer: len(_devices_of(model)) > 1,
    "modules_buffers": lambda model, reducer: [buffer for _, buffer in model._buffers_to_sync()],
    "named_module_buffers": lambda model, reducer: dict(model._buffers_to_sync()),
    "use_side_stream_for_tensor_copies": lambda model, reducer: False,
}
"""Attributes of torch's class that describe a model, with functions of the model and its reducer that return them."""


def _devices_of(model: Any) -> set[torch.device]:
    return {parameter.device for _, parameter in model._parameters_to_sync()}


_INSTEAD = {
    "reducer": "the averages of the last step are described by last_step, bucket_parameters and _get_ddp_logging_data()",
    "logger": "last_step and _get_ddp_logging_data() describe the steps",
}


def explain_missing(name: str) -> str | None:
    """Return the text of an AttributeError for a name that only torch's class has; None for other names."""
    if name in _INSTEAD:
        return f"asyncdist's DistributedDataParallel has no {name!r}: {_INSTEAD[name]}"
    if name.startswith("__") or not hasattr(TorchDistributedDataParallel, name):
        return None
    return (
        f"asyncdist's DistributedDataParallel has no {name!r}, only torch's has: docs/ddp.md lists what both have; a "
        f"program that needs it uses {_WITH_TORCH}"
    )
