"""torchft: its own tests of managers, DDP, LocalSGD, DiLoCo, transports of checkpoints and reconfigured groups.

They come with its wheel. Most of them make a `ProcessGroupGloo` of torchft for each replica, which is a thread; asyncdist's
group takes its place. Results are the tests that pass.
"""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torchft
from regression import report
from torchft import process_group

import asyncdist.torch_backend
from asyncdist.torch_backend.torch_group import NoGroupYet

BACKEND = "asyncdist"
FILES = (
    "manager_test.py",
    "manager_integ_test.py",
    "ddp_test.py",
    "local_sgd_test.py",
    "local_sgd_integ_test.py",
    "process_group_test.py",
    "parameter_server_test.py",
    "checkpointing/pg_transport_test.py",
    "checkpointing/http_transport_test.py",
)
RECONFIGURED = "reconfigure_test.py"
"""It names the back ends, and starts processes, which see no replaced class."""
LEFT_OUT = (
    "baby",  # groups of gloo in processes of their own
    "native",  # groups of gloo by name
    "nccl",
    "test_gloo_timeout",  # passes a handle that it has made up
    "test_ddp_skip_init_sync",  # its threads draw from one generator of random numbers, so it fails now and then
    "test_quorum_timeout",  # allows one second for the look-up of the machine's own name
)


class Group(process_group.ProcessGroupWrapper):
    """asyncdist's group for tests that wrap groups: wrappers read handles, so these are torchft's with asyncdist's in them.

    A program passes asyncdist's group to its `Manager` as it is (torchft_training.py).
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        members = NoGroupYet(0, 1, timeout.total_seconds())
        super().__init__(timeout, asyncdist.torch_backend.ProcessGroup(members, None, dist.HashStore()))

    def getBackendName(self) -> str:
        return "torchft-asyncdist"

    def get_reconfigure_handle(self) -> str:
        handle = json.loads(super().get_reconfigure_handle())
        return json.dumps(handle | {"of asyncdist": self.parent.get_reconfigure_handle()})

    def reconfigure(self, opts: Any) -> Any:
        opts.handles = [json.loads(handle)["of asyncdist"] for handle in opts.handles]
        return self.parent.reconfigure(opts)

    def set_timeout(self, timeout: timedelta) -> None:
        self.parent.set_timeout(timeout)

    def abort(self, errored: bool = True) -> None:
        self.parent.abort()

    def shutdown(self) -> None:
        self.parent.shutdown()


class Outcomes:
    """A plug-in of pytest that notes the tests by outcome."""

    def __init__(self) -> None:
        self.tests: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # "rerun" is an outcome, too.
        if report.when == "call" or not report.passed:
            self.tests.setdefault(report.outcome, []).append(report.nodeid.rpartition("/")[2])


def main() -> None:
    folder = Path(torchft.__file__).parent
    copy = Path(RECONFIGURED)
    copy.write_text((folder / RECONFIGURED).read_text(encoding="utf-8").replace('("gloo",)', f'("{BACKEND}",)'))
    if BACKEND != "gloo":
        process_group.ProcessGroupGloo = torchft.ProcessGroupGloo = Group
    outcomes = Outcomes()
    choice = " and ".join(f"not {name}" for name in LEFT_OUT)
    files = [str(copy), *(str(folder / name) for name in FILES)]
    # The empty file keeps pytest from looking for settings. Some tests allow a second or less: torchft repeats them, too.
    Path("pytest.ini").write_text("[pytest]\n")
    pytest.main(["-q", "-c", "pytest.ini", "--reruns", "2", "-k", choice, *files], plugins=[outcomes])
    assert not outcomes.tests.get("failed"), outcomes.tests["failed"]
    if dist.is_initialized():
        # A test leaves a group behind.
        dist.destroy_process_group()
    dist.init_process_group("asyncdist", store=dist.HashStore(), rank=0, world_size=1)
    own = f"_{BACKEND}"
    report(passed=sorted(name.removesuffix(own) if RECONFIGURED in name else name for name in outcomes.tests["passed"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
