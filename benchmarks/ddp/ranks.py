"""The ranks of the benchmark of data-parallel training.

A rank is forked by a nursery, and paced by `benchmark` over a pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
import torch.distributed
from torch import nn

import asyncdist.torch_backend  # noqa: F401 - registers the back end
from asyncdist import sync
from asyncdist.cli.bench.plan import in_turns
from asyncdist.ddp import DistributedDataParallel, hooks
from asyncdist.errors import BenchmarkError
from asyncdist.testing.hosts import sent_nbytes
from benchmarks.ddp.models import WORKLOADS, Batch, Workload
from benchmarks.ddp.names import ALONE, KEPT, LOSSY, WITH_TORCH

torch.set_num_threads(1)

_TIMEOUT = 300.0
_WARM_UPS = 3
_TOLERANCE = 1e-4  # difference of weights between contenders, which add in different orders
_TUNING = 66
"""The most steps in which ``bucket_cap_mb="auto"`` chooses, and two."""
_MEMORY_STEPS = 40
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt`` of the GNU C library."""
_SAMPLES = 16
"""The samples of an inner step of `train_with_few_exchanges`."""


class Trainer:
    """One model with its optimizer. `step` is timed.

    Args:
        model: The model, wrapped or not.
        keeps_gradients: Whether each step sets the gradients of the last one to zero, instead of freeing them.
    """

    def __init__(self, model: nn.Module, *, keeps_gradients: bool = False) -> None:
        self.model = model
        self._frees_gradients = not keeps_gradients
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, batch: Batch) -> None:
        inputs, labels = batch
        self.optimizer.zero_grad(set_to_none=self._frees_gradients)
        nn.functional.cross_entropy(self.model(inputs), labels).backward()
        self.optimizer.step()

    def weights(self) -> torch.Tensor:
        """Return all weights in one dimension, gathered from all ranks if they are sharded; called on every rank."""
        from torch.distributed.tensor import DTensor  # takes seconds

        weights = [parameter.detach() for parameter in self.model.parameters()]
        weights = [each.full_tensor() if isinstance(each, DTensor) else each for each in weights]
        return torch.cat([each.flatten() for each in weights])


def compare_weights(trainers: Mapping[str, Trainer], lossy: Collection[str] = ()) -> None:
    """Raise BenchmarkError if a contender's weights differ between ranks, or from those of the first contender.

    Args:
        trainers: The contenders; `ALONE` is not compared.
        lossy: Those that are only compared between ranks.
    """
    found = {who: trainer.weights() for who, trainer in trainers.items() if who != ALONE}
    first = next(iter(found), "")
    for who, weights in found.items():
        of_rank_0 = weights.clone()
        sync.broadcast(of_rank_0, 0)
        if not torch.equal(of_rank_0, weights):
            raise BenchmarkError(f"after training with {who} the ranks' weights differ")
        difference = (weights - found[first]).abs().max().item()
        if who not in lossy and difference > _TOLERANCE:
            raise BenchmarkError(f"{who}'s weights differ from {first}'s by {difference:.2g} after training")


def time_steps(
    test: Connection, where: str, rank: int, size: int, model: str, contenders: Sequence[str],
    steps: int,
) -> None:  # fmt: skip
    """Time training steps of the contenders in turns.

    Sends the bytes of the gradients, and for each contender four lists, with one number for each step, and the note.
    """
    work = WORKLOADS[model]
    with _worlds(where, rank, size, contenders) as groups:
        trainers = {who: Trainer(wrapped(who, work, groups)) for who in contenders}
        torch.manual_seed(1 + rank * work.own_batches)
        found: dict[str, tuple[list[float], list[float], list[float], list[float]]] = {
            who: ([], [], [], []) for who in contenders
        }
        if "auto" in trainers:
            for _ in range(_TUNING):
                trainers["auto"].step(work.batch())
            trainers["auto"] = _begin_anew(trainers["auto"].model, work.model)
        for turn in range(-_WARM_UPS, steps):
            batch = work.batch()
            for who in in_turns(list(trainers), turn):
                sync.barrier()
                before, began = sent_nbytes(), perf_counter()
                trainers[who].step(batch)
                seconds = perf_counter() - began
                if turn >= 0:
                    times, hidden, forward, sent = found[who]
                    times.append(seconds)
                    sent.append(sent_nbytes() - before)
                    step = getattr(trainers[who].model, "last_step", None)
                    if step is not None:
                        hidden.append(step.hidden_share)
                        forward.append(step.backward_started - step.forward_started)
        compare_weights(trainers, LOSSY)
        notes = {who: str(getattr(trainer.model, "bucket_tuning", None) or "") for who, trainer in trainers.items()}
        nbytes = sum(parameter.nbytes for parameter in trainers[ALONE].model.parameters())
        test.send((nbytes, {who: (*figures, notes[who]) for who, figures in found.items()}))
        test.recv()


def use_memory(test: Connection, where: str, rank: int, size: int, model: str, contender: str) -> None:
    """Train, and send ("begin", bytes of the largest bucket) and "end" around the steps whose memory `benchmark` reads."""
    with _worlds(where, rank, size, [contender]) as groups:
        trainer = Trainer(wrapped(contender, WORKLOADS[model], groups), keeps_gradients=contender == KEPT)
        trainer.model.zero_grad()
        test.send("ready")
        test.recv()
        for _ in range(_MEMORY_STEPS):
            trainer.step(WORKLOADS[model].batch())
        step = getattr(trainer.model, "last_step", None)
        test.send(max((bucket.nbytes for bucket in step.buckets), default=0) if step is not None else 0)
        test.recv()


def train_with_few_exchanges(
    test: Connection, where: str, rank: int, size: int, who: str, every: int, outer_steps: int
) -> None:
    """Train a network on a teacher's labels; send (seconds, loss on held-out samples, bytes sent, seconds waited)."""
    _keep_freed_memory()
    with _worlds(where, rank, size, [ALONE]):
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(1024, 64), nn.Tanh(), nn.Linear(64, 10))
        held_out = torch.randn(1024, 1024)
        torch.manual_seed(2)
        student: nn.Module = WORKLOADS["large"].model()
        model = DistributedDataParallel(student) if who == "data parallel" else student
        inner = torch.optim.AdamW(student.parameters(), lr=3e-4, fused=True)
        torch.manual_seed(3 + rank)
        options: dict[str, Any] = {"fragments": 4, "delay": every // 5, "alpha": 0.5, "compress": "int8"}
        diloco = sync.DiLoCo(student, inner, every=every, **options) if who == "diloco" else None
        with diloco or contextlib.nullcontext():
            sync.barrier()
            before, began = sent_nbytes(), perf_counter()
            for _ in range(every * outer_steps):
                inputs = torch.randn(_SAMPLES, 1024)
                inner.zero_grad()
                nn.functional.cross_entropy(model(inputs), _labels(teacher, inputs)).backward()
                (diloco or inner).step()
            seconds = perf_counter() - began
            sent = sent_nbytes() - before
            waited = diloco.savings.waited if diloco is not None else 0.0
            if diloco is not None:
                diloco.synchronize()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(student(held_out), _labels(teacher, held_out)).item()
        test.send((seconds, loss, sent, waited))
        test.recv()


def _keep_freed_memory() -> None:
    """Let the C library keep the memory that a step frees for the next one, whatever else a contender allocates.

    Otherwise a rank that trains alone gives back its gradients in each step, and touches 67 MiB of new pages in the next,
    which takes 30 of 107 ms. The exchanges of the other contenders happen to prevent that.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def _labels(teacher: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = teacher(inputs).argmax(dim=1)
    return found


@contextlib.contextmanager
def _worlds(where: str, rank: int, size: int, contenders: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Open a world of asyncdist as the default one, and yield the group of each contender that needs another."""
    arguments: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": _TIMEOUT}
    groups: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        sync.init_process_group(init_method=f"{where}-auto", **arguments)
        stack.callback(sync.destroy_process_group)
        if "tcp" in contenders:
            world = sync.process_group("tcp", init_method=f"{where}-tcp", group_name="tcp", **arguments)
            groups["tcp"] = stack.enter_context(world)
        timeout = timedelta(seconds=_TIMEOUT)
        for who, backend in WITH_TORCH.items():
            if who not in contenders:
                continue
            if torch.distributed.is_initialized():
                groups[who] = torch.distributed.new_group(backend=backend, timeout=timeout)
            else:
                torch.distributed.init_process_group(
                    backend, init_method=f"{where}-torch", rank=rank, world_size=size, timeout=timeout
                )
                stack.callback(torch.distributed.destroy_process_group)
                groups[who] = torch.distributed.group.WORLD
        yield groups


def wrapped(who: str, work: Workload, groups: Mapping[str, Any]) -> nn.Module:
    """Return a model for a contender. All have the same weights."""
    torch.manual_seed(0)
    module = work.model()
    if who in (ALONE, KEPT):
        return module
    if who in WITH_TORCH:
        return work.spread(module, groups[who])
    cap = "auto" if who == "auto" else None
    model = DistributedDataParallel(module, process_group=groups.get(who), bucket_cap_mb=cap)
    if who in LOSSY:
        model.register_async_comm_hook(hooks.bf16 if who == "bf16" else hooks.Quantized("int8"))
    return model


def _begin_anew(model: nn.Module, make: Any) -> Trainer:
    """Return a trainer of a wrapped model, with the weights that the others begin with."""
    torch.manual_seed(0)
    inner = model.module
    assert isinstance(inner, nn.Module)
    inner.load_state_dict(make().state_dict())
    return Trainer(model)
