"""The rows of docs/differences.md on both sides, a short hunt, and what the hunt calls wrong."""

import json

import numpy as np
import pytest

from tests.differences import record, reference, store_calls
from tests.differences.programs import Collectives, Step, StoreCall, StoreProgram, Tensor
from tests.differences.rows import ROWS

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def sides():
    """The ranks of gloo and of asyncdist."""
    with record.sides() as sides:
        yield sides


def test_page_is_that_of_the_records():
    assert record.page(json.loads(record.RECORDS.read_text())) == record.PAGE.read_text()


@pytest.mark.parametrize("name", ROWS)
def test_row_says_what_both_sides_do(sides, name):
    other, ours = sides
    known = json.loads(record.RECORDS.read_text())[name]
    assert ours.words(name) == known["ours"][record.VERSION]
    assert other.words(name) == known["other"][record.VERSION]


def test_programs_at_random_find_no_fault(tmp_path, run_python):
    # In a process of its own: each server of torch's TCPStore leaves a pipe open.
    hunt, out = record.HERE / "hunt.py", tmp_path / "differences.json"
    options = "--examples", "5", "--chunks", "9", "--seconds", "1000"
    status, output = run_python(hunt, *options, "--out", out)
    assert status == 0, output
    programs = json.loads(out.read_text())["programs"]
    assert set(programs) == {"collectives", "training", "stores"}


SUM = Collectives("torch", "first two", False, (Step("all_reduce", Tensor("float32", (2,))),))


def outcomes_of(program, change=lambda array: array, faults=()):
    """Return the outcomes of ranks whose results are right, but for a change."""
    [step] = program.steps
    found = []
    for rank in range(3):
        if rank == 2:
            found.append([])
            continue
        [due] = reference.expected(step, program.group, rank)
        array = change(due.array.astype(np.float32))
        found.append([("returned", [("float32", array.shape, array.tobytes())], list(faults))])
    return found


@pytest.mark.parametrize(
    ("change", "faults", "kind"),
    [
        (lambda array: array, (), "right"),
        (lambda array: array + np.float32([0, 0.01]), (), "wrong"),
        (lambda array: array * np.nan, (), "wrong"),
        (lambda array: array[:1], (), "wrong"),
        (lambda array: array, ("memory around an output was changed",), "wrong"),
    ],
    ids=["right", "another number", "NaN", "another shape", "memory around it"],
)
def test_result_is_judged(change, faults, kind):
    assert reference.judge(SUM, outcomes_of(SUM, change, faults)).kind == kind


def test_error_is_refused_if_asyncdist_names_it():
    for is_named, kind in ((True, "refused"), (False, "unnamed")):
        outcomes = [[("raised", "Error", "text", is_named)]] * 2 + [[]]
        assert reference.judge(SUM, outcomes).kind == kind


def test_answers_of_a_store_are_judged_by_a_dictionary():
    calls = (StoreCall("set", ("a", "1")), StoreCall("add", ("a", 2)), StoreCall("get", ("a",), "p"))
    program = StoreProgram(calls)
    failed = ("failed", "StoreTimeoutError", "", True)
    assert store_calls.judge(program, [None, 3, failed]).kind == "right"
    assert store_calls.judge(program, [None, 2, failed]).kind == "wrong"
    assert store_calls.judge(program, [None, 3, b"3"]).kind == "wrong"
    assert store_calls.judge(program, [None, ("failed", "Error", "", False), failed]).kind == "unnamed"
