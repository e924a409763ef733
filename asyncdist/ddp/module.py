"""`DistributedDataParallel`: a module whose ``backward()`` averages gradients over the ranks. Exported by `asyncdist`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn

from asyncdist.ddp import buckets, direct_gradients, model_sync
from asyncdist.ddp.reducer import Reducer, StepTimes
from asyncdist.ddp.uneven_inputs import Joining
from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.groups.default_world import AnyGroup, is_initialized, resolve_group
from asyncdist.groups.group import Group

_NOT_COPIED = ("process_group", "_reducer")


class DistributedDataParallel(nn.Module):
    """Wrap ``module`` so that every backward averages its gradients over the ranks of ``process_group``.

    Construct it on every rank, after `init_process_group` and before the optimizer. Rank 0's parameters and buffers
    overwrite those of the other ranks. Arguments, their order and their meaning are those of
    `torch.nn.parallel.DistributedDataParallel`, except for the defaults and restrictions below.

    Each backward makes one all-reduce per bucket; the first one also broadcasts the order of the gradients. Between ranks
    of one host, buckets lie in registered memory while there is room. All-reduces then overlap with backward only if the
    ranks leave a processor core free, and run at its end otherwise.

    A backward averages if it follows a forward of the wrapper, as in torch. Other backwards
    (``model.module(x).sum().backward()``) leave this rank's own gradients.

    A deep copy averages over the same group. A pickle is loaded on the default group, and only a model on the default group
    can be pickled.

    In an async program, construct the model and run its steps in a worker thread: ``await asyncio.to_thread(step)``.

    Args:
        module: The model. All parameters that require gradients must get one in every backward.
        device_ids: At most one device, to which inputs are moved.
        output_device: Accepted for compatibility with torch; has no effect.
        dim: Accepted for compatibility with torch; has no effect.
        broadcast_buffers: Overwrite buffers by rank 0's at construction and before each forward that follows a forward
            with gradients.
        init_sync: Compare the models of all ranks and broadcast rank 0's values at construction.
        process_group: The group to average over; None is the default group.
        bucket_cap_mb: MiB of gradients after which a bucket is complete; None means 25, and 1 for the first bucket.
        find_unused_parameters: Must be False.
        check_reduction: Accepted for compatibility with torch; has no effect.
        gradient_as_bucket_view: Make ``.grad`` a view of its bucket, valid until the next backward. If False, gradients are
            copied, which needs as much memory again. If True, layers of type `torch.nn.Linear` with weights of 256 KiB and
            more become a derived class that computes gradients directly in the buckets.
        static_graph: Must be False.
        delay_all_reduce_named_params: Must be None.
        param_to_hook_all_reduce: Must be None.
        mixed_precision: Must be None.
        device_mesh: Must be None.
        skip_all_reduce_unused_params: Must be False.
        bucket_cap_mb_list: Caps of the first buckets in MiB; the last one applies to all further buckets.
        batched_grad_copy: Accepted for compatibility with torch; has no effect.
        forward_sync_buffers: As ``broadcast_buffers``, but only before forwards; None means the value of
            ``broadcast_buffers``.

    Raises:
        MismatchError: The models of the ranks differ. Every rank raises it.
        UnsupportedError: An argument is not supported, the model has a `torch.nn.SyncBatchNorm`, or a parameter has an
            optimizer that steps in backward.
        UsageError: No parameter requires a gradient, or ``device_ids`` does not fit the model.
        LoopThreadError: The calling thread runs an event loop.

    ``backward()`` raises GradientError on a rank on which a parameter got no gradient, and GroupError if a peer is lost.

    Example:
        >>> model = DistributedDataParallel(torch.nn.Linear(4, 1))
        >>> model(torch.ones(2, 4)).sum().backward()  # gradients are the averages over the ranks
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        init_sync: bool = True,
        process_group: AnyGroup = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: object = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise UsageError(f"DistributedDataParallel wraps a torch.nn.Module, not {module!r}")
        _refuse(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        self._ignored = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.module = module
        parameters = self._parameters_to_sync()
        _check_parameters(parameters)
        _check_modules(module)
        self._input_device = _input_device(device_ids, parameters)
        self.dim = dim
        self.device_ids = device_ids
        self.output_device = output_device
        self.broadcast_buffers = broadcast_buffers is not False
        self.forward_sync_buffers = self.broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.require_backward_grad_sync = True
        self._require_forward_buffer_sync = True
        buffers_to_sync = self._buffers_to_sync()
        self._has_buffers = bool(buffers_to_sync)
        group = resolve_group(process_group)
        if init_sync:
            shared = buffers_to_sync if self.broadcast_buffers else []
            model_sync.verify(group, parameters, shared)
            model_sync.broadcast_values(group, [tensor for _, tensor in [*parameters, *shared]])
        self._limits = [buckets.caps(cap)[1] for cap in bucket_cap_mb_list or ()] or buckets.caps(bucket_cap_mb)
        self._average_over(group)

    def _average_over(self, group: Group) -> None:
        """Set the attributes that a copy gets anew: the group and the reducer."""
        self.process_group = group
        trained = [(name, parameter) for name, parameter in self._parameters_to_sync() if parameter.requires_grad]
        self._reducer = Reducer(group, trained, self._limits, gradient_as_bucket_view=self.gradient_as_bucket_view)
        if self.gradient_as_bucket_view:
            direct_gradients.adopt(self.module, self._reducer)

    # -- copies -----------------------------------------------------------------------------------

    def _copied_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(self._copied_attributes(), memo))
        made._average_over(self.process_group)
        return made

    def __getstate__(self) -> dict[str, Any]:
        if not is_initialized() or self.process_group is not resolve_group(None):
            raise UsageError(
                "cannot pickle a DistributedDataParallel whose group is not the default group, because a pickle does not "
                "contain the group: pickle its attribute `module`, and wrap that after loading"
            )
        return self._copied_attributes()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not is_initialized():
            raise UsageError(
                "cannot load a pickled DistributedDataParallel without a default process group: call "
                "init_process_group() first, or pickle its attribute `module` instead"
            )
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._average_over(resolve_group(None))

    @property
    def last_step(self) -> StepTimes | None:
        """Times of the last backward with communication; None before the first."""
        return self._reducer.last_step

    @property
    def bucket_parameters(self) -> list[list[str]]:
        """The names of the parameters by bucket, in the order of the all-reduces; the first step changes it."""
        return self._reducer.layout

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. The backward after a forward with gradients averages them."""
        training, joining = torch.is_grad_enabled(), self._reducer.joining
        if training:
            self._reducer.check()
            if joining is not None:
                joining.check()
        if self._require_forward_buffer_sync and self.forward_sync_buffers and self._has_buffers:
            self._refresh(0 if joining is None else joining.source())
        if self._input_device is not None:
            inputs, kwargs = _moved((inputs, kwargs), self._input_device)
        output = self.module(*inputs, **kwargs)
        synchronise = training and self.require_backward_grad_sync
        self._require_forward_buffer_sync = synchronise
        if training:
            self._reducer.armed = synchronise
        if synchronise:
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._entered)
        return output

    def _parameters_to_sync(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.module.named_parameters() if name not in self._ignored]

    def _buffers_to_sync(self) -> list[tuple[str, torch.Tensor]]:
        """Return the present buffers: a forward or a cast may have replaced them."""
        return [(name, buffer) for name, buffer in self.module.named_buffers() if name not in self._ignored]

    def _refresh(self, src: int) -> None:
        # `data` has a version counter of its own, so that the backward of an earlier forward does not raise.
        model_sync.broadcast_values(self.process_group, (buffer.data for _, buffer in self._buffers_to_sync()), src)

    def _entered(self, _: torch.Tensor) -> None:
        self._reducer.begin()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: backwards of forwards inside the block average nothing.

        The first backward whose forward ran outside averages the accumulated gradients.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let ranks run out of inputs at different times.

        Every rank of the group enters the block, also a rank without inputs. A rank that leaves the block contributes
        zeros until the last rank has left it. Then all ranks receive the parameters (and buffers, with
        ``broadcast_buffers``) of the lowest rank among the last ones. The state of an optimizer is not synchronised:
        broadcast it from one of the last ranks before another epoch.

        The ranks contribute only to this model's communication. Inside the block use the group for nothing else, in
        particular not for another model. Each backward costs one all-gather of a byte per rank, and each forward that
        broadcasts buffers costs another.

        Args:
            divide_by_initial_world_size: Divide the sums of gradients by the number of all ranks; if False, by the
                number of ranks with inputs left.
            enable: If False, do nothing.
            throw_on_early_termination: Raise UnevenInputsError on all ranks when the first rank runs out of inputs. Models
                with communication in their forward need it.

        Raises:
            UnevenInputsError: With ``throw_on_early_termination``: at the end of the block on ranks without inputs, in the
                next forward with gradients on the others.
            UsageError: The model is in such a block already.

        Example:
            >>> with model.join():
            ...     for batch in batches:
            ...         step(model, batch)
        """
        if not enable:
            yield
            return
        if self._reducer.joining is not None:
            raise UsageError("this model is inside join() already: leave that block first")
        joining = self._reducer.joining = Joining(
            self.process_group, divides_by_all=divide_by_initial_world_size, throws=throw_on_early_termination
        )
        try:
            yield
            joining.stand_in(self._refresh, self._reducer.stand_in)
            if not joining.is_even:
                shared = [*self._parameters_to_sync(), *(self._buffers_to_sync() if self.broadcast_buffers else ())]
                model_sync.broadcast_values(self.process_group, [tensor for _, tensor in shared], joining.active[0])
        finally:
            self._reducer.joining = None
            # Ranks may have left after different forwards.
            self._require_forward_buffer_sync = True


def _refuse(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"{name}={value!r} is not supported by this version: leave {name} out")


def _check_parameters(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(f"parameter {name!r} has no shape yet: run one forward before wrapping a lazy module")
        if getattr(parameter, "_in_backward_optimizers", None):
            raise UnsupportedError(
                f"parameter {name!r} has an optimizer that steps in backward (_apply_optimizer_in_backward), before "
                "the gradient is averaged over the ranks: construct the optimizer with the wrapped model's parameters, "
                "and call its step() after backward()"
            )
    if not any(parameter.requires_grad for _, parameter in parameters):
        raise UsageError("no parameter of this module requires a gradient: use the module without wrapping it")


def _check_modules(module: nn.Module) -> None:
    for name, each in module.named_modules():
        if isinstance(each, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"module {name!r} is a torch.nn.SyncBatchNorm, which does not communicate over this group, so each rank "
                "would use its own statistics: use nn.BatchNorm or nn.GroupNorm, or wrap the model in torch's "
                "DistributedDataParallel over the back end of asyncdist.torch_backend"
            )


def _input_device(
    device_ids: Sequence[int | torch.device] | None, parameters: Sequence[tuple[str, nn.Parameter]]
) -> torch.device | None:
    devices = {parameter.device for _, parameter in parameters}
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise UsageError(f"device_ids takes one device per process, not {list(device_ids)}: start a rank for each")
    own = next(iter(devices))
    if len(devices) > 1 or own.type == "cpu":
        where = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"device_ids requires a module on one accelerator, but this one is on {where}: leave it out")
    wanted = device_ids[0]
    return wanted if isinstance(wanted, torch.device) else torch.device(own.type, wanted)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])
