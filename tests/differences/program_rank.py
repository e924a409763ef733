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
        step, plan, size = self._step, self._step.tensor, len(self._ranks)
        me = self._ranks.index(self._rank)
        root = step.root % size
        values = plan.values(self._rank)
        options = {"group": self._handle, **options}
        op = getattr(dist.ReduceOp if api is dist else asyncdist.ReduceOp, step.op)
        rows = plan.shape[:1]
        call = getattr(api, step.call, None)
        match step.call:
            case "barrier":
                return call(**options)
            case "all_reduce":
                return call(self._source(plan, values, is_written=True), op, **options)
            case "reduce":
                return call(self._source(plan, values, is_written=True), self._ranks[root], op, **options)
            case "broadcast":
                return call(self._source(plan, values, is_written=True), self._ranks[root], **options)
            case "all_gather":
                return call([self._target(plan.shape) for _ in range(size)], self._source(plan, values), **options)
            case "all_gather_into_tensor":
                return call(self._target((rows[0] * size, *plan.shape[1:])), self._source(plan, values), **options)
            case "gather":
                into = [self._target(plan.shape) for _ in range(size)] if me == root else None
                return call(self._source(plan, values), into, self._ranks[root], **options)
            case "reduce_scatter":
                parts = [self._source(plan, self._part(plan, place)) for place in range(size)]
                return call(self._target(plan.shape), parts, op, **options)
            case "reduce_scatter_tensor":
                whole = torch.cat([self._part(plan, place) for place in range(size)])
                shape = Tensor(
                    plan.dtype, (rows[0] * size, *plan.shape[1:]), plan.layout, plan.palette, plan.seed, plan.grad
                )
                return call(self._target(plan.shape), self._source(shape, whole), op, **options)
            case "scatter":
                parts = [self._source(plan, self._part(plan, place)) for place in range(size)] if me == root else None
                return call(self._target(plan.shape), parts, self._ranks[root], **options)
            case "all_to_all":
                parts = [self._source(plan, self._part(plan, place)) for place in range(size)]
                return call([self._target(plan.shape) for _ in range(size)], parts, **options)
            case "all_to_all_single":
                counts = splits(step, size)
                sent, received = counts[me].tolist(), counts[:, me].tolist()
                shape = Tensor(
                    plan.dtype, (sum(sent), *plan.shape[1:]), plan.layout, plan.palette, plan.seed, plan.grad
                )
                source = self._source(shape, shape.values(self._rank))
                return call(self._target((sum(received), *plan.shape[1:])), source, received, sent, **options)
            case "ring":
                del options["group"]
                source, target = self._source(plan, values), self._target(plan.shape)
                if size == 1:
                    target.copy_(source)
                    return None
                after, before = self._ranks[(me + 1) % size], self._ranks[(me - 1) % size]
                return [api.isend(source, after, self._handle), api.irecv(target, before, self._handle)]
            case _:
                return self._call_with_objects(call, root, me, size)

    def _part(self, plan: Tensor, place: int) -> torch.Tensor:
        """Return what this rank contributes to the rank at a place of the group."""
        return plan.values(self._rank * 10 + place)

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
