"""``asyncdist info``: versions, transports, devices, settings, and the choice of algorithms."""

from __future__ import annotations

import dataclasses
from importlib import metadata

import pytest
import torch
from click.testing import CliRunner

from asyncdist.algorithms.selection import Model, explain
from asyncdist.cli import main
from asyncdist.config import Config
from asyncdist.errors import TransportUnavailableError
from asyncdist.transport import registry
from asyncdist_transports.staged import Staged

DEVICES = torch.cuda.is_available()


def info(*arguments: str, **environment: str) -> str:
    run = CliRunner(env=environment).invoke(main, ["info", *arguments])
    assert run.exit_code == 0, run.output
    return run.output


def row(said: str, first: str) -> list[str]:
    """Return the words of the line that begins with ``first``."""
    (line,) = [line for line in said.splitlines() if line.split()[:1] == [first]]
    return line.split()


def test_info_shows_versions_transports_and_addresses():
    said = info()
    assert row(said, "torch") == ["torch", metadata.version("torch")]
    assert row(said, "tcp")[1:] == ["yes", "asyncdist_transports.tcp.transport.TcpTransport"]
    assert row(said, "inproc")[1] == "yes"
    assert "127.0.0.1" in said


def test_unusable_device_back_end_has_a_reason():
    said = info()
    assert row(said, "staged")[1:3] == (["yes", "asyncdist_transports.staged.Staged"] if DEVICES else ["no:", "torch"])
    for name in registry.names(registry.DEVICE_BACKENDS):
        reason = registry.load_class(name, registry.DEVICE_BACKENDS).probe()
        assert " ".join(row(said, name)[1:]).startswith("yes" if reason is None else f"no: {reason[:40]}")


class Properties:
    name, uuid, total_memory = "NVIDIA H100 [80GB]", "12345678-9abc", 80 << 30


class Teleport(Staged):
    name, preference = "teleport", 30


def test_info_lists_cuda_devices(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(registry, "names", named)
    monkeypatch.setattr(registry, "load_class", loaded)
    said = info()
    assert row(said, "cuda:1") == ["cuda:1", "NVIDIA", "H100", "[80GB]", "12345678-9abc", "80.0", "GiB"]
    assert row(said, "staged")[1] == "yes"
    assert row(said, "broken")[1:4] == ["no:", "it", "broke"]
    order = [line.split()[0] for line in said.splitlines() if line.split()[:1] and line.split()[0] in ORDER]
    assert order == ORDER


ORDER = ["teleport", "broken", "staged"]


def named(group=registry.TRANSPORTS, names=registry.names):
    return [*names(group), *(["broken", "teleport"] if group == registry.DEVICE_BACKENDS else [])]


def loaded(name, group=registry.TRANSPORTS, load=registry.load_class):
    if name == "broken":
        raise TransportUnavailableError("it broke")
    return Teleport if name == "teleport" else load(name, group)


def test_info_lists_every_setting_with_value_and_default():
    said = info(ASYNCDIST_TCP_LANES="4", ASYNCDIST_TOKEN="hush")
    for field in dataclasses.fields(Config):
        assert row(said, field.metadata["variable"])
    assert row(said, "ASYNCDIST_TCP_LANES")[1:3] == ["4", str(Config().lanes)]
    assert row(said, "ASYNCDIST_TOKEN")[1] == "(set)"
    assert "hush" not in said


def test_rule_without_a_matching_interface_is_reported():
    said = info(ASYNCDIST_SOCKET_IFNAME="nosuch")
    assert "ASYNCDIST_SOCKET_IFNAME='nosuch' matches no usable interface" in said
    assert row(said, "ASYNCDIST_TIMEOUT")


def test_settings_with_unknown_names_are_reported():
    said = info(ASYNCDIST_ALGORITHM="all_reduce=magic", ASYNCDIST_TRANSPORT="smh")
    assert "ASYNCDIST_ALGORITHM='all_reduce=magic': there is no schedule 'magic' for all_reduce; there are" in said
    assert "ASYNCDIST_TRANSPORT='smh': there is no transport 'smh'; there are inproc" in said
    assert "there is no" not in info()


@pytest.mark.parametrize(("collective", "ranks"), [("all_reduce", 4), ("broadcast", 3), ("all_gather", 3)])
def test_table_shows_the_decision_of_the_cost_model(collective, ranks):
    said = info("--collective", collective, "--ranks", str(ranks), "--sizes", "4,1M")
    for nbytes, label in ((4, ["4", "B"]), (1 << 20, ["1", "MiB"])):
        (expected,) = explain(collective, ranks, [nbytes], model=Model(segment_nbytes=Config().segment_nbytes))
        (line,) = [line.split() for line in said.splitlines() if line.split()[:2] == label]
        assert line[2] == expected.chosen
        predicted = [value for value in expected.microseconds.values() if value is not None]
        assert [float(word.replace(",", "")) for word in line[3:] if word[0].isdigit()] == [
            pytest.approx(value, abs=0.051) for value in predicted
        ]
    assert f"ASYNCDIST_ALGORITHM={collective}=" in said
    assert "the cheapest one runs" in said
    assert "Ranks that share memory use shared-memory collectives instead" in said


def test_forced_schedule_is_marked():
    said = info("--collective", "all_reduce", "--sizes", "4", ASYNCDIST_ALGORITHM="all_reduce=ring")
    assert row(said, "4")[2] == "ring"
    assert "forced by ASYNCDIST_ALGORITHM=all_reduce=ring" in said
    assert "A forced algorithm also runs between ranks that share memory" in said


def test_unknown_forced_schedule_is_refused():
    run = CliRunner(env={"ASYNCDIST_ALGORITHM": "all_reduce=magic"}).invoke(main, ["info", "--collective", "barrier"])
    assert run.exit_code == 2
    assert "there is no schedule 'magic' for all_reduce; there are doubling" in run.output
