"""The benchmark on CUDA devices: a short run on CPU tensors, the contenders with the host as a device, and the report."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from asyncdist import sync
from asyncdist.cli.bench.measure import TimedContender, measure
from asyncdist.cli.bench.traffic import Traffic
from asyncdist.groups.group import Group
from asyncdist.kernel.transport import registry
from asyncdist_transports.staged import Staged
from benchmarks.__main__ import main
from benchmarks.devices import ranks
from benchmarks.devices.benchmark import COLLECTIVES, DevicesBenchmark, DevicesPlan
from benchmarks.grid import Case, GridReport

MIB = 1 << 20


@pytest.fixture
def report(unknown_machine):
    def case(part, nbytes, absent):
        facts = {"nbytes": nbytes, "device": "1 x NVIDIA H100", "absent": absent, "latest_ticks": {"awaited": 2e-3}}
        case = Case(part, part, facts=facts)
        for who, seconds in (("asyncdist", 1e-3), ("awaited", 1.1e-3), ("gloo", 80e-3), ("copy", 0.25e-3)):
            case.add(who, seconds, p99=2 * seconds, returned=seconds / 50)
        return case

    absent = {"nccl": "two ranks on one device"}
    cases = [case("all_reduce", 100 * MIB, absent), case("broadcast", 1 << 30, absent)]
    return GridReport(DevicesPlan(ranks=2), unknown_machine, cases)


def test_command_shows_and_writes_tables_json_and_a_picture(report, monkeypatch, tmp_path):
    plans = []
    monkeypatch.setattr(DevicesBenchmark, "run", lambda plan, progress: plans.append(plan) or report)
    run = CliRunner().invoke(main, ["devices", "all_reduce", "--repeat", "3", "--output", str(tmp_path)])
    assert run.exit_code == 0, run.output
    assert [(plan.parts, plan.repeat, plan.sizes[-1], plan.device) for plan in plans] == [
        (("all_reduce",), 3, 1 << 30, "cuda")
    ]
    page = (tmp_path / "device-2.md").read_text()
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| 100 MiB")]
    assert lines[0][1:] == ["asyncdist (auto)", "1.00 ms", "2.00 ms", "20.0 µs", "105 GB/s", "80.0×", "4.00×", "— |"]
    assert lines[1][-1] == "2.00 ms |"
    for words in ("1 x NVIDIA H100; ", "## broadcast, 2 ranks, CUDA tensors", "nccl is not measured: two ranks on one"):
        assert words in page
    assert json.loads((tmp_path / "device-2.json").read_text())["cases"][0]["medians"]["copy"]["figure"] == 0.25e-3
    assert (tmp_path / "device-2.png").read_bytes().startswith(b"\x89PNG")


def test_picture_has_a_line_for_each_measured_contender(report):
    figure = DevicesBenchmark.picture(report)
    panels = [panel for panel in figure.axes if panel.get_title(loc="left")]
    assert [panel.get_title(loc="left") for panel in panels] == [
        f"{part}, 2 ranks, CUDA tensors" for part in ("all_reduce", "broadcast")
    ]
    labels = [line.get_label() for line in panels[0].lines]
    assert labels == ["one process alone (the limit)", "gloo", "asyncdist, awaited", "asyncdist"]
    assert figure.get_supxlabel().startswith("1 x NVIDIA H100; ")


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_command_without_a_device_prints_one_sentence():
    run = CliRunner().invoke(main, ["devices"])
    assert run.exit_code == 2
    assert "Error: nothing was measured, as there is no CUDA device: torch " in run.output


@pytest.mark.processes
def test_ranks_measure_every_contender_on_cpu_tensors():
    plan = DevicesPlan(ranks=2, sizes=(4, 4096), repeat=3, device="cpu")
    report = DevicesBenchmark.run(plan)
    assert [(case.part, case.facts["nbytes"]) for case in report.cases] == [
        (part, nbytes) for part in COLLECTIVES for nbytes in (4, 4096)
    ]
    for case in report.cases:
        assert set(case.samples) == {"asyncdist", "awaited", "gloo", "copy"}
        assert all(case.median(who) > 0 for who in case.samples)
        assert set(case.facts["latest_ticks"]) == {"awaited"}


@pytest.fixture
def host_as_device(monkeypatch):
    """Let the host stand in for one CUDA device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)  # it accepts no host tensor
    monkeypatch.setattr(Staged, "probe", classmethod(lambda kind: None))
    started = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(Group, "_on", lambda *_: SimpleNamespace(backend="staged", all_reduce=lambda _: started))


def test_each_device_back_end_is_a_contender_or_has_a_reason(host_as_device, tmp_path):
    absent, backends = {}, registry.names(registry.DEVICE_BACKENDS)
    where, device = (tmp_path / "world").as_uri(), torch.device("cpu")
    with ranks.open_contenders(where, 0, 1, device, backends, absent) as (_, members):
        case = Traffic("all_reduce", 0, 1, 4096)
        timings = measure([TimedContender.of(member, case) for member in members], lambda: None, 3, 1, paced=True)
    assert set(timings) == {"asyncdist", "staged", "awaited", "gloo"}
    assert all(timing.calls == 3 and timing.median >= timing.returned for timing in timings.values())
    assert {"cuda_ipc", "torch's nccl"} <= set(absent)


@pytest.mark.parametrize("size", [2, 3])
def test_send_forwards_the_tensor_of_rank_0(size, together):
    def program(group):
        case = Traffic("send", group.rank(), size, 20, kind=ranks.SEND)
        for call in (ranks.send_through, ranks.send_through_host):
            case.load()
            call(case, sync, group)
            case.check("a test")

    together(size, program)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_copy_reads_and_writes_as_the_collective_does(collective):
    tensors = [torch.ones(4) for _ in range(3)]
    ranks.copy_alone(collective, tensors)
    assert [tensor.unique().tolist() for tensor in tensors] == [[3.0 if collective == "all_reduce" else 1.0]] * 3
