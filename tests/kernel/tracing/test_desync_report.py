"""The report on the flight recorders of several ranks."""

import functools
import itertools
import json

import pytest
import torch

from asyncdist.base.ops import Collective, ReduceOp
from asyncdist.errors import UsageError
from asyncdist.kernel.memory.buffers import DTYPE_NUMBERS
from asyncdist.kernel.tracing import desync_report
from asyncdist.kernel.tracing.recorder import Entry, Recorder
from asyncdist.kernel.transport.wire_format import Fingerprint

SUM = Fingerprint(
    Collective.all_reduce, dtype=DTYPE_NUMBERS[torch.float32], reduction=ReduceOp.SUM.value, count=8
).pack()
SEND = Fingerprint(Collective.send, dtype=DTYPE_NUMBERS[torch.float32], count=8).pack()
BARRIER = Fingerprint(Collective.barrier).pack()


class Ranks:
    """Recorders of some ranks. All calls are relative to second 100 of their clocks; they write at second 200."""

    def __init__(self, folder, monkeypatch, size, world="w", kept=100):
        self.folder, self._monkeypatch, self.world = folder, monkeypatch, world
        self.recorders = [Recorder(rank, size, kept, world) for rank in range(size)]
        self.pending = [[] for _ in range(size)]
        for recorder, pending in zip(self.recorders, self.pending, strict=True):
            recorder.pending.append(lambda pending=pending: pending)
        self.group("world", range(size))

    def group(self, name, ranks, last=None):
        """Add a group; ``last`` is the number of its collectives by rank, if it differs from the recorded ones."""
        for rank in ranks:
            self.recorders[rank].add_group(name, tuple(ranks), functools.partial((last or {}).get, rank, 0))

    def call(
        self, rank, number, begun=0.0, ended=None, *, group="world", op="all_reduce", fingerprint=SUM, peer=None
    ):  # fmt: skip
        entry = Entry(group, op, number, fingerprint, 32)
        entry.peer = peer
        entry.issued, entry.finished = 100.0 + begun, 0.0 if ended is None else 100.0 + ended
        self.recorders[rank].add(entry)
        if ended is None:
            self.pending[rank].append(entry)

    def records(self, *writing, at=0.0):
        self._monkeypatch.setattr("time.perf_counter", lambda: 200.0)
        self._monkeypatch.setattr("time.time", lambda: 1_000_000.0 + at)
        for rank in writing or range(len(self.recorders)):
            assert self.recorders[rank].dump(str(self.folder), "because") is not None
        self._monkeypatch.undo()
        return desync_report.read(self.folder)[0]


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    return lambda size, *more: Ranks(tmp_path, monkeypatch, size, *more)


def report(records):
    return "\n".join(desync_report.tell(records))


@pytest.mark.parametrize("calls", [0, 2])
def test_report_of_completed_calls(ranks, calls):
    three = ranks(3)
    for rank, number in itertools.product(range(3), range(1, calls + 1)):
        three.call(rank, number, number - 1, number)
    records = three.records()
    assert report(records) == "No collective is pending: every call has completed on all of these ranks."
    (standing,) = desync_report.standings(records)
    assert standing.number is None


def test_report_names_rank_that_has_not_called(ranks):
    three = ranks(3)
    for rank in range(3):
        three.call(rank, 1, 0, 1)
    three.call(0, 2, 60)
    three.call(2, 2, 70)
    assert report(three.records()).splitlines() == [
        "group 'world', collective #2: all_reduce(8 x float32, SUM) has not completed.",
        "  ranks 0 and 2 called it 30.0 to 40.0 s ago.",
        "  rank 1 has not called it: the other ranks wait for it. Its last call was #1, "
        "all_reduce(8 x float32, SUM), which ended 99.0 s before the dump.",
    ]


def test_report_when_other_ranks_continued_past_a_missing_call(ranks):
    """The root of a broadcast may continue long before the other ranks receive."""
    two = ranks(2)
    for number in (1, 2):
        two.call(0, number, number, number + 0.5, op="broadcast")
    two.call(0, 3, 3)
    (standing,) = desync_report.standings(two.records())
    assert (standing.number, standing.through, standing.behind) == (1, [0], {1: 0})
    assert "rank 1 has called nothing in this group" in report(desync_report.read(two.folder)[0])


def test_report_of_different_calls(ranks):
    three = ranks(3)
    three.call(0, 1)
    three.call(1, 1, op="barrier", fingerprint=BARRIER)
    three.call(2, 1)
    calls = "ranks 0 and 2 called all_reduce(8 x float32, SUM); rank 1 called barrier()"
    assert f"the ranks made different calls. {calls}." in report(three.records())


def test_report_names_different_calls_that_fail_a_rank_in_an_earlier_call(ranks):
    three = ranks(3)
    for rank in (0, 1):
        three.call(rank, 1, 0, 1)
    three.call(0, 2)
    three.call(1, 2, op="barrier", fingerprint=BARRIER)
    three.call(2, 1, 98)
    assert report(three.records()).splitlines() == [
        "group 'world', collective #2: the ranks made different calls. rank 0 called all_reduce(8 x float32, SUM); "
        "rank 1 called barrier().",
        "  ranks 0 and 1 called it 100.0 s ago.",
        "  rank 2 has not called it: the other ranks wait for it. Its last call was #1, all_reduce(8 x float32, SUM), "
        "which began 2.0 s before the dump.",
    ]


def test_report_names_rank_without_dump(ranks):
    three = ranks(3)
    for rank in (0, 2):
        three.call(rank, 1)
    text = report(three.records(0, 2))
    assert text.startswith("rank 1 left no flight recorder")
    assert "  Nothing is known about rank 1 of this group." in text


def test_evicted_call_does_not_count_as_missing(ranks):
    two = ranks(2, "w", 10)
    two.group("world", range(2), last={0: 5, 1: 5})
    for number in range(1, 6):
        two.call(0, number, 0, 1)
        two.call(1, number, 0, 1)
    for _ in range(10):
        two.call(0, 0, 2, 3, op="send", fingerprint=0)
    assert "No collective is pending" in report(two.records())


def test_pending_call_is_found_behind_later_calls(ranks):
    three = ranks(3, "w", 10)
    three.group("world", range(3), last={0: 3, 1: 2, 2: 4})
    for number in range(1, 4):
        three.call(0, number, 1, 2 if number < 3 else None)
        three.call(2, number, 1, 2)
    for _ in range(10):
        three.call(0, 0, 2, 3, op="send", fingerprint=0)
        three.call(1, 0, 2, 3, op="recv", fingerprint=0)
        three.call(2, 0, 2, 3, op="recv", fingerprint=0)
    records = three.records()
    (standing,) = desync_report.standings(records)
    assert (standing.number, list(standing.waiting), standing.through, standing.behind) == (3, [0], [2], {1: 2})
    assert report(records).splitlines() == [
        "group 'world', collective #3: all_reduce(8 x float32, SUM) has not completed.",
        "  rank 0 called it 99.0 s ago.",
        "  rank 1 has not called it: the other ranks wait for it. Its last call was #2, which has completed.",
    ]


def test_blocked_groups_are_reported_first(ranks):
    four = ranks(4)
    four.group("pair", (1, 2))
    for rank in range(4):
        four.call(rank, 1, 0, 1)
    four.call(1, 1, group="pair")
    first, second = desync_report.standings(four.records())
    assert (first.group, first.ranks, first.number, list(first.behind)) == ("pair", (1, 2), 1, [2])
    assert (second.group, second.number) == ("world", None)


def test_groups_with_equal_names_are_distinguished_by_ranks(ranks):
    four = ranks(4)
    four.group("half", (0, 1))
    four.group("half", (2, 3))
    for rank in range(3):
        four.call(rank, 1, 0, 1 if rank < 2 else None, group="half")
    held_up = [one for one in desync_report.standings(four.records()) if one.number is not None]
    assert [(one.group, one.ranks, list(one.waiting), list(one.behind)) for one in held_up] == [
        ("half", (2, 3), [2], [3])
    ]


def test_report_of_unmatched_messages(ranks):
    two = ranks(2)
    two.call(0, 7, 90, op="recv", fingerprint=SEND, peer=1)
    two.call(0, 7, 95, op="recv", fingerprint=SEND, peer=1)
    two.call(1, 3, 90, op="recv_object_list", fingerprint=0)
    assert report(two.records()).splitlines()[:2] == [
        "rank 0 waits for 2 messages; the oldest, a recv(8 x float32) from rank 1 (tag 7, 32 bytes), has been pending for "
        "10.0 s.",
        "rank 1 waits for 1 message; the oldest, a recv_object_list from any rank (tag 3, 32 bytes), has been pending for "
        "10.0 s.",
    ]


def test_message_peer_is_reported_as_world_rank(ranks):
    four = ranks(4)
    four.group("half", (2, 3))
    four.call(3, 1, 90, op="send", fingerprint=SEND, peer=0, group="half")
    assert "rank 3 waits for 1 message; the oldest, a send(8 x float32) to rank 2 (tag 1," in report(four.records())


def test_report_of_slowest_rank(ranks):
    two = ranks(2)
    for number in range(1, 11):
        late = number != 5
        two.call(0, number, number + (0.0 if late else 0.25), number + 0.5)
        two.call(1, number, number + (0.125 if late else 0.0), number + 0.5)
    (standing,) = desync_report.standings(two.records())
    paces = desync_report.paces(desync_report.read(two.folder)[0], standing.group, standing.ranks)
    assert (paces[0].last, paces[1].last) == (0.1, 0.9)
    assert (paces[0].lateness, paces[1].lateness) == pytest.approx((0.0, 0.125))
    assert paces[1].duration == pytest.approx(0.375)


def test_only_worlds_dumped_at_the_same_time_are_reported(ranks):
    ranks(3, "old").records()
    ranks(1, "other").records(at=95.0)
    two = ranks(2, "new")
    two.records(at=100.0)
    worlds = desync_report.read(two.folder)
    assert [desync_report.name_of(records) for records in worlds] == ["world new", "world other", "world old"]
    assert [[record.rank for record in records] for records in desync_report.recent(worlds)] == [[0, 1], [0]]


def test_later_dump_replaces_earlier_one(ranks):
    one = ranks(1)
    one.records()
    one.call(0, 1)
    (record,) = one.records(at=1.0)
    assert len(record.calls) == 1


def test_folder_without_dumps_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="ASYNCDIST_DUMP_DIR"):
        desync_report.read(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({"time": 1, "clock": 1, "groups": {}, "entries": 5})])
def test_foreign_file_is_rejected(tmp_path, content):
    (tmp_path / "asyncdist-w-rank0.json").write_text(content)
    with pytest.raises(UsageError, match=r"rank0\.json is no flight recorder"):
        desync_report.read(tmp_path)


@pytest.mark.parametrize(
    ("part", "fact", "value"),
    [
        ("header", "rank", "one"), ("header", "world_size", None), ("header", "world", 3), ("header", "host", ["a"]),
        ("header", "time", "now"), ("entry", "group", ["world"]), ("entry", "op", 1), ("entry", "seq", "1"),
        ("entry", "issued", None), ("entry", "fingerprint", []),
    ],
)  # fmt: skip
def test_field_of_wrong_type_is_rejected(ranks, tmp_path, part, fact, value):
    one = ranks(1)
    one.call(0, 1)
    one.records()
    (path,) = tmp_path.iterdir()
    content = json.loads(path.read_text())
    (content if part == "header" else content["entries"][0])[fact] = value
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"rank0\.json is no flight recorder"):
        desync_report.read(tmp_path)
