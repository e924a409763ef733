"""The cases of program_table.py: the class of this package computes what torch's class computes over gloo."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.processes import Nursery

_spec = importlib.util.spec_from_file_location("table_of_arguments", Path(__file__).parent / "table.py")
table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(table)

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

REFUSED = {
    "mixed_precision": "torch.autocast",
    "sparse_gradients": "sparse=False",
    # torch's own hooks raise these errors on processors, over gloo too.
    "batched_powerSGD_hook": "AssertionError",
    "quantization_pertensor_hook": "IndexError",
    "quantization_perchannel_hook": "IndexError",
    # The hook asks torch for the back end of `model.process_group`, which is not a group of torch.
    "hook_with_zero_step": "is not initialized in the world group map",
}
"""The cases that may raise an error in the class of this package, and a part of its text."""


@pytest.fixture
def ranks():
    with Nursery(table.PRELOAD) as nursery:
        yield nursery


def check(found, *, exact):
    for name, by in found.items():
        for contender in ("backend", "asyncdist"):
            errors = [each for each in by[contender] if isinstance(each, str)]
            if contender == "asyncdist" and errors and name in REFUSED:
                assert all(REFUSED[name] in each for each in errors), errors
            elif contender == "asyncdist":
                assert not errors, f"{name}: {errors}"
            if not errors and not any(isinstance(each, str) for each in by["gloo"]):
                assert by["gloo"][0], f"{name} has recorded something"
                tolerance = table.TOLERANCE.get(name, 1e-6)
                different = table.differences(by["gloo"], by[contender], exact=exact, tolerance=tolerance)
                assert different == "", f"{name}, {contender}"


@pytest.mark.parametrize(("world_size", "transport"), table.RUNS)
def test_all_cases_give_the_numbers_of_gloo(ranks, world_size, transport):
    """With two ranks the order of a sum does not matter, and an average is exact."""
    found = table.outcomes(ranks, world_size, transport, table.cases())
    check(found, exact=world_size <= 2)
    page = table.PAGE.read_text(encoding="utf-8")
    begin = f"<!-- begin of the table: runs with torch {table.installed_torch()} -->"
    if begin in page:
        # Run `python tests/ddp/table.py` if the page does not hold the table.
        assert table.summary(world_size, transport, found) in page.split(begin)[1].split("<!-- end")[0]
        if (world_size, transport) == table.RUNS[0] and table.installed_torch() == table.FIRST_TORCH:
            assert all(row in page for row in table.table(found).splitlines())
