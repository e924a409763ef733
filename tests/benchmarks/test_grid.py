"""The grid of the benchmarks: cases, their comparison with targets, their JSON, and the commands made from plans."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import CLASSES, main
from benchmarks.grid import Case, GridReport, figure_within, side_by_side, times_at_least
from benchmarks.store.benchmark import StoreBenchmark, StorePlan


def case_of(unit, ours, torchs, target):
    case = Case("part", "a name", unit, targets=[target])
    case.add("asyncdist", ours)
    if torchs is not None:
        case.add("torch", torchs)
    return case


@pytest.mark.parametrize(
    ("case", "ratio", "reached"),
    [
        (case_of("/s", 30.0, 20.0, times_at_least(1.5, "asyncdist", "torch")), 1.5, True),
        (case_of("/s", 29.0, 20.0, times_at_least(1.5, "asyncdist", "torch")), 1.45, False),
        (case_of("s", 2.0, 3.0, times_at_least(1.0, "asyncdist", "torch")), 1.5, True),
        (case_of("s", 4.0, 2.0, times_at_least(1.0, "asyncdist", "torch")), 0.5, False),
        (case_of("KiB", 19.0, None, figure_within(20.0, "asyncdist", "KiB")), None, True),
        (case_of("KiB", 21.0, None, figure_within(20.0, "asyncdist", "KiB")), None, False),
        (case_of("/s", 19.0, None, figure_within(20.0, "asyncdist", "/s")), None, False),
    ],
)
def test_case_compares_its_ratio_or_its_figure_with_the_target(case, ratio, reached):
    assert (case.times_better("asyncdist", "torch"), case.reached) == (ratio, reached)


def test_figures_are_medians_of_the_rounds():
    case = Case("part", "a name", "/s")
    for value in (1.0, 5.0, 3.0):
        case.add("asyncdist", value, sent=2 * value)
        case.add("gloo", 1.0)
    assert (case.median("asyncdist"), case.median("asyncdist", "sent")) == (3.0, 6.0)
    assert case.ratios("asyncdist", "gloo") == [1.0, 5.0, 3.0]
    assert case.of("gloo", "sent") == case.of("torch") == []


def test_table_shows_contenders_side_by_side():
    cases = [
        case_of("s", 50e-6, 200e-6, figure_within(60e-6, "asyncdist")),
        case_of("/s", 20_000.0, 4_000.0, figure_within(30_000.0, "asyncdist", "/s")),
        case_of("KiB", 2.5, None, figure_within(20.0, "asyncdist", "KiB")),
    ]
    contenders = {"asyncdist": "asyncdist", "tcp": "TCP", "torch": "torch RPC"}
    grid = side_by_side("", cases, contenders, ("asyncdist", "torch"))
    assert list(grid.columns) == ["case", "asyncdist", "torch RPC", "vs torch RPC", "target", "reached"]
    assert [row[1:] for row in grid.rows] == [
        ["50.0 µs", "200 µs", "4.00×", "≤ 60.0 µs", "yes"],
        ["20,000/s", "4,000/s", "5.00×", "≥ 30,000/s", "no"],
        ["2.5 KiB", "—", "—", "≤ 20 KiB", "yes"],
    ]


@pytest.fixture
def plans(monkeypatch, unknown_machine):
    """The plans of the benchmark of the store, which are recorded instead of executed; each reports the same two cases."""
    cases = [
        case_of("/s", 1234.5, 1000.0, times_at_least(1.0, "asyncdist", "torch")),
        case_of("KiB", 2.5, None, figure_within(20.0, "asyncdist", "KiB")),
    ]
    found: list[StorePlan] = []

    def run(plan, progress):
        found.append(plan)
        return GridReport(plan, unknown_machine, cases)

    monkeypatch.setattr(StoreBenchmark, "run", run)
    return found


def test_command_shows_and_writes_the_report(plans, tmp_path):
    run = CliRunner().invoke(main, ["store", "--rounds", "3", "--output", str(tmp_path / "out")])
    assert run.exit_code == 0, run.output
    assert plans == [StorePlan(rounds=3)]
    assert "1,234" in run.output
    page = (tmp_path / "out/store.md").read_text()
    assert "| a name | 1,234/s | 1,000/s | 1.23× | ≥ 1× | yes |" in page
    assert page.startswith("# The store\n\n?, ? cores")
    found = json.loads((tmp_path / "out/store.json").read_text())
    assert found["plan"]["rounds"] == 3
    assert found["cases"][0]["samples"] == {"asyncdist": {"figure": [1234.5]}, "torch": {"figure": [1000.0]}}
    assert [case["targets"] for case in found["cases"]] == [
        [{"target": "≥ 1×", "value": 1.2345, "reached": True}],
        [{"target": "≤ 20 KiB", "value": 2.5, "reached": True}],
    ]


def test_command_measures_selected_parts(plans):
    run = CliRunner().invoke(main, ["store", "--only", "torch,crowd", "--clients", "8"])
    assert run.exit_code == 0, run.output
    assert plans == [StorePlan(only=("torch", "crowd"), clients=(8,))]
    assert CliRunner().invoke(main, ["store", "--only", "nothing"]).exit_code == 2


@pytest.mark.parametrize("clients", ["1,0", "many"])
def test_invalid_number_of_clients_is_named(clients):
    run = CliRunner().invoke(main, ["store", "--clients", clients])
    assert run.exit_code == 2
    assert "is not a list of positive numbers such as 1,8" in run.output


@pytest.mark.parametrize("name", CLASSES)
def test_help_of_each_command_has_its_options_and_defaults(name):
    run = CliRunner().invoke(main, [name, "--help"])
    assert run.exit_code == 0
    assert f"python -m benchmarks {name} " in run.output
    for words in ("[default: ", "--output"):
        assert words in run.output
