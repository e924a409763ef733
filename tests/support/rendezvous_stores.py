"""Blocking stores in which ranks may meet, by name: each is made from the path of a file that some of them use."""

from collections.abc import Callable
from typing import Any

import torch.distributed as torch_distributed

from asyncdist.store import FileStore, HashStore, PrefixStore

BLOCKING_STORES: dict[str, Callable[[str], Any]] = {
    "HashStore": lambda path: HashStore(),
    "FileStore": lambda path: FileStore(path, 3),
    "PrefixStore": lambda path: PrefixStore("part", HashStore()),
    "torch HashStore": lambda path: torch_distributed.HashStore(),
    "torch PrefixStore": lambda path: torch_distributed.PrefixStore("part", torch_distributed.FileStore(path, 3)),
}
