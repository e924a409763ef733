"""The flight recorder: dumps when a group fails, on a signal, and on request."""

import asyncio
import os
import secrets
import signal
import stat
import threading

import pytest
import torch

from asyncdist.config import Config
from asyncdist.errors import GroupError, UsageError
from asyncdist.kernel.tracing import desync_report, dump_signal
from asyncdist.kernel.tracing.recorder import Recorder
from asyncdist.testing.cluster import world_of
from tests.support.devices import devices_of


async def test_failed_group_writes_dump(tmp_path, transport):
    folder = tmp_path / "made"
    async with world_of(2, transport=transport, config=Config(dump_dir=str(folder))) as groups:
        await asyncio.gather(*(group.all_reduce(torch.ones(3)) for group in groups))
        pending = groups[0].all_reduce(torch.ones(3))
        groups[1].abort("enough")
        with pytest.raises(GroupError):
            await pending
        (records,) = desync_report.read(folder)
    assert [record.rank for record in records] == [0, 1]
    assert [record.groups["world"] for record in records] == [(0, 1)] * 2
    assert all("enough" in record.reason for record in records)
    (standing,) = desync_report.standings(records)
    assert (standing.number, list(standing.waiting), list(standing.behind)) == (2, [0], [1])
    assert standing.calls == {0: "all_reduce(3 x float32, SUM)"}


async def test_dump_is_written_without_the_lock_and_before_the_error_is_known(tmp_path, transport, monkeypatch):
    """A slow disk must not keep the thread that beats from looking."""
    write, looked = Recorder.write, []

    def slow_write(recorder, *arguments):
        progress = groups[recorder.rank].endpoint.progress
        looking = threading.Thread(target=progress.look, args=(lambda: bool(looked.append(recorder.rank)),))
        looking.start()
        looking.join()
        assert recorder.rank in looked
        return write(recorder, *arguments)

    monkeypatch.setattr(Recorder, "write", slow_write)
    async with world_of(2, transport=transport, config=Config(dump_dir=str(tmp_path))) as groups:
        pending = groups[0].all_reduce(torch.ones(3))
        groups[1].abort("enough")
        with pytest.raises(GroupError):
            await pending
        assert looked
        (records,) = desync_report.read(tmp_path)
        assert [record.rank for record in records] == [0, 1]


async def test_dump_contains_message_peers(tmp_path, transport):
    async with world_of(3, transport=transport) as groups:
        part = [groups[rank].world.new_group([1, 2]) for rank in range(3)]
        pending = part[2].recv(torch.ones(5), 0, tag=7)
        asked = part[1].recv_object_list([None], None, tag=8)
        groups[2].endpoint.recorder.dump(str(tmp_path), "as a test")
        ((record,),) = desync_report.read(tmp_path)
        (call,) = record.calls
        assert (call.call, record.groups[call.group][call.peer]) == ("recv(5 x float32)", 1)
        await asyncio.gather(part[1].send(torch.ones(5), 1, tag=7), pending)
        await asyncio.gather(part[2].send_object_list(["here"], 0, tag=8), asked)
        calls = {entry.op: entry.peer for group in groups for entry in group.endpoint.recorder}
        assert calls == {"recv": 0, "send": 1, "recv_object_list": None, "send_object_list": 0}


async def test_dump_contains_pending_operations_evicted_from_the_ring(tmp_path, transport):
    async with world_of(2, transport=transport, config=Config(flight_recorder_size=5)) as groups:
        for _ in range(3):
            await asyncio.gather(*(group.barrier() for group in groups))
        pending = groups[0].all_reduce(torch.ones(3))
        for _ in range(10):
            await asyncio.gather(groups[0].send(torch.ones(1), 1), groups[1].recv(torch.ones(1), 0))
        for group in groups:
            group.endpoint.recorder.dump(str(tmp_path), "as a test")
        (records,) = desync_report.read(tmp_path)
        assert [len(record.calls) for record in records] == [6, 5]
        (standing,) = desync_report.standings(records)
        assert (standing.number, list(standing.waiting), standing.behind) == (4, [0], {1: 3})
        await asyncio.gather(groups[1].all_reduce(torch.ones(3)), pending)
        assert len(list(groups[0].endpoint.recorder)) == 5


async def test_dump_contains_pending_device_operations(tmp_path):
    async with devices_of(2, config=Config(flight_recorder_size=5)) as groups:
        pending = groups[0].all_reduce(torch.ones(3))
        for _ in range(10):
            await asyncio.gather(groups[0].send(torch.ones(1), 1), groups[1].recv(torch.ones(1), 0))
        recorder = groups[0].host.endpoint.recorder
        assert [entry.op for entry in recorder if entry.op == "all_reduce" and entry.state == "pending"] == [
            "all_reduce"
        ]
        await asyncio.gather(groups[1].all_reduce(torch.ones(3)), pending)
        for group in groups:
            group.close()
        assert [pending.__name__ for pending in recorder.pending] == ["pending"]


def test_dump_does_not_follow_symbolic_links_and_is_readable_by_its_owner_only(tmp_path, monkeypatch):
    folder, victim, name = tmp_path / "shared", tmp_path / "victim", "asyncdist-world-rank0.json"
    folder.mkdir()
    victim.write_text("precious")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    for link in (name, ".guessed.unfinished"):
        (folder / link).symlink_to(victim)
    recorder = Recorder(0, 1, 10, "world")
    assert recorder.dump(str(folder), "the name of the unfinished file exists") is None
    monkeypatch.undo()
    umask = os.umask(0)
    try:
        path = recorder.dump(str(folder), "as a test")
    finally:
        os.umask(umask)
    assert victim.read_text() == "precious"
    assert path == str(folder / name)
    assert not os.path.islink(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize("folder", [".", "file/below"])
def test_dump_that_fails_is_logged_and_leaves_no_unfinished_file(tmp_path, caplog, folder):
    (tmp_path / "file").write_text("")
    (tmp_path / "asyncdist-world-rank0.json").mkdir()
    assert Recorder(0, 1, 10, "world").dump(str(tmp_path / folder), "as a test") is None
    assert "cannot write the flight recorder" in caplog.text
    assert {each.name for each in tmp_path.iterdir()} == {"asyncdist-world-rank0.json", "file"}


def test_oldest_groups_are_evicted(tmp_path):
    recorder = Recorder(0, 2, 3)
    for number in range(5):
        recorder.add_group(f"group {number}", (0, 1), lambda: 0)
    recorder.dump(str(tmp_path), "why")
    ((record,),) = desync_report.read(tmp_path)
    assert list(record.groups) == ["group 2", "group 3", "group 4"]


@pytest.fixture
def usr1():
    """Restore the handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("usr1")
def test_dump_signal_writes_and_calls_previous_handler(tmp_path):
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    config = Config(dump_dir=str(tmp_path), dump_signal="USR1")
    worlds = [Recorder(0, 1, 10, world, dump_dir=config.dump_dir) for world in ("one", "other")]
    for _ in worlds:
        dump_signal.install_signal_handler(config)
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "asyncdist-one-rank0.json",
        "asyncdist-other-rank0.json",
    ]
    written = desync_report.recent(desync_report.read(tmp_path))
    assert {record.world: record.reason for (record,) in written} == dict.fromkeys(
        ["one", "other"], "requested by signal USR1"
    )


@pytest.mark.usefixtures("usr1")
def test_signal_during_a_dump_writes_no_second_one(tmp_path, monkeypatch):
    config = Config(dump_dir=str(tmp_path), dump_signal="USR1")
    recorder, reasons = Recorder(0, 1, 10, dump_dir=config.dump_dir), []

    def dump(folder: str, reason: str) -> None:
        reasons.append(reason)
        if len(reasons) < 3:
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(recorder, "dump", dump)
    dump_signal.install_signal_handler(config)
    signal.raise_signal(signal.SIGUSR1)
    assert reasons == ["requested by signal USR1"]
    signal.raise_signal(signal.SIGUSR1)
    assert len(reasons) == 2


@pytest.mark.usefixtures("usr1")
def test_signal_skips_collected_recorders(tmp_path):
    config = Config(dump_dir=str(tmp_path), dump_signal="SIGUSR1")
    dump_signal.install_signal_handler(config)
    recorder = Recorder(0, 1, 10, dump_dir=config.dump_dir)
    del recorder
    signal.raise_signal(signal.SIGUSR1)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("usr1")
def test_signal_handler_off_main_thread_is_logged(tmp_path, caplog):
    config = Config(dump_dir=str(tmp_path), dump_signal="USR1")
    thread = threading.Thread(target=dump_signal.install_signal_handler, args=(config,))
    thread.start()
    thread.join()
    assert "create the first world on the main thread" in caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dump_dir": "/tmp", "dump_signal": "NONE"}, "no signal"),
        ({"dump_dir": "/tmp", "dump_signal": "KILL"}, "ASYNCDIST_DUMP_SIGNAL=KILL cannot be caught"),
        ({"dump_signal": "USR1"}, "DUMP_DIR"),
    ],
)
def test_invalid_dump_settings_are_rejected(settings, words):
    with pytest.raises(UsageError, match=words):
        dump_signal.install_signal_handler(Config(**settings))
