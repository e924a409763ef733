"""``asyncdist info``: versions, transports, devices, settings, and the choice of algorithms."""

import dataclasses
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from asyncdist.cli import main
from asyncdist.config import Config, variable_of
from asyncdist.errors import TransportUnavailableError
from asyncdist.groups.calibration.profile import FEW_LANES, MANY_LANES, MANY_LANES_WITH_THREADS, write_profile
from asyncdist.kernel.algorithms.selection import Model, explain
from asyncdist.kernel.engine.drivers import waiting
from asyncdist.kernel.engine.drivers.wait_policy import WaitMode
from asyncdist.kernel.transport import registry
from asyncdist_transports.staged import Staged

DEVICES = torch.cuda.is_available()


def info(*arguments, **environment):
    run = CliRunner(env=environment).invoke(main, ["info", *arguments])
    assert run.exit_code == 0, run.output
    return run.output


def row(output, first):
    """Return the words of the line that begins with ``first``."""
    (line,) = [line for line in output.splitlines() if line.split()[:1] == [first]]
    return line.split()


def test_info_shows_versions_transports_and_addresses():
    output = info()
    assert row(output, "torch") == ["torch", metadata.version("torch")]
    assert row(output, "tcp")[1:] == ["yes", "asyncdist_transports.tcp.transport.TcpTransport"]
    assert row(output, "inproc")[1] == "yes"
    assert "127.0.0.1" in output


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("arguments", [("info",), ("info", "--help"), ("--help",), ("--version",)])
def test_failed_write_to_the_standard_output_is_reported(arguments):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "asyncdist.cli", *arguments]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.stderr, run.returncode) == ("Error: cannot write to the standard output: No space left on device\n", 1)


def test_info_says_how_a_rank_waits_on_this_machine(monkeypatch):
    assert "sleeps at once, because ASYNCDIST_SPIN_US is 0" in " ".join(info(ASYNCDIST_SPIN_US="0").split())
    said = {
        (WaitMode.SLEEP, 0.43): "sleeps at once: other threads kept this command from its core for 43% of the time",
        (WaitMode.SPIN, 0.0): "polls for 300 µs and then sleeps: no other thread competes for its core",
        None: "polls for 300 µs; this system does not say",
    }
    for found, text in said.items():
        monkeypatch.setattr(waiting, "mode_here", lambda seconds, found=found: found)
        assert text in " ".join(info().split())


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {},
            "2, or 4 if the hosts find at the start that these are faster, for messages of 4 MiB and more; with threads: "
            "where other programs compete for the cores",
        ),
        ({"ASYNCDIST_CALIBRATE": "0"}, "2 for messages of 4 MiB and more; with threads: where other"),
        (
            {"ASYNCDIST_TCP_LANES": "3", "ASYNCDIST_STRIPE_NBYTES": "1M", "ASYNCDIST_TCP_THREADS": "never"},
            "3 for messages of 1 MiB and more; with threads: never",
        ),
        ({"ASYNCDIST_PROFILE": "fast"}, "4 for messages of 4 MiB and more; with threads: always"),
    ],
)
def test_info_says_over_how_many_connections_a_large_message_goes(environment, said, tmp_path):
    if "ASYNCDIST_PROFILE" in environment:
        path = tmp_path / "profile.json"
        values = {"alpha": 1e-5, "beta": 1e-9, "overhead": 1e-5, FEW_LANES: 1e-9}
        write_profile(path, {**values, MANY_LANES: 0.9e-9, MANY_LANES_WITH_THREADS: 0.5e-9}, {})
        environment = {"ASYNCDIST_PROFILE": str(path)}
    assert f"TCP connections {said}" in " ".join(info(**environment).split())


def test_unusable_device_back_end_has_a_reason():
    output = info()
    assert row(output, "staged")[1:3] == (
        ["yes", "asyncdist_transports.staged.Staged"] if DEVICES else ["no:", "torch"]
    )
    for name in registry.names(registry.DEVICE_BACKENDS):
        reason = registry.load_class(name, registry.DEVICE_BACKENDS).probe()
        assert " ".join(row(output, name)[1:]).startswith("yes" if reason is None else f"no: {reason[:40]}")


def test_info_lists_cuda_devices(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H100 [80GB]", uuid="12345678-9abc", total_memory=80 << 30)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert row(info(), "cuda:1") == ["cuda:1", "NVIDIA", "H100", "[80GB]", "12345678-9abc", "80.0", "GiB"]


def test_info_lists_device_back_ends_by_preference(monkeypatch):
    class Preferred(Staged):
        preference = 30

    def load_class(name, group=registry.TRANSPORTS, load=registry.load_class):
        if name == "cuda_ipc":
            raise TransportUnavailableError("it broke")
        return Preferred if name == "nccl" else load(name, group)

    monkeypatch.setattr(registry, "load_class", load_class)
    output = info()
    assert row(output, "cuda_ipc")[1:4] == ["no:", "it", "broke"]
    first_words = [line.split()[0] for line in output.splitlines() if line.strip()]
    assert [word for word in first_words if word in ("nccl", "cuda_ipc", "staged")] == ["nccl", "cuda_ipc", "staged"]


def test_info_lists_changed_settings_or_all_with_value_and_default():
    output = info("--settings", ASYNCDIST_TCP_LANES="4", ASYNCDIST_TOKEN="hush")
    for field in dataclasses.fields(Config):
        assert row(output, variable_of(field))
    assert row(output, "ASYNCDIST_TCP_LANES")[1:3] == ["4", str(Config().lanes)]
    assert row(output, "ASYNCDIST_TOKEN")[1] == "(set)"
    assert "hush" not in output
    changed, count = info(ASYNCDIST_TCP_LANES="4"), len(dataclasses.fields(Config))
    assert row(changed, "ASYNCDIST_TCP_LANES")[1:3] == ["4", str(Config().lanes)]
    assert "ASYNCDIST_TIMEOUT" not in changed
    assert f"{count - 1} of {count} settings have their defaults; to see all: asyncdist info --settings" in changed


def test_json_has_everything_but_the_token():
    output = info("--json", ASYNCDIST_TOKEN="hush", ASYNCDIST_TRANSPORT="smh")
    found = json.loads(output)
    assert found["machine"]["torch"] == metadata.version("torch")
    assert {each["name"]: each["usable"] for each in found["transports"]}["inproc"] is True
    assert "127.0.0.1" in {each["address"] for each in found["addresses"]}
    assert set(found["settings"]) == {variable_of(field) for field in dataclasses.fields(Config)}
    assert found["settings"]["ASYNCDIST_TOKEN"]["value"] == "(set)"
    assert "there is no transport 'smh'" in found["problems"][0]
    assert "hush" not in output


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("ASYNCDIST_SOCKET_IFNAME", "nosuch", "ASYNCDIST_SOCKET_IFNAME='nosuch' matches no usable interface"),
        ("ASYNCDIST_ALGORITHM", "all_reduce=magic", "there is no schedule 'magic' for all_reduce; there are"),
        ("ASYNCDIST_TRANSPORT", "smh", "ASYNCDIST_TRANSPORT='smh': there is no transport 'smh'; there are inproc"),
    ],
)
def test_settings_that_cannot_be_used_are_reported(variable, value, problem):
    output = info(**{variable: value})
    assert problem in output
    assert row(output, variable)
    assert problem not in info()


@pytest.mark.parametrize(("collective", "ranks"), [("all_reduce", 4), ("broadcast", 3), ("all_gather", 3)])
def test_table_shows_the_decision_of_the_cost_model(collective, ranks):
    output = info("--collective", collective, "--ranks", str(ranks), "--sizes", "4,1M")
    for nbytes, label in ((4, ["4", "B"]), (1 << 20, ["1", "MiB"])):
        (expected,) = explain(collective, ranks, [nbytes], model=Model(segment_nbytes=Config().segment_nbytes))
        (line,) = [line.split() for line in output.splitlines() if line.split()[:2] == label]
        assert line[2] == expected.chosen
        predicted = [value for value in expected.microseconds.values() if value is not None]
        assert [float(word.replace(",", "")) for word in line[3:] if word[0].isdigit()] == [
            pytest.approx(value, abs=0.051) for value in predicted
        ]
    assert f"ASYNCDIST_ALGORITHM={collective}=" in output
    assert "the cheapest one runs" in output
    assert "Ranks that share memory use shared-memory collectives instead" in output


def test_forced_schedule_is_marked_and_an_unknown_one_refused():
    output = info("--collective", "all_reduce", "--sizes", "4", ASYNCDIST_ALGORITHM="all_reduce=ring")
    assert row(output, "4")[2] == "ring"
    assert "forced by ASYNCDIST_ALGORITHM=all_reduce=ring" in output
    assert "A forced algorithm also runs between ranks that share memory" in output
    run = CliRunner(env={"ASYNCDIST_ALGORITHM": "all_reduce=magic"}).invoke(main, ["info", "--collective", "barrier"])
    assert run.exit_code == 2
    assert "there is no schedule 'magic' for all_reduce; there are doubling" in run.output
