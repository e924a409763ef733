"""`DistributedSampler`: each rank's share of a dataset, with the same indices as `torch.utils.data.DistributedSampler`.

Ranks take the indices of an epoch's order in turn, so after n samples on each of P ranks the first n * P indices are
consumed. This number is the position: the rest of the epoch can be dealt to any number of ranks. `asyncdist` exports it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from asyncdist.errors import UsageError
from asyncdist.groups import AnyGroup, default_group, resolve_group
from asyncdist.kernel import whole_number_of


class DistributedSampler(Sampler[int]):
    """Deal the indices of ``dataset`` to P ranks in turn: rank r gets positions r, r + P, r + 2P and so on.

    Every rank gets the same number of indices.

    The sampler can be saved and resumed within an epoch, on any number of ranks. A `torch.utils.data.DataLoader` reads
    ahead of the training loop, so the loop says what it has used: call `advance` with the size of the batch after each
    step, on every rank. `state_dict` then holds the epoch and the position.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks P; by default the size of the default group.
        rank: This process's rank, from 0 to P - 1; by default its rank in the default group.
        shuffle: Permute the indices, seeded by ``seed + epoch``; call `set_epoch` before each epoch.
        seed: Seed of the permutation, equal on all ranks.
        drop_last: Leave out the last indices that do not divide evenly, instead of repeating the first ones.

    Attributes:
        epoch: The number of the epoch.
        position: How many indices of the epoch's order all ranks together have consumed, as counted by `advance`. The
            next iteration begins there.

    Raises:
        UsageError: ``rank`` is not in ``range(num_replicas)``.

    Example:
        >>> sampler = DistributedSampler(dataset)
        >>> loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
        >>> sampler.load_state_dict(checkpoint["sampler"])  # when the job resumes
        >>> for epoch in range(sampler.epoch, 10):
        ...     sampler.set_epoch(epoch)
        ...     for batch in loader:
        ...         train(batch)
        ...         sampler.advance(len(batch))
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            group = default_group()
            num_replicas = group.size() if num_replicas is None else num_replicas
            rank = group.rank() if rank is None else rank
        if not isinstance(dataset, Sized):
            raise UsageError(f"DistributedSampler needs a dataset with a length, not {dataset!r}")
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        self._yielded, self._counted = False, False
        """Whether the sampler has yielded an index, and whether `advance` was called, since the last known position."""
        self._deal_to(whole_number_of("num_replicas", num_replicas), whole_number_of("rank", rank))

    def _deal_to(self, num_replicas: int, rank: int) -> None:
        if not 0 <= rank < num_replicas:
            raise UsageError(
                f"rank {rank} is out of range for {num_replicas} replicas: pass one from 0 to {num_replicas - 1}"
            )
        self.num_replicas, self.rank = num_replicas, rank
        self.num_samples = self._share_of(len(self.dataset))
        self.total_size = self.num_samples * num_replicas

    def _share_of(self, count: int) -> int:
        """Return how many of ``count`` indices each rank gets."""
        return count // self.num_replicas if self.drop_last else -(-count // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(count, generator=generator, device="cpu").tolist()
        else:
            order = list(range(count))
        total = len(self) * self.num_replicas
        left = order[self.position : self.position + total]
        missing = total - len(left)
        if missing:
            # Repeated more than once if there are more ranks than samples.
            left += (order * math.ceil(missing / count))[:missing]
        return self._yielding(left[self.rank :: self.num_replicas])

    def _yielding(self, indices: list[int]) -> Iterator[int]:
        for index in indices:
            self._yielded = True
            yield index

    def __len__(self) -> int:
        """Return the number of indices that an iteration yields that begins at the present position."""
        return self._share_of(max(0, len(self.dataset) - self.position))

    def set_epoch(self, epoch: int) -> None:
        """Select the permutation of the next iteration; call it with the same number on every rank.

        The position becomes 0, unless ``epoch`` is the present epoch.
        """
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0
            self._yielded = self._counted = False

    def set_group(self, group: AnyGroup = None) -> None:
        """Deal the rest of the epoch to the ranks of another group, as after `Group.regroup`; iterate anew afterwards.

        Args:
            group: The group of the ranks; None is the default group.
        """
        members = resolve_group(group)
        self._deal_to(members.size(), members.rank())

    def advance(self, count: int) -> None:
        """Count the samples with which the training loop has done a step, on every rank alike.

        Args:
            count: The samples of this rank: the size of its batch. Every rank consumes as many.
        """
        self.position += whole_number_of("count", count) * self.num_replicas
        self._counted = True

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the position, equal on all ranks: one checkpoint serves all.

        Warns if the sampler has yielded indices in this epoch, and `advance` has not been called.
        """
        if self._yielded and not self._counted:
            warnings.warn(
                "the state of this DistributedSampler says that no sample of the epoch was used, because advance() was not "
                "called: a DataLoader reads ahead, so call sampler.advance(len(batch)) after each step, on every rank",
                stacklevel=2,
            )
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": len(self.dataset),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint of any number of ranks; the next iteration begins at its position.

        Raises:
            UsageError: The dataset has another length, or the order is another one: seed or ``shuffle`` differ.
        """
        own = {"seed": self.seed, "shuffle": self.shuffle, "length": len(self.dataset)}
        for name, value in own.items():
            if state[name] != value:
                raise UsageError(
                    f"the checkpoint of a DistributedSampler has {name} {state[name]}, but this sampler has {value}: "
                    "resume with the same dataset, seed and shuffle, or begin a new epoch with set_epoch()"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self._yielded = self._counted = False
