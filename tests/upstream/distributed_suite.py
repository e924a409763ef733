"""Run torch's `DistributedTest`, which the installed torch contains, on one back end.

Usage: ``python distributed_suite.py BACKEND RANKS [TEST ...]``. Without names the program runs every test. It prints the
lines of `outcome_writer.py`. ``--list`` in place of BACKEND prints the names. `run.py` starts this program once per back
end.

Torch selects tests by the name of the back end when it defines them. Here it always selects gloo's tests. Afterwards
`BackendName` replaces the name, so that the default process group and its subgroups are those of BACKEND. A test that asks
for a group of gloo by name gets one.
"""

import os
import sys
import unittest
from types import ModuleType
from typing import Any

import torch
import torch.multiprocessing
from outcome_writer import OutcomeWriter, lines_on_stdout
from torch.testing._internal.common_distributed import TEST_SKIPS

TEST_SECONDS = "120"
"""A test that takes longer has failed. Torch's own limit is 300 s."""


class BackendName(str):
    """The name of a back end; equal to "gloo" too, because the tests choose between gloo's, NCCL's and MPI's variants."""

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(str(self))


def load_distributed_test(backend: str, ranks: int) -> ModuleType:
    """Return torch's module of tests, with gloo's tests selected and ``backend`` as the name of the back end."""
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", TEST_SECONDS)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A file as the init method selects the tests of timeouts; each test replaces its name.
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(ranks), "INIT_METHOD": "file:///replaced"}
    from torch.testing._internal.distributed import distributed_test

    import asyncdist.torch_backend  # noqa: F401

    # Torch runs 23 tests only with 8 ranks or more, unless the variable names MPI. They pass with 4 ranks, too.
    os.environ["BACKEND"] = "mpi"
    distributed_test.BACKEND = BackendName(backend)
    for test in vars(distributed_test.DistributedTest._DistTestBase).values():
        # Torch runs the tests of all_to_all on the CPU with MPI only.
        if getattr(test, "__unittest_skip_why__", "").startswith("Only MPI supports"):
            test.__unittest_skip__ = False
    return distributed_test


def define_case(module: ModuleType) -> type[unittest.TestCase]:
    """Return the test case. Its ranks are forked from this process, which has imported everything."""

    class TestDistributed(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, test: Any, elapsed: float) -> None:
            # Torch looks at rank 0 only.
            super()._check_return_codes(test, elapsed)
            skips = {skip.exit_code for skip in TEST_SKIPS.values()}
            statuses = [process.exitcode for process in self.processes]
            if test not in self.skip_return_code_checks and not {*statuses} <= {0, *skips}:
                raise AssertionError(f"the ranks ended with the statuses {statuses}")

    return TestDistributed


def main(backend: str, ranks: str, *names: str) -> int:
    """Run the tests; return 1 if one failed."""
    with lines_on_stdout() as output:
        torch.set_num_threads(1)
        case = define_case(load_distributed_test(backend, int(ranks)))
        every = unittest.defaultTestLoader.getTestCaseNames(case)
        if backend == "--list":
            print("\n".join(every), file=output, flush=True)
            return 0
        result = OutcomeWriter(output, name=lambda test: test.id().split(".")[-1])
        result.run_all([case(name) for name in names or every])
        return int(not result.wasSuccessful())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
