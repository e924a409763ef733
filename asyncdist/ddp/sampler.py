"""`DistributedSampler`: each rank's share of a dataset, with the same indices as `torch.utils.data.DistributedSampler`.

`asyncdist` exports it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from asyncdist.collectives.arguments import whole_number_of
from asyncdist.errors import UsageError
from asyncdist.groups.default_world import default_group


class DistributedSampler(Sampler[int]):
    """Deal the indices of ``dataset`` to P ranks in turn: rank r gets positions r, r + P, r + 2P and so on.

    Every rank gets the same number of indices.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks P; by default the size of the default group.
        rank: This process's rank, from 0 to P - 1; by default its rank in the default group.
        shuffle: Permute the indices, seeded by ``seed + epoch``; call `set_epoch` before each epoch.
        seed: Seed of the permutation, equal on all ranks.
        drop_last: Leave out the last indices that do not divide evenly, instead of repeating the first ones.

    Raises:
        UsageError: ``rank`` is not in ``range(num_replicas)``.
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
        rank, num_replicas = whole_number_of("rank", rank), whole_number_of("num_replicas", num_replicas)
        if not isinstance(dataset, Sized):
            raise UsageError(f"DistributedSampler needs a dataset with a length, not {dataset!r}")
        if not 0 <= rank < num_replicas:
            raise UsageError(
                f"rank {rank} is out of range for {num_replicas} replicas: pass one from 0 to {num_replicas - 1}"
            )
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        shared = len(dataset) / num_replicas
        self.num_samples = math.floor(shared) if drop_last else math.ceil(shared)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            indices = torch.randperm(count, generator=generator, device="cpu").tolist()
        else:
            indices = list(range(count))
        if count:
            # Repeated more than once if there are more ranks than samples.
            indices *= math.ceil(self.total_size / count)
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Select the permutation of the next iteration; call it with the same number on every rank."""
        self.epoch = epoch
