"""The benchmark on CUDA devices; the host stands in for a device."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from asyncdist import sync
from asyncdist.cli import main
from asyncdist.cli.bench.contenders import devices
from asyncdist.cli.bench.contenders.contenders import of_api
from asyncdist.cli.bench.measure import measure_case
from asyncdist.cli.bench.pace import StartPacer
from asyncdist.cli.bench.plan import ON_DEVICES, BenchPlan
from asyncdist.cli.bench.report.device_table import device_page
from asyncdist.cli.bench.report.plot import benchmark_figure
from asyncdist.cli.bench.result import Report, ResultRow
from asyncdist.cli.bench.workloads.collectives import traffic
from asyncdist.groups.group import Group
from asyncdist_transports.staged import Staged


@pytest.fixture
def report(timing, unknown_machine):
    def row(name, nbytes, absent):
        timings = {
            "asyncdist": timing(1, 0.02),
            "awaited": timing(1.1),
            "gloo": timing(80),
            "copy": timing(0.25, 0.01),
        }
        return ResultRow(name, nbytes, 2, timings, absent, "1 x NVIDIA H100", {"awaited": 2e-3})

    rows = [row("all_reduce", 100 << 20, {"nccl": "two ranks on one device"}), row("broadcast", 1 << 30, {})]
    return Report(BenchPlan(device="cuda"), unknown_machine, rows)


def test_json_has_times_ratios_and_absent_contenders(report):
    found = report.as_json()["device_rows"][0]
    ours = found["contenders"]["asyncdist"]
    assert (ours["median_us"], ours["returns_us"]) == (pytest.approx(1000), pytest.approx(20))
    assert ours["times_faster_than_gloo"] == pytest.approx(80)
    assert ours["times_as_long_as_copy"] == pytest.approx(4)
    assert found["latest_tick_us"] == {"awaited": pytest.approx(2000)}
    assert found["absent"] == {"nccl": "two ranks on one device"}


def test_page_has_a_table_for_each_collective(report):
    page = device_page(report)
    lines = [line.split(" | ") for line in page.markdown().splitlines() if line.startswith("| 100 MiB")]
    assert lines[0][1:] == ["asyncdist (auto)", "1.00 ms", "2.00 ms", "20.0 µs", "105 GB/s", "80.0×", "4.00×", "— |"]
    assert lines[1][-1] == "2.00 ms |"
    assert "## broadcast, 2 ranks, CUDA tensors" in page.markdown()
    assert "nccl is not measured: two ranks on one device" in page.markdown()
    assert [grid.table().row_count for grid in page.grids] == [4, 4]


def test_command_measures_shows_and_writes(report, monkeypatch, tmp_path):
    plans = []
    monkeypatch.setattr("asyncdist.kernel.transport.device_streams.cuda_missing", lambda: None)
    monkeypatch.setattr("asyncdist.cli.bench.launch.run", lambda plan, progress: plans.append(plan) or report)
    run = CliRunner().invoke(
        main, ["bench", "--device", "cuda", "--ranks", "1", "--output", str(tmp_path), "--repeat", "3"]
    )
    assert run.exit_code == 0, run.output
    [plan] = plans
    assert (plan.collectives, plan.ranks, plan.repeat, plan.device) == (("all_reduce", "broadcast"), 1, 3, "cuda")
    assert (plan.sizes[0], plan.sizes[-1]) == (4 << 10, 1 << 30)
    assert "1 x NVIDIA H100" in run.output
    assert "data is there" in run.output
    assert json.loads((tmp_path / "device-1.json").read_text())["device_rows"]
    assert "| 1 GiB |" in (tmp_path / "device-1.md").read_text()
    assert (tmp_path / "device-1.png").read_bytes().startswith(b"\x89PNG")


def test_figure_has_a_line_for_each_measured_contender(report):
    figure = benchmark_figure(report)
    panels = [panel for panel in figure.axes if panel.get_title(loc="left")]
    assert [panel.get_title(loc="left") for panel in panels] == [
        "all_reduce, 2 ranks, CUDA tensors",
        "broadcast, 2 ranks, CUDA tensors",
    ]
    labels = [line.get_label() for line in panels[0].lines]
    assert labels == ["one process alone (the limit)", "gloo", "asyncdist, awaited", "asyncdist"]
    assert figure.get_supxlabel().startswith("1 x NVIDIA H100; ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_command_without_a_device_prints_one_sentence():
    run = CliRunner().invoke(main, ["bench", "--device", "cuda"])
    assert run.exit_code == 2
    assert run.output.startswith("Error: nothing was measured, as there is no CUDA device: torch ")
    assert [line.partition(" ")[0] for line in run.output.splitlines()] == ["Error:", "see"]


# -- a rank, with the host in place of a device ------------------------------------------------------


@pytest.fixture
def host_as_device(monkeypatch):
    """Let the host stand in for one CUDA device."""
    nothing = {name: lambda *_: None for name in ("set_device", "synchronize")}
    for name, call in {**nothing, "device_count": lambda: 1, "get_device_name": lambda _: "a host"}.items():
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)  # it accepts no host tensor
    monkeypatch.setattr(Staged, "probe", classmethod(lambda kind: None))
    started = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(Group, "_on", lambda *_: SimpleNamespace(backend="staged", all_reduce=lambda _: started))


def test_rank_measures_every_usable_contender(host_as_device, tmp_path):
    plan = BenchPlan(ON_DEVICES, (4, 4096), ranks=1, repeat=3, device="cpu")
    shares = []
    with devices.open_device_contenders(plan, 0, tmp_path, StartPacer(0, [None])) as contenders:
        rows = [measure_case(contenders, *case, 0, plan, lambda: None, shares.append) for case in plan.cases]
    assert [(row.name, row.nbytes) for row in rows] == plan.cases
    for row in rows:
        assert {"asyncdist", "staged", "awaited", "gloo"} == set(row.timings)
        assert all(timing.calls == 3 and timing.median >= timing.returned for timing in row.timings.values())
        assert set(row.latest_ticks) == {"awaited"}
        assert {"cuda_ipc", "torch's nccl"} <= set(row.absent)
    assert shares


@pytest.mark.parametrize("size", [2, 3])
def test_send_forwards_the_tensor_of_rank_0(size, together):
    def program(group):
        case = traffic("send", group.rank(), size, 20)
        case.load()
        of_api("asyncdist", sync, group).call_of(case)()
        case.check("asyncdist")
        case.load()
        case.call_through_host(sync, group)
        case.check("gloo")

    together(size, program)


@pytest.mark.parametrize("collective", ON_DEVICES)
def test_copy_reads_and_writes_as_the_collective_does(collective):
    copy = devices.copy_on_device(StartPacer(0, [None]), torch.empty)
    case = traffic(collective, 0, 3, 16)
    copy.verify(case, lambda: None)
    assert [len(times) for times in copy.run(case, 5, lambda: None, lambda: None)] == [2] * 5
