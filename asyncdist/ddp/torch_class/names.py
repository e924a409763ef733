"""Further names and hooks of torch's class, most of them private. `module` derives its class from `TorchNames`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from asyncdist.base.callables import AnyFunction
from asyncdist.ddp import model_sync
from asyncdist.ddp.hooks import awaited
from asyncdist.ddp.hooks.running import AwaitedHook, GradientBucket
from asyncdist.ddp.torch_class.arguments import WITH_TORCH, default_limits, group_of, moved
from asyncdist.ddp.uneven_inputs import Joining, StepKind
from asyncdist.errors import UsageError
from asyncdist.groups import Group
from asyncdist.kernel import torch_private


class BufferHook:
    """What a forward calls instead of broadcasting buffers; `location` is "PRE_FORWARD" or "POST_FORWARD"."""

    def __init__(self, state: object, hook: AnyFunction, location: Any) -> None:
        self.location = getattr(location, "name", location)
        if not callable(hook):
            raise UsageError(f"a buffer hook is a function of (state, buffers by name), not {hook!r}")
        if self.location not in ("PRE_FORWARD", "POST_FORWARD"):
            raise UsageError(f"comm_hook_location is 'PRE_FORWARD' or 'POST_FORWARD', not {location!r}")
        self._state, self._hook = state, hook

    def call(self, buffers: dict[str, torch.Tensor]) -> list[Any]:
        """Call the hook, and return the futures for which the end of backward waits."""
        # The backward of an earlier forward must not raise because the hook has changed a buffer.
        unchanged = torch_private.preserve_versions(tuple(buffers.values()))
        with torch.no_grad(), unchanged:
            return list(self._hook(self._state, buffers) or ())


def builtin_hook(kind: Any) -> AwaitedHook:
    """Return the hook for torch's ``BuiltinCommHookType``."""
    hooks: dict[str, AwaitedHook] = {"ALLREDUCE": awaited.average, "FP16_COMPRESS": awaited.fp16}
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
        averages = await awaited.average(bucket, group)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if chosen is None or parameter in chosen:
                optimizer.step_param(parameter, gradient)
        return averages

    return average_and_step


_CHECKPOINT_PROBE = "_fqn_modifiers"
"""The attribute for which torch's distributed checkpoints ask each module before they name its state."""

_INSTEAD = {
    "reducer": "the averages of the last step are described by last_step, bucket_parameters and _get_ddp_logging_data()",
    "logger": "last_step and _get_ddp_logging_data() describe the steps",
}

_COMPUTED: dict[str, AnyFunction] = {
    "_has_rebuilt_buckets": lambda model, reducer: reducer.has_rebuilt_buckets,
    "broadcast_bucket_size": lambda model, reducer: model_sync.PACK_NBYTES,
    "bucket_bytes_cap": lambda model, reducer: reducer.options.limits[-1],
    "bucket_bytes_cap_default": lambda model, reducer: (
        tuple(reducer.options.limits) == default_limits(model.process_group)
    ),
    "bucket_bytes_cap_list": lambda model, reducer: list(reducer.options.limits),
    "is_multi_device_module": lambda model, reducer: len({each.device for _, each in model._parameters_to_sync()}) > 1,
    "modules_buffers": lambda model, reducer: [buffer for _, buffer in model._buffers_to_sync()],
    "named_module_buffers": lambda model, reducer: dict(model._buffers_to_sync()),
    "use_side_stream_for_tensor_copies": lambda model, reducer: False,
}
"""Attributes of torch's class that describe a model, with functions of the model and its reducer that return them."""


class TorchJoinHook:
    """The hook that torch's `torch.distributed.algorithms.Join` calls on ranks that have run out of inputs.

    Torch's context counts the ranks with inputs once for each forward, and calls `main_hook` once for each forward of
    these ranks.
    """

    def __init__(self, model: Any, joining: Joining) -> None:
        self._model, self._joining = model, joining

    def main_hook(self) -> None:
        """Follow the other ranks through one forward and its backward."""
        while self._model._stand_in_once(self._joining) is StepKind.refresh:
            pass

    def post_hook(self, is_last_joiner: bool) -> None:
        """Receive the model of the last ranks, when all ranks have run out."""
        try:
            self._model._sync_last(self._joining)
        finally:
            # torch's context leaves its configuration behind.
            vars(self._model).pop("_join_config", None)
            self._model._stop_joining(self._joining)


def counted_group(torch_group: Any, alternative: str = "") -> Any:
    """Return the process group of torch whose ranks torch's context counts, if a model or an optimizer was given one.

    Raises:
        UsageError: There is none. Its advice begins with the ``alternative``.
    """
    if torch_group is None:
        raise UsageError(
            f"torch's Join needs a process group of torch.distributed: {alternative}call "
            'torch.distributed.init_process_group("asyncdist") and pass its group as process_group'
        )
    return torch_group


def _option(name: str) -> property:
    return property(lambda model: getattr(model._options, name), doc="The argument of this name.")


class TorchNames(nn.Module):
    """The methods and attributes of `torch.nn.parallel.DistributedDataParallel` that need no explanation of their own.

    As in torch, type checkers know no attributes of the user's class.
    """

    buffer_hook: BufferHook | None = None
    _torch_joining: Joining | None = None
    find_unused_parameters = _option("find_unused_parameters")
    gradient_as_bucket_view = _option("gradient_as_bucket_view")
    static_graph = _option("static_graph")
    skip_all_reduce_unused_params = _option("skip_all_reduce_unused_params")
    lazy_bucket_allocation = _option("lazy_bucket_allocation")

    @property
    def device(self: Any) -> torch.device:
        """The device of the first parameter."""
        found: torch.device = self._parameters_to_sync()[0][1].device
        return found

    @property
    def device_type(self: Any) -> str:
        """The type of `device`."""
        return str(self.device.type)

    @property
    def broadcast_buffers(self: Any) -> bool:
        """Torch's older name of ``forward_sync_buffers``."""
        return bool(self.forward_sync_buffers)

    @broadcast_buffers.setter
    def broadcast_buffers(self: Any, value: bool) -> None:
        self.forward_sync_buffers = value

    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Divide inputs over devices, as torch's method does; `forward` does not call it."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self: Any, outputs: Any, output_device: Any) -> Any:
        """Join outputs of several devices, as torch's method does; `forward` does not call it."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self: Any, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Return ``([inputs], [kwargs])`` on a device, as torch's method does."""
        found = moved((inputs, kwargs), torch.device(self.device_type, device_id))
        return (found[0],), (found[1],)

    # -- torch's context `torch.distributed.algorithms.Join` ------------------------------------

    def join_hook(self: Any, **kwargs: Any) -> TorchJoinHook:
        """Return the hook with which torch's context includes this model.

        The group must be one of torch.distributed on the back end "asyncdist". In a world of `init_process_group`, use
        `join`.

        Of ``kwargs`` it uses ``divide_by_initial_world_size``, as in `join`.

        Raises:
            UsageError: The group of the model is not one of torch.distributed.
        """
        self.join_process_group  # noqa: B018 - raises without such a group
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        # A context that an exception ended has called no hook.
        if self._torch_joining is not None:
            self._torch_joining.optimizers.close()
        joining = Joining(self.process_group, self.module, divides_by_all=divides_by_all, throws=False)
        self._torch_joining = joining
        return TorchJoinHook(self, joining)

    @property
    def join_device(self: Any) -> torch.device:
        """The device of the tensors with which torch's context counts ranks."""
        found: torch.device = self.device
        return found

    @property
    def join_process_group(self: Any) -> Any:
        """The process group of torch whose ranks torch's context counts. Raises UsageError as `counted_group` does."""
        return counted_group(self._torch_group, "use `with model.join():`, or ")

    def _notify_torch_join(self: Any) -> Joining | None:
        """Tell torch's context that a forward begins; return what it does, or None outside such a context."""
        config = vars(self).get("_join_config")
        if config is None or not config.enable:
            return None
        from torch.distributed.algorithms.join import Join

        work: Any = Join.notify_join_context(self)
        if work is not None:
            work.wait()
        joining: Joining | None = self._torch_joining
        self._reducer.joining = joining
        return joining

    # -- private --------------------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Exclude parameters and buffers of ``module`` by name, before it is wrapped."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Return the parameters of ``module`` that are not excluded."""
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Return None: torch.compile need not split the model for this class."""

    def _register_buffer_comm_hook(
        self: Any, state: object, hook: Any, comm_hook_location: Any = "POST_FORWARD"
    ) -> None:
        """Call ``hook(state, buffers)`` in each forward that follows a forward with gradients, instead of a broadcast.

        Args:
            state: The first argument of the hook.
            hook: Changes the tensors of a dictionary of buffers by name. It may return futures of torch, for which the
                end of backward waits.
            comm_hook_location: "PRE_FORWARD" or "POST_FORWARD", or torch's constants of these names.
        """
        self.buffer_hook = BufferHook(state, hook, comm_hook_location)

    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        """Register torch's ``BuiltinCommHookType``: ALLREDUCE or FP16_COMPRESS."""
        self.register_async_comm_hook(builtin_hook(comm_hook_type))

    def _register_fused_optim(self: Any, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step an optimizer for each bucket when its gradients have been averaged; see torch's method."""
        self.register_async_comm_hook(fused_step(optim, optim_params, args, kwargs))

    def _set_static_graph(self: Any) -> None:
        """Set ``static_graph`` after the construction; the argument is the better way."""
        if self.static_graph:
            warnings.warn("static_graph is True already: leave _set_static_graph() out", stacklevel=2)
            return
        self._options.static_graph = True
        self._reducer.set_static_graph()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Check the rate and do nothing: `last_step` holds the times of every step."""
        if sample_rate < 1:
            raise UsageError(f"the sample rate of the logging data is 1 or more, not {sample_rate}")

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are never copied."""

    def _remove_autograd_hooks(self: Any) -> None:
        """Remove the hooks of the parameters: later backwards average nothing."""
        self._reducer.remove_hooks()

    def _check_reducer_finalized(self: Any) -> None:
        """Raise GradientError if the last backward ended before all gradients were averaged."""
        self._reducer.check()

    def _update_process_group(self: Any, new_process_group: Any) -> None:
        """Average over another group from the next forward on; a communication hook must be registered again."""
        self._reducer.remove_hooks()
        self._average_over(*group_of(new_process_group, None))

    def _get_ddp_logging_data(self: Any) -> dict[str, Any]:
        """Return a description of the model, its arguments and its last step: strings, and times in nanoseconds."""
        return _logging_data(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == _CHECKPOINT_PROBE:
                _tell_checkpoints()
            if name in _COMPUTED:
                return _COMPUTED[name](self, self._reducer)
            explained = _explain_missing(name)
            if explained is None:
                raise
        raise AttributeError(explained, name=name, obj=self)


def _logging_data(model: Any) -> dict[str, Any]:
    reducer = model._reducer
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
        "can_set_static_graph": int(not reducer.options.allows_unused),
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


def _tell_checkpoints() -> None:
    """Let torch's distributed checkpoints leave "module." out of the names of a wrapped model, as for torch's class.

    `torch.distributed.checkpoint.state_dict` tests for torch's class by ``isinstance`` with a name of its module, which may
    as well be a tuple of classes. Only that test changes: for all others this class stays another one than torch's.
    """
    checkpoints: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if getattr(checkpoints, "DDP", None) is TorchDistributedDataParallel:
        checkpoints.DDP = (TorchDistributedDataParallel, TorchNames)


def _explain_missing(name: str) -> str | None:
    """Return the text of an AttributeError for a name that only torch's class has; None for other names."""
    if name in _INSTEAD:
        return f"asyncdist's DistributedDataParallel has no {name!r}: {_INSTEAD[name]}"
    if name.startswith("__") or not hasattr(TorchDistributedDataParallel, name):
        return None
    return (
        f"asyncdist's DistributedDataParallel has no {name!r}, only torch's has: docs/ddp-compared.md lists what both have;"
        f" a program that needs it uses {WITH_TORCH}"
    )
