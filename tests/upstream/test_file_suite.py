"""Files of torch's tests on the asyncdist back end, with a small file of the same kind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]
HERE = Path(__file__).parent
NAME = "test_c10d_pybackend.py"
FILE = """\
import sys
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase


class Ranks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def start(self, backend):
        dist.init_process_group(
            backend, store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=self.world_size
        )
        return type(dist.group.WORLD).__module__.split(".")[0]

    def test_group_of_gloo_is_replaced(self):
        package = self.start("cpu:gloo")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((3,), 2.0))
        self.assertEqual(package == "asyncdist", sys.argv[1] == "asyncdist")

    def test_fails_in_one_rank(self):
        self.start("gloo")
        self.assertEqual(self.rank, 0)

    def test_skipped_in_the_ranks(self):
        self.skipTest("no reason")


class Plain(unittest.TestCase):
    def test_without_group(self):
        pass

    def test_subtests(self):
        for number in range(3):
            with self.subTest(number):
                self.assertNotEqual(number, 1)


class Fixture(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise ValueError("no fixture")

    def test_after_fixture(self):
        pass
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)


@pytest.fixture
def checkout(tmp_path):
    """A folder like a checkout of torch with one file of tests."""
    pytest.importorskip("expecttest", reason="torch's tests import it")
    folder = tmp_path / "checkout" / "test" / "distributed"
    folder.mkdir(parents=True)
    (folder / NAME).write_text(FILE)
    return tmp_path / "checkout"


@pytest.mark.parametrize("backend", ["asyncdist", "gloo"])
def test_each_test_has_its_outcome_and_its_number_of_groups(checkout, tmp_path, backend):
    suite = run(tmp_path, str(HERE / "file_suite.py"), backend, str(checkout / "test" / "distributed" / NAME))
    results = {result["test"]: result for result in map(json.loads, suite.stdout.splitlines())}
    assert {name: (result["outcome"], result["groups"]) for name, result in results.items()} == {
        "Ranks.test_group_of_gloo_is_replaced": ("passed", 2),
        "Ranks.test_fails_in_one_rank": ("failed", 2),
        "Ranks.test_skipped_in_the_ranks": ("skipped", 0),
        "Plain.test_without_group": ("passed", 0),
        "Plain.test_subtests": ("failed", 0),
        "Fixture.test_after_fixture": ("failed", 0),
    }, suite.stderr
    assert "no fixture" in results["Fixture.test_after_fixture"]["reason"]
    assert suite.returncode == 1


def test_run_continues_and_repeats_a_changed_file(checkout, tmp_path):
    program = [str(HERE / "run.py"), "--suite", NAME, "--source", str(checkout), "--output", "out", "--page", "page.md"]
    assert run(tmp_path, *program, "-k", "Plain").returncode == 1
    [outcomes] = (tmp_path / "out").glob("torch-*/outcomes.jsonl")
    page = (tmp_path / "page.md").read_text()
    assert "| 1, 1, 0 | 1, 1, 0 | 0 |" in page  # passed, failed, skipped; groups
    assert f"{NAME}: `Plain.test_subtests` | failed | failed |" in page
    run(tmp_path, *program, "-k", "without")
    assert len(outcomes.read_text().splitlines()) == 4, "two tests on two back ends"
    (checkout / "test" / "distributed" / NAME).write_text("import no_such_module")
    assert "No module named 'no_such_module'" in run(tmp_path, *program, "--backend", "asyncdist").stdout
    assert len(outcomes.read_text().splitlines()) == 5


def test_missing_checkout_is_reported_and_nothing_runs(tmp_path):
    program = [str(HERE / "run.py"), "--suite", NAME, "--source", str(tmp_path), "--output", "out"]
    result = run(tmp_path, *program)
    assert result.returncode == 3, result.stderr
    assert f"{NAME} cannot run: {tmp_path} has no folder test/distributed" in result.stdout
