"""A handful of torch's own tests on the asyncdist back end; `make test-upstream` runs all of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]
SUITE = Path(__file__).parent / "distributed_suite.py"
PASSING = [
    "test_all_reduce_sum", "test_barrier_timeout_full_group", "test_batch_isend_irecv_gloo", "test_get_backend",
    "test_monitored_barrier_gloo", "test_monitored_barrier_gloo_rank_0_timeout", "test_monitored_barrier_gloo_subgroup",
]  # fmt: skip
SKIPPED = "test_DistributedDataParallel_SyncBatchNorm"


def test_tests_of_torch_pass_on_asyncdist():
    pytest.importorskip("expecttest", reason="torch's tests import it")
    command = [sys.executable, str(SUITE), "asyncdist", "4", *PASSING, SKIPPED]
    suite = subprocess.run(command, capture_output=True, text=True)
    results = [json.loads(line) for line in suite.stdout.splitlines()]
    outcomes = {result["test"]: result["outcome"] for result in results}
    assert outcomes == dict.fromkeys(PASSING, "passed") | {SKIPPED: "skipped"}, suite.stdout + suite.stderr
    assert suite.returncode == 0
