"""DistributedSampler: each rank's share of a dataset, index for index as torch.utils.data.distributed deals it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from asyncdist.errors import UsageError
from asyncdist.groups.default_world import default_group


class DistributedSampler(Sampler[int]):
    """Deal the indices of ``dataset`` to ``num_replicas`` ranks in turn: rank r gets the r-th, the (r+P)-th, and so on.

    ``num_replicas`` and ``rank`` default to those of the default group. With ``shuffle`` the order is a permutation
    seeded by ``seed + epoch``, so call `set_epoch` before each epoch. Every rank gets equally many indices: the first
    ones are given out again at the end, or with ``drop_last`` the last ones are left out.
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
        if not 0 <= rank < num_replicas:
            raise UsageError(f"rank {rank} is none of {num_replicas} replicas: pass one from 0 to {num_replicas - 1}")
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
            indices *= math.ceil(self.total_size / count)  # more than once where ranks outnumber samples
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration; call it with the same number on every rank."""
        self.epoch = epoch
