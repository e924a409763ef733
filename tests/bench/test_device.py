"""The benchmark on devices, as far as it can be looked at without one: what is measured, and how it is shown."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from asyncdist.bench.machine import machine
from asyncdist.bench.pace import StartPacer
from asyncdist.bench.plan import ON_DEVICES, BenchPlan
from asyncdist.bench.report import device_table
from asyncdist.bench.result import DeviceRow, DeviceTiming, Report, Timing
from asyncdist.bench.workloads import device
from asyncdist.cli import main
from asyncdist.errors import BenchmarkError
from asyncdist.groups.group import Group
from asyncdist_transports.staged import Staged


def timing(there, returns):
    return DeviceTiming(Timing.of([returns]), Timing.of([there]))


def row(collective="all_reduce", nbytes=100 << 20, **changed):
    timings = {
        "asyncdist": timing(1e-3, 20e-6),
        "awaited": timing(1.1e-3, 1.1e-3),
        "gloo": timing(80e-3, 80e-3),
        "copy": timing(250e-6, 10e-6),
    }
    return DeviceRow("1 x NVIDIA H100", collective, nbytes, 2, timings, {"awaited": 2e-3}, {}, **changed)


@pytest.fixture
def report():
    rows = [row(), row("broadcast", 1 << 30)]
    rows[0].absent["nccl"] = "two ranks on one device"
    return Report(BenchPlan(device="cuda"), dict.fromkeys(machine(), "?"), device_rows=rows)


def test_figures_and_ratios(report):
    found = report.as_json()["device_rows"][0]
    assert found["contenders"]["asyncdist"]["median_us"] == pytest.approx(1000)
    assert found["contenders"]["asyncdist"]["returns_us"] == pytest.approx(20)
    assert found["contenders"]["asyncdist"]["times_faster_than_gloo"] == pytest.approx(80)
    assert found["contenders"]["asyncdist"]["times_as_long_as_copy"] == pytest.approx(4)
    assert found["contenders"]["gloo"]["times_faster_than_gloo"] is None
    assert found["latest_tick_us"] == {"awaited": pytest.approx(2000)}
    assert found["absent"] == {"nccl": "two ranks on one device"}


def test_the_table_shows_them(report):
    page = device_table.device_markdown(report, "a machine")
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| 100 MiB")]
    assert lines[0][1:] == ["asyncdist (auto)", "1.00 ms", "1.00 ms", "20.0 µs", "105 GB/s", "80.0×", "4.00×", "— |"]
    assert lines[1][-1] == "2.00 ms |"
    assert lines[2][-3] == "—"
    assert "## broadcast, 2 ranks, CUDA tensors" in page
    assert "nccl does not compete: two ranks on one device" in page
    assert len(device_table.device_tables(report)) == 2


def test_the_command_plans_shows_and_writes(report, monkeypatch, tmp_path):
    plans = []
    monkeypatch.setattr("asyncdist.transport.device_streams.cuda_missing", lambda: None)
    monkeypatch.setattr("asyncdist.bench.processes.run", lambda plan, progress: plans.append(plan) or report)
    said = CliRunner().invoke(
        main, ["bench", "--device", "cuda", "--ranks", "1", "--output", str(tmp_path), "--repeat", "3"]
    )
    assert said.exit_code == 0, said.output
    [plan] = plans
    assert (plan.collectives, plan.ranks, plan.repeat, plan.device) == (("all_reduce", "broadcast"), 1, 3, "cuda")
    assert (plan.sizes[0], plan.sizes[-1]) == (4 << 10, 1 << 30)
    assert "1 x NVIDIA H100" in said.output
    assert "data is there" in said.output
    assert json.loads((tmp_path / "device.json").read_text())["device_rows"]
    assert "| 1 GiB |" in (tmp_path / "device.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_measured_and_one_sentence_says_so():
    said = CliRunner().invoke(main, ["bench", "--device", "cuda"])
    assert said.exit_code == 2
    assert said.output.startswith("Error: nothing was measured, as there is no CUDA device: torch ")
    assert len(said.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["--device", "cuda", "barrier"], "--device cuda measures only all_reduce, broadcast, send"),
        (["send"], "send is measured only with --device cuda"),
        (["--ranks", "1"], "at least 2 ranks on the CPU"),
        (["--device", "tpu"], "'tpu' is not one of"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked, words):
    said = CliRunner().invoke(main, ["bench", *asked])
    assert said.exit_code == 2
    assert words in said.output


# -- what a rank does, on the host in a device's place -----------------------------------------------


@pytest.fixture
def pretended(monkeypatch):
    """Have the host stand in for one CUDA device."""
    nothing = {name: lambda *_: None for name in ("set_device", "synchronize", "empty_cache")}
    for name, call in {**nothing, "device_count": lambda: 1, "get_device_name": lambda _: "a host"}.items():
        monkeypatch.setattr(torch.cuda, name, call)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)  # it takes nothing that stands in
    monkeypatch.setattr(Staged, "probe", classmethod(lambda kind: None))
    started = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(Group, "on", lambda *_: SimpleNamespace(backend="staged", all_reduce=lambda _: started))


def test_a_rank_measures_everybody_and_says_who_is_absent(pretended, tmp_path):
    plan = BenchPlan(ON_DEVICES, (4, 4096), ranks=1, repeat=3, device="cpu")
    shares = []
    rows = list(device.measure_device(plan, 0, tmp_path, StartPacer(0, [None]), shares.append))
    assert [(each.collective, each.nbytes) for each in rows] == plan.cases
    for each in rows:
        assert {"asyncdist", "staged", "awaited", "gloo"} <= set(each.timings)
        assert all(one.there.calls == 3 and one.there.median >= one.returns.median for one in each.timings.values())
        assert set(each.ticks) == {"awaited"}
    assert {"cuda_ipc", "torch's nccl"} <= set(rows[0].absent)
    assert not rows[1].absent
    assert shares


@pytest.mark.parametrize("size", [2, 3])
def test_a_message_passes_from_rank_to_rank(size, together):
    def program(group):
        tensor = torch.full((5,), float(group.rank() + 1))
        device._ours(group, "send", tensor)()
        return tensor.tolist()

    assert together(size, program) == [[1.0] * 5] * size


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("gloo", [True, False])
def test_a_message_passes_on_by_torch_too(rank, gloo, monkeypatch):
    from torch import distributed

    said = []
    monkeypatch.setattr(distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(distributed, "recv", lambda tensor, peer, group: said.append(peer) or tensor.fill_(1))
    monkeypatch.setattr(distributed, "send", lambda tensor, peer, group: said.append((peer, tensor[0].item())))
    tensor = torch.full((5,), rank + 1.0)
    device._theirs(None if gloo else "nccl", "send", tensor)()
    assert tensor.tolist() == [1.0] * 5
    assert said == [[(1, 1.0)], [0, (2, 1.0)], [1]][rank]


def test_a_wrong_result_ends_the_run(pretended):
    right = torch.empty(100)
    device._load(right, 0)
    device._check("ours", "broadcast", right, 2)
    device._check("ours", "all_reduce", right * 0 + device._pattern(right) * 2 + 3, 2)
    right[50] += 1
    with pytest.raises(BenchmarkError, match="ours: broadcast of 400 bytes on a device gave a wrong result"):
        device._check("ours", "broadcast", right, 2)
    with pytest.raises(BenchmarkError, match="instead of 3"):
        device._glance("ours", "all_reduce", torch.ones(4), 2)


@pytest.mark.parametrize("collective", ON_DEVICES)
def test_copies_alone_read_and_write_what_ranks_would(collective, pretended):
    tensors = [torch.full((4,), float(number + 1)) for number in range(3)]
    device._READS_AND_WRITES[collective](tensors)
    assert all(torch.equal(each, torch.full((4,), 6.0 if collective == "all_reduce" else 1.0)) for each in tensors)
    assert device._copied(StartPacer(0, [None]), "cpu", collective, 4, 3, 5).there.calls == 5
