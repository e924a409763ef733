"""`DistributedDataParallel`: a module whose ``backward()`` averages gradients over the ranks. Exported by `asyncdist`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, Self

import torch
from torch import nn

from asyncdist.ddp import timeline
from asyncdist.ddp.backward.bucket_set import ReducerOptions
from asyncdist.ddp.buckets import BucketTuning
from asyncdist.ddp.direct_gradients import DirectGradients
from asyncdist.ddp.hooks.running import AwaitedHook, AwaitedHookCaller, TorchHookCaller
from asyncdist.ddp.model_sync import Verification, broadcast_buffers, broadcast_values
from asyncdist.ddp.model_watch import ModelWatch
from asyncdist.ddp.reducer import Reducer
from asyncdist.ddp.timeline import StepTimes
from asyncdist.ddp.torch_class import arguments
from asyncdist.ddp.torch_class.names import TorchNames
from asyncdist.ddp.uneven_inputs import Joining, StepKind, refuse_collectives
from asyncdist.errors import UsageError
from asyncdist.groups import Group

_NOT_COPIED = ("process_group", "device_mesh", "_torch_group", "_verification", "_reducer", "_watch",
               "_direct_gradients")  # fmt: skip


class DistributedDataParallel(TorchNames):
    """Wrap ``module`` so that every backward averages its gradients over the ranks of ``process_group``.

    Construct it on every rank, after `init_process_group` and before the optimizer. Rank 0's parameters and buffers
    overwrite those of the other ranks. Arguments, their order and their meaning are those of
    `torch.nn.parallel.DistributedDataParallel`, except for the defaults and restrictions below.

    Each backward makes one all-reduce per bucket; the first one also broadcasts the order of the gradients. Between ranks
    of one host, buckets lie in registered memory while there is room. All-reduces then overlap with backward only if the
    ranks leave a processor core free, and run at its end otherwise.

    A backward averages if it follows a forward of the wrapper, as in torch. Other backwards
    (``model.module(x).sum().backward()``) leave this rank's own gradients.

    A deep copy averages over the same group. Only a model on the default group can be pickled, and is loaded on that group.

    In an async program, construct the model and run its steps in a worker thread: ``await asyncio.to_thread(step)``.

    Args:
        module: The model. Its layers keep their classes and attributes.
        device_ids: At most one device, to which inputs are moved.
        output_device: Only checked: the module decides where outputs are.
        dim: Used by `scatter` and `gather` only.
        broadcast_buffers: Torch's older form of ``forward_sync_buffers``; False also leaves buffers out of ``init_sync``.
        init_sync: Compare the models of all ranks and broadcast rank 0's values at construction. If False, nothing is
            exchanged then, and the models are compared in the first step; equal values are up to the caller.
        process_group: The group to average over, or a process group of torch on the back end "asyncdist"; None is the
            default group, or torch's default group in a process that has only that.
        bucket_cap_mb: MiB of gradients after which a bucket is complete, the first one after 1 MiB at the latest. None
            means 25 between ranks that share memory, and over links what a link moves in about 20 ms, from 1 to 25. "auto"
            tries several sizes in the first 65 steps at most, and uses the one with which the last all-reduce ends soonest:
            see `bucket_tuning`. It excludes communication hooks and ``bucket_cap_mb_list``.
        find_unused_parameters: Allow parameters without a gradient in a backward. Those that no rank has used keep their
            ``grad``; others get the average over all ranks, to which ranks that have not used them contribute zeros.
            Buckets with parameters that a rank has not used are all-reduced at the end of backward.
        check_reduction: Has no effect, as in torch.
        gradient_as_bucket_view: Make ``.grad`` a view of its bucket, valid until the next backward. If False, gradients are
            copied, which needs as much memory again. If True, layers of type `torch.nn.Linear` with weights of 256 KiB and
            more compute gradients directly in the buckets. In a world of one rank other gradients stay where they are.
        static_graph: Every backward gives each parameter as many gradients as the first one, which may be none, or several
            with re-entrant checkpoints. No bucket is sent before the end of the first backward.
        delay_all_reduce_named_params: Named parameters that are all-reduced in buckets of their own, after all others.
        param_to_hook_all_reduce: A parameter whose gradient is complete before the delayed all-reduce; it starts at the end
            of backward, which is later.
        mixed_precision: Must be None; use `torch.autocast` and a communication hook.
        device_mesh: A mesh of torch with one dimension, on the back end "asyncdist", instead of ``process_group``.
        skip_all_reduce_unused_params: As ``find_unused_parameters``, and never send parameters that no rank has used in
            the first backward; they must stay unused.
        bucket_cap_mb_list: Caps of the first buckets in MiB; the last one applies to all further buckets.
        batched_grad_copy: Has no effect.
        forward_sync_buffers: Overwrite buffers by rank 0's before each forward that follows a forward with gradients; None
            means the value of ``broadcast_buffers``, or True.
        lazy_bucket_allocation: With ``gradient_as_bucket_view=False``, free the buckets after each backward.

    Raises:
        MismatchError: The models of the ranks differ. Every rank raises it, with ``init_sync=False`` in the first step.
        UnsupportedError: ``mixed_precision`` is set, the model has a `torch.nn.SyncBatchNorm` (convert it with
            `SyncBatchNorm`) or an embedding with sparse gradients, or ``device_mesh`` belongs to a larger mesh.
        UsageError: No parameter requires a gradient, or an argument does not fit the model or another argument.
        LoopThreadError: The calling thread runs an event loop.

    ``backward()`` raises GradientError on all ranks, naming the parameters and the ranks, if a parameter got no gradient or
    two of them on a rank; and GroupError if a peer is lost. A world of one notices two of them in the first step only, and
    later if gradients are kept from step to step.

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
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: object = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        super().__init__()
        arguments.refuse(module, mixed_precision)
        delayed = arguments.delayed_names(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.parameters_to_ignore = frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        # As in torch, type checkers know no attributes of the user's class.
        self.module: Any = module
        parameters = self._parameters_to_sync()
        arguments.check_model(module, parameters)
        self.device_ids, self.output_device = arguments.devices(device_ids, output_device, parameters)
        self.dim = dim
        self.forward_sync_buffers = (
            broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        )
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = None
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        group, torch_group = arguments.group_of(process_group, device_mesh)
        self._options = ReducerOptions(
            arguments.bucket_limits(bucket_cap_mb, bucket_cap_mb_list, group),
            tunes_buckets=bucket_cap_mb == "auto",
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            lazy_bucket_allocation=lazy_bucket_allocation,
            delayed=delayed,
        )
        if device_mesh is not None:
            self.device_mesh = device_mesh
        has_buffers = forward_sync_buffers is not None or self.forward_sync_buffers
        self._average_over(group, torch_group, self._synchronised(group, buffers=has_buffers) if init_sync else None)

    def _synchronised(self, group: Group, *, buffers: bool) -> Verification:
        """Compare the models of all ranks, and overwrite their values by those of rank 0; return the comparison."""
        parameters, named = self._parameters_to_sync(), self.module.named_buffers() if buffers else ()
        shared = [each for each in named if each[0] not in self.parameters_to_ignore]
        verification = Verification(group, parameters, shared, self._options.common)
        verification.once()
        broadcast_values(group, [tensor for _, tensor in [*parameters, *shared]])
        return verification

    def _average_over(self, group: Group, torch_group: Any, verification: Verification | None = None) -> None:
        """Set the attributes that a copy gets anew: the group and the reducer."""
        self.process_group, self._torch_group = group, torch_group
        self._watch = ModelWatch(self.module, self.parameters_to_ignore)
        parameters = self._parameters_to_sync()
        self._verification = verification or Verification(
            group, parameters, self._buffers_to_sync() if self.forward_sync_buffers else [], self._options.common
        )
        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        self._reducer = Reducer(group, trained, dataclasses.replace(self._options), self._verification, self._watch)
        writing = self.module if self.gradient_as_bucket_view else nn.Identity()
        self._direct_gradients = DirectGradients(writing, self._reducer)

    # -- copies -----------------------------------------------------------------------------------

    def _copied_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _NOT_COPIED}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(self._copied_attributes(), memo))
        made._average_over(self.process_group, self._torch_group)
        return made

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not arguments.default_group_if_any():
            raise UsageError(
                "cannot pickle a DistributedDataParallel whose group is not the default group, because a pickle does not "
                "contain the group: pickle its attribute `module`, and wrap that after loading"
            )
        return self._copied_attributes()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if arguments.default_group_if_any() is None:
            raise UsageError(
                "cannot load a pickled DistributedDataParallel without a default process group: call "
                "init_process_group() first, or pickle its attribute `module` instead"
            )
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._average_over(*arguments.group_of(None, None))

    @property
    def last_step(self) -> StepTimes | None:
        """Times of the last backward with communication; None before the first."""
        return self._reducer.last_step

    def timeline(self, path: str | PathLike[str] | None = None) -> str:
        """Draw the last step that has communicated into a file, and describe it.

        Args:
            path: A file whose name ends in png, svg or pdf; None draws nothing. Drawing needs matplotlib
                (``pip install matplotlib``).

        Returns:
            A sentence with the times of forward, backward and the wait for all-reduces, the share of the all-reduces' time
            that passed during backward, and the parameters whose gradients came last.

        Raises:
            UsageError: No step has communicated yet, or the file cannot be drawn.

        Example:
            >>> model.timeline("step.png")
            'forward 3.10 ms, backward 8.24 ms, wait for all-reduces 0.31 ms: 87% of …'
        """
        return timeline.timeline_of(self.last_step, self.bucket_parameters, path)

    @property
    def bucket_tuning(self) -> BucketTuning | None:
        """With ``bucket_cap_mb="auto"``, the bucket sizes that were tried and the chosen one, to be printed; else None."""
        return self._reducer.tuning

    @property
    def bucket_parameters(self) -> list[list[str]]:
        """The names of the parameters by bucket, in the order of the all-reduces; the first step changes it."""
        return self._reducer.layout

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. The backward after a forward with gradients averages them."""
        training = torch.is_grad_enabled()
        synchronises = training and self.require_backward_grad_sync
        if training:
            self._watch.check(self.module)
            self._reducer.check()
            if self._reducer.joining is not None:
                self._reducer.joining.check()
        in_torch_join = self._notify_torch_join()
        if self._syncs_buffers("PRE_FORWARD"):
            self._sync_buffers()
        # A discriminator is frozen for its generator's step: the ranks have nothing to average.
        averages = synchronises and self._reducer.trains
        if in_torch_join and not averages:
            in_torch_join.skip()
        if self.device_ids:
            (inputs, kwargs) = arguments.moved((inputs, kwargs), torch.device(self.device_type, self.device_ids[0]))
        if averages:
            with self._direct_gradients:
                output = self.module(*inputs, **kwargs)
        else:
            output = self.module(*inputs, **kwargs)
        if self._syncs_buffers("POST_FORWARD"):
            self._sync_buffers()
        self.require_forward_param_sync = synchronises
        if averages:
            self._reducer.armed = True
            self._reducer.expect_backward_of(output)
        elif training and not synchronises:
            self._reducer.armed = False
        return output

    def _parameters_to_sync(self) -> list[tuple[str, nn.Parameter]]:
        ignored = self.parameters_to_ignore
        return [(name, parameter) for name, parameter in self.module.named_parameters() if name not in ignored]

    def _buffers_to_sync(self) -> list[tuple[str, torch.Tensor]]:
        return self._watch.buffers(self.module)

    # -- buffers ----------------------------------------------------------------------------------

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward overwrites buffers by rank 0's, or calls the buffer hook."""
        return self.require_forward_param_sync and bool(self.forward_sync_buffers) and bool(self._buffers_to_sync())

    def _syncs_buffers(self, location: str) -> bool:
        hook = self.buffer_hook
        at = "PRE_FORWARD" if hook is None else hook.location
        return at == location and self.will_sync_module_buffers()

    def _sync_buffers(self) -> None:
        joining = self._reducer.joining
        if self.buffer_hook is not None:
            self._reducer.futures += self.buffer_hook.call(dict(self._buffers_to_sync()))
        else:
            self._refresh(0 if joining is None else joining.source())

    def _refresh(self, src: int) -> None:
        self._verification.once()
        broadcast_buffers(self.process_group, self._buffers_to_sync(), self._watch.added_buffers(), src)

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
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Let ranks run out of inputs at different times.

        Every rank of the group enters the block, also a rank without inputs. A rank that leaves the block contributes
        zeros until the last rank has left it. Then all ranks receive the parameters (and buffers, with
        ``broadcast_buffers``) of the highest rank among the last ones, as in torch. The state of an optimizer is not
        synchronised: broadcast it from one of the last ranks before another epoch. A rank that ran out earlier warns at
        the optimizer's next step if its state is unchanged.

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
            UsageError: The model is in such a block already, or it contains a `SyncBatchNorm`, whose collectives a rank
                without inputs does not call, and ``throw_on_early_termination`` is False.

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
        if not throw_on_early_termination:
            refuse_collectives(self.module)
        joining = self._reducer.joining = Joining(
            self.process_group,
            self.module,
            divides_by_all=divide_by_initial_world_size,
            throws=throw_on_early_termination,
        )
        try:
            yield
            while self._stand_in_once(joining) is not StepKind.end:
                pass
            self._sync_last(joining)
        finally:
            self._stop_joining(joining)

    def _stand_in_once(self, joining: Joining) -> StepKind:
        """Follow the next step of the ranks with inputs left, for this rank without, and return it."""
        step = joining.stand_in()
        if step is StepKind.refresh:
            self._refresh(joining.active[-1])
        elif step is StepKind.average:
            self._reducer.stand_in(joining.present_reduction)
        return step

    def _sync_last(self, joining: Joining) -> None:
        """Receive the model of the highest rank among the last ones, as in torch."""
        if not joining.is_even:
            shared = [*self._parameters_to_sync(), *(self._buffers_to_sync() if self.forward_sync_buffers else ())]
            broadcast_values(self.process_group, [tensor for _, tensor in shared], joining.active[-1])
            joining.warn_of_older_optimizers()

    def _stop_joining(self, joining: Joining) -> None:
        joining.optimizers.close()
        self._reducer.joining = None
        # Ranks may have left after different forwards.
        self.require_forward_param_sync = True

    # -- communication hooks ----------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Call ``hook(state, bucket)`` for each full bucket, instead of averaging it.

        The interface is torch's, so torch's own hooks run. They communicate over torch.distributed, which must have a
        process group, for example on the back end "asyncdist".

        Args:
            state: The first argument of the hook, of any kind.
            hook: Takes the state and a `GradientBucket`, whose gradients are not divided by the number of ranks. Returns a
                `torch.futures.Future` of one tensor as large as ``bucket.buffer()``.

        Raises:
            UsageError: The hook has other parameters or annotations, the model has a hook already, a backward has averaged
                gradients already, or a hook of torch has no process group.

        Example:
            >>> def average(group, bucket):
            ...     work = group.all_reduce(bucket.buffer(), dist.ReduceOp.AVG)
            ...     return work.get_future().then(lambda future: future.value())
            >>> model.register_comm_hook(model.process_group, average)
        """
        self._reducer.set_hook(TorchHookCaller(state, hook))

    def register_async_comm_hook(self, hook: AwaitedHook) -> None:
        """Run ``await hook(bucket, group)`` for each full bucket, instead of averaging it.

        The hooks run one after the other on an event loop in a thread of their own, while backward goes on.

        Args:
            hook: Takes a `GradientBucket`, whose gradients are not divided by the number of ranks, and a group of the
                model's ranks. Returns a tensor as large as ``bucket.buffer()``, or that tensor itself. See
                `asyncdist.ddp.hooks` for hooks that compress.

        Raises:
            UsageError: The model has a hook already, or a backward has averaged gradients already.

        Example:
            >>> async def average(bucket, group):
            ...     await group.all_reduce(bucket.buffer(), dist.ReduceOp.AVG)
            ...     return bucket.buffer()
            >>> model.register_async_comm_hook(average)
        """
        self._reducer.set_hook(AwaitedHookCaller(hook, self.process_group))

    # -- when backward ends -----------------------------------------------------------------------

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether `finalize_backward`, instead of the end of ``backward()``, waits for the averages. May be set."""
        return self._reducer.manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        self._reducer.manual = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must be called after ``backward()`` returns, and not from a hook: always."""
        return self._reducer.manual

    def finalize_backward(self) -> None:
        """Wait for the averages of a backward; only with `require_manual_backward_finalization`.

        Raises:
            UsageError: No backward waits for this call.
        """
        self._reducer.finalize()
