"""One rank of a contender: it meets the others once, runs the programs that the hunt sends, and reports what happened.

The outcome of a step is ("raised", error class, text, whether asyncdist names it), or ("returned", results, faults).
"""

from __future__ import annotations

import asyncio
import pickle
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import asyncdist
import asyncdist.sync
from asyncdist.errors import AsyncdistError, MismatchError
from tests.differences import rows
from tests.differences.programs import (
    GROUPS,
    OUTSIDE,
    STOOD_STILL,
    Collectives,
    Step,
    Tensor,
    Training,
    given,
    is_expanded,
    laid_out,
    objects,
    splits,
)

Outcome = tuple[Any, ...]


def serve(test: Any, backend: str, rank: int, world: int, meeting: str, timeout: float) -> None:
    """Run programs until the hunt closes the pipe."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options = {"rank": rank, "world_size": world}
    # Ranks start at different times on a busy machine: the limit is that of calls alone.
    dist.init_process_group(backend, init_method=f"{meeting}-torch", timeout=timedelta(seconds=60), **options)
    groups: dict[str, dict[str, Any]] = {"torch": {name: dist.new_group(list(ranks)) for name, ranks in GROUPS.items()}}
    for group in (dist.group.WORLD, *groups["torch"].values()):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)
    own: dict[str, Any] = {}
    if backend == "asyncdist":
        asyncdist.sync.init_process_group(init_method=meeting, timeout=timeout, **options)
        own = {name: asyncdist.sync.new_group(list(ranks)) for name, ranks in GROUPS.items()}
        groups |= {"blocking": own, "awaited": own}
    while True:
        try:
            program = test.recv()
        except EOFError:
            break
        if isinstance(program, str):
            side = rows.Side(backend == "asyncdist", rank, groups["torch"]["first two"], own and own["first two"])
            test.send(
                pickle.dumps(_outcome(lambda program=program, side=side: rows.run(program, side)) if rank < 2 else "")
            )
            continue
        face = program.face if backend == "asyncdist" else "torch"
        if isinstance(program, Training):
            outcome: Any = _outcome(lambda program=program, face=face: ("returned", _train(program, face, rank), []))
        elif rank in GROUPS[program.group]:
            outcome = _collectives(program, face, groups[face][program.group], rank)
        else:
            outcome = []
        # The pipe's own pickles would send tensors through shared memory.
        test.send(pickle.dumps(outcome))
    if backend == "asyncdist":
        asyncdist.sync.destroy_process_group()
    dist.destroy_process_group()


def _outcome(run: Any) -> Outcome:
    try:
        return run()
    except Exception as error:
        return _raised(error)


def _raised(error: Exception) -> Outcome:
    return "raised", type(error).__name__, str(error)[:300], _is_named(error)


def _is_named(error: Exception) -> bool:
    """Return whether asyncdist refuses a call, or torch's own functions do before they reach a back end."""
    where = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1]
    # All ranks run the same program: that they differ would be a fault.
    if isinstance(error, MismatchError):
        return False
    return isinstance(error, AsyncdistError | TypeError | ValueError) or where.endswith("distributed_c10d.py")


# -- collectives ----------------------------------------------------------------------------------------


def _collectives(program: Collectives, face: str, group: Any, rank: int) -> list[Outcome]:
    if face == "awaited":
        return asyncio.run(_awaited(program, group, rank))
    started = [_Started(step, program.group, group, rank) for step in program.steps]
    api = dist if face == "torch" else asyncdist.sync
    if program.at_once:
        for each in started:
            each.begin(api, async_op=True)
        for each in reversed(started):
            each.end()
    else:
        for each in started:
            each.begin(api, async_op=False)
            each.end()
    return [each.outcome() for each in started]


async def _awaited(program: Collectives, group: Any, rank: int) -> list[Outcome]:
    started = [_Started(step, program.group, group, rank) for step in program.steps]
    if program.at_once:
        for each in started:
            each.begin(asyncdist, async_op=True)
    for each in started:
        if not program.at_once:
            each.begin(asyncdist, async_op=True)
        await each.end_awaited()
    return [each.outcome() for each in started]


class _Written:
    """A tensor that a call writes: the memory around it, and what it held before."""

    def __init__(self, tensor: torch.Tensor, around: torch.Tensor, plan: Tensor) -> None:
        self.tensor, self.around, self.plan = tensor, around, plan
        self.bits, self.version = _bits(tensor), tensor._version


class _Started:
    """A step: its tensors, the works that it has started, and the error that it has raised."""

    def __init__(self, step: Step, group: str, handle: Any, rank: int) -> None:
        self._step, self._ranks, self._handle, self._rank = step, GROUPS[group], handle, rank
        self._written: list[_Written] = []
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._objects: Any = None
        self._works: list[Any] = []
        self._error: Outcome | None = None

    # -- tensors ------------------------------------------------------------------------------------

    def _source(self, plan: Tensor, values: torch.Tensor, *, is_written: bool = False) -> torch.Tensor:
        tensor, around = laid_out(plan)
        if is_expanded(plan):
            around.copy_(values[:1])
        else:
            tensor.copy_(values)
        if plan.grad != "none" and (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.detach().requires_grad_()
            # A clone of an expanded tensor is not expanded.
            tensor = tensor if plan.grad == "leaf" or is_expanded(plan) else tensor.clone()
        if is_written:
            self._written.append(_Written(tensor, around, plan))
        else:
            self._read.append((tensor, tensor.detach().clone()))
        return tensor

    def _target(self, shape: tuple[int, ...]) -> torch.Tensor:
        plan = Tensor(self._step.tensor.dtype, shape, self._step.output)
        tensor, around = laid_out(plan)
        self._written.append(_Written(tensor, around, plan))
        return tensor

    def _targets(self, size: int) -> list[torch.Tensor]:
        return [self._target(self._step.tensor.shape) for _ in range(size)]

    # -- running ------------------------------------------------------------------------------------

    def begin(self, api: Any, *, async_op: bool) -> None:
        """Start the call; a blocking one completes."""

        def run() -> Outcome:
            works = self._call(api, {"async_op": True} if async_op else {})
            self._works = [each for each in (works if isinstance(works, list) else [works]) if each is not None]
            return ()

        error = _outcome(run)
        self._error = error or None

    def end(self) -> None:
        """Wait for the works."""
        for work in self._works if self._error is None else []:
            if hasattr(work, "wait"):
                self._error = _outcome(lambda work=work: (work.wait(), ())[1]) or self._error

    async def end_awaited(self) -> None:
        """Await the works."""
        for work in self._works if self._error is None else []:
            try:
                await work
            except Exception as error:
                self._error = _raised(error)

    def _call(self, api: Any, options: dict[str, Any]) -> Any:
        step, shape, size = self._step, self._step.tensor.shape, len(self._ranks)
        me, root = self._ranks.index(self._rank), step.root % size
        at_root = me == root
        options = {"group": self._handle, **options}
        op = getattr(dist.ReduceOp if api is dist else asyncdist.ReduceOp, step.op)
        call = getattr(api, step.call, None)
        if "object" in step.call:
            return self._call_with_objects(call, root, me, size)
        if step.call == "barrier":
            return call(**options)
        is_written = step.call in ("all_reduce", "reduce", "broadcast")
        gives = step.call != "scatter" or at_root
        sources = [self._source(*each, is_written=is_written) for each in given(step, size, me, self._rank) if gives]
        source = sources[0] if sources else None
        match step.call:
            case "all_reduce":
                return call(source, op, **options)
            case "reduce":
                return call(source, self._ranks[root], op, **options)
            case "broadcast":
                return call(source, self._ranks[root], **options)
            case "all_gather":
                return call(self._targets(size), source, **options)
            case "all_gather_into_tensor":
                return call(self._target((shape[0] * size, *shape[1:])), source, **options)
            case "gather":
                return call(source, self._targets(size) if at_root else None, self._ranks[root], **options)
            case "reduce_scatter":
                return call(self._target(shape), sources, op, **options)
            case "reduce_scatter_tensor":
                return call(self._target(shape), source, op, **options)
            case "scatter":
                return call(self._target(shape), sources if at_root else None, self._ranks[root], **options)
            case "all_to_all":
                return call(self._targets(size), sources, **options)
            case "all_to_all_single":
                counts = splits(step, size)
                sent, received = counts[me].tolist(), counts[:, me].tolist()
                return call(self._target((sum(received), *shape[1:])), source, received, sent, **options)
            case "ring":
                target = self._target(shape)
                if size == 1:
                    target.copy_(source)
                    return None
                after, before = self._ranks[(me + 1) % size], self._ranks[(me - 1) % size]
                return [api.isend(source, after, self._handle), api.irecv(target, before, self._handle)]
        raise AssertionError(step.call)

    def _call_with_objects(self, call: Any, root: int, me: int, size: int) -> Any:
        own = objects(self._step, self._rank)[:size]
        match self._step.call:
            case "all_gather_object":
                self._objects = [None] * size
                return call(self._objects, own, group=self._handle)
            case "broadcast_object_list":
                self._objects = own
                return call(self._objects, self._ranks[root], group=self._handle)
            case "gather_object":
                self._objects = [None] * size if me == root else None
                return call(own, self._objects, self._ranks[root], group=self._handle)
            case _:
                self._objects = [None]
                return call(self._objects, own if me == root else None, self._ranks[root], group=self._handle)

    # -- what happened --------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        """Return what the step has done."""
        if self._error is not None:
            return self._error
        faults = []
        for tensor, before in self._read:
            if not torch.equal(_bits(tensor), _bits(before)):
                faults.append("an input was changed")
        results = []
        for written in self._written:
            plan, bits = written.plan, _bits(written.tensor)
            results.append((plan.dtype, tuple(written.tensor.shape), bits.numpy().tobytes()))
            if plan.grad == "none" and not _kept_outside(written.around, plan):
                faults.append("memory around an output was changed")
            if written.tensor._version == written.version and not torch.equal(bits, written.bits):
                faults.append(STOOD_STILL)
        return "returned", self._objects if "object" in self._step.call else results, faults


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def _kept_outside(around: torch.Tensor, plan: Tensor) -> bool:
    """Return whether the memory around a tensor holds what it held before."""
    if is_expanded(plan):
        return True
    if plan.layout == "negated" and plan.dtype in ("float32", "float64"):
        return bool((around.real == OUTSIDE).all())
    view, is_outside = laid_out(replace(plan, dtype="bool"))
    view.fill_(False)
    before = laid_out(plan)[1]
    width = around.dtype.itemsize
    where = is_outside.reshape(-1, 1).expand(-1, width).reshape(-1)
    return torch.equal(_bits(around)[where], _bits(before)[where])


# -- data-parallel steps --------------------------------------------------------------------------------


def _train(program: Training, face: str, rank: int) -> list[Any]:
    from tests.differences.training import Model, steps_of

    model = Model(program)
    options = {
        "find_unused_parameters": program.finds_unused,
        "gradient_as_bucket_view": program.bucket_view,
        "bucket_cap_mb": program.bucket_kib / 1024,
    }
    if face == "torch":
        wrapped: Any = torch.nn.parallel.DistributedDataParallel(model, **options)
    else:
        wrapped = asyncdist.sync.DistributedDataParallel(model, **options)
    return steps_of(program, model, wrapped, rank)
