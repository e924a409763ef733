"""Run one of torch's own test files on one back end.

Usage: ``python file_suite.py BACKEND FILE [TEST ...]``. Without names the program runs every test of the file. It prints
the lines of `outcome_writer.py`. ``--list`` in place of BACKEND prints the names. `run.py` starts this program once per
file and back end.

The files name gloo themselves. Here torch creates a group of BACKEND wherever a program asks for one of gloo, and counts
these groups: a test that creates none says nothing about the back end. The ranks are forked from this process instead of
spawned, so that they inherit the replacement, and need not import torch again.
"""

import dataclasses
import functools
import importlib
import multiprocessing
import os
import re
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from outcome_writer import OutcomeWriter, lines_on_stdout, short_name
from torch.distributed import distributed_c10d

CAPABILITIES = ("supports_coalescing", "supports_dropped_p2p_work", "supports_gather_single")
"""What asyncdist can do and gloo cannot, by the names of torch's list of back ends."""

TEST_SECONDS = "120"
"""A test that takes longer has failed. Torch's own limit is 300 s."""


def replace_gloo(backend: str) -> Callable[[], int]:
    """Let torch create groups of ``backend`` instead of gloo's.

    Returns:
        A function that returns how many such groups this process and its children have created.
    """
    c10d: Any = distributed_c10d
    create = c10d._new_process_group_helper
    created = multiprocessing.get_context("fork").Value("i", 0)

    @functools.wraps(create)
    def create_of_backend(
        group_size: int, group_rank: int, ranks: list[int], name: Any, *args: Any, **kwargs: Any
    ) -> Any:
        replaced = re.sub(r"\bgloo\b", backend, str(dist.BackendConfig(dist.Backend(name)))) if name else name
        if replaced and backend in replaced:
            with created.get_lock():
                created.value += 1
        return create(group_size, group_rank, ranks, replaced, *args, **kwargs)

    c10d._new_process_group_helper = create_of_backend
    return lambda: created.value


def fork_always() -> None:
    """Let torch and the tests fork where they ask for another way to start a process."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.set_start_method("fork")
    for module in (multiprocessing, torch.multiprocessing):
        module.get_context = lambda method=None: fork  # type: ignore[attr-defined]


def cases_of(suite: Any) -> Iterator[unittest.TestCase]:
    """Yield the tests of a nested suite."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from cases_of(item)
        else:
            yield item


def describe_asyncdist(folder: Path) -> None:
    """Tell the tests of all back ends, which read a list in ``c10d_backend_common.py``, what asyncdist can do."""
    if not (folder / "c10d_backend_common.py").exists():
        return
    common: Any = importlib.import_module("c10d_backend_common")
    entries = [
        dataclasses.replace(entry, **{name: True for name in CAPABILITIES if hasattr(entry, name)})
        if entry.name == "gloo"
        else entry
        for entry in common.C10D_BACKENDS
    ]
    common.C10D_BACKENDS = tuple(entries)


def main(backend: str, path: str, *names: str) -> int:
    """Run the tests; return 1 if one failed."""
    with lines_on_stdout() as output:
        torch.set_num_threads(1)
        os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", TEST_SECONDS)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if backend == "asyncdist":
            import asyncdist.torch_backend  # noqa: F401
        fork_always()
        groups = replace_gloo(backend)
        sys.path.insert(0, str(Path(path).parent))
        if backend == "asyncdist":
            describe_asyncdist(Path(path).parent)
        # A file that cannot be imported has one test, which fails with the reason.
        cases = list(cases_of(unittest.defaultTestLoader.loadTestsFromName(Path(path).stem)))
        if backend == "--list":
            print("\n".join(map(short_name, cases)), file=output, flush=True)
            return 0
        result = OutcomeWriter(output, groups=groups)
        result.run_all([case for case in cases if not names or short_name(case) in names])
        return int(not result.wasSuccessful())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
