"""The journal: committed frames are recovered, a torn end is cut off, damage is refused with its position."""

import contextlib
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.errors import JournalError, ProtocolError
from asyncdist.store.persistence import log_format
from asyncdist.store.persistence.journal import Journal
from asyncdist.store.protocol.long_messages import LONG_NBYTES
from asyncdist.store.protocol.operations import Op
from asyncdist.store.state import change_log
from asyncdist.store.state.change_log import ChangeLog, replay, snapshot
from asyncdist.store.state.machine import StoreState
from asyncdist.store.state.model import Contents, MemoryQuota

MANY = 1 << 30
BODIES = [b"\x93\x01\xa1a\xc4\x01" + bytes([number]) for number in range(4)]  # set a to 0, 1, 2, 3


@pytest.fixture(autouse=True, scope="module")
def _no_disk() -> Iterator[None]:
    """`test_power_failure.py` tests what is flushed."""
    with mock.patch.object(os, "fsync"), mock.patch.object(os, "fdatasync"):
        yield


def recorded_state(quota: MemoryQuota | None = None) -> tuple[StoreState, ChangeLog]:
    log = ChangeLog()
    log.start(lambda: None)
    return StoreState(quota=quota, log=log), log


def opened(folder: Path, compact_nbytes: int = MANY) -> tuple[Journal, Contents]:
    journal = Journal(folder, compact_nbytes=compact_nbytes)
    assert journal.contents is not None
    return journal, journal.contents


def held(folder: Path) -> dict[str, bytes]:
    """Return the values that a journal has when it is opened."""
    journal, contents = opened(folder)
    journal.close()
    return contents.values


def written(folder: Path, bodies: list[bytes] = BODIES) -> list[int]:
    """Commit some frames; return the log's length before each, and at the end."""
    journal, _ = opened(folder)
    ends = []
    for body in bodies:
        ends.append((folder / "log-1").stat().st_size)
        journal.commit(body, sync=False)
    journal.close()
    return [*ends, (folder / "log-1").stat().st_size]


# -- changes ----------------------------------------------------------------------------------------

KEYS = st.sampled_from(["a", "b", "c", "\0\x80"])
BYTES = st.binary(max_size=5)
REQUESTS = st.one_of(
    st.tuples(st.sampled_from([Op.SET, Op.APPEND, Op.QUEUE_PUSH]), KEYS, BYTES),
    st.tuples(st.just(Op.ADD), st.just("n"), st.integers(-5, 5)),
    st.tuples(st.just(Op.COMPARE_SET), KEYS, BYTES, BYTES),
    st.tuples(st.just(Op.DELETE_KEY), KEYS),
    st.tuples(st.just(Op.MULTI_SET), st.just(["a", "b"]), st.tuples(BYTES, BYTES).map(list)),
    st.tuples(st.just(Op.QUEUE_POP), KEYS, st.booleans()),
    st.tuples(st.just(Op.CONFIRM), st.integers(1, 40)),
    st.tuples(st.just(Op.CANCEL), st.integers(1, 40)),
    st.tuples(st.just(Op.BARRIER), st.just("barrier"), st.just(2)),
    st.tuples(st.just(Op.LEAVE)),
)


@given(
    st.lists(st.tuples(st.sampled_from(["one", "two"]), REQUESTS), max_size=40),
    st.integers(0, 40),
    st.sampled_from([0, 2, LONG_NBYTES]),
)
def test_replayed_changes_give_the_same_state(requests, compacted, long_nbytes):
    with mock.patch.object(change_log, "LONG_NBYTES", long_nbytes):
        check_replay(requests, compacted)


def check_replay(requests, compacted) -> None:
    quota, counted = MemoryQuota(), MemoryQuota()
    state, log = recorded_state(quota)
    contents = Contents()
    for number, (client, (op, *args)) in enumerate(requests, 1):
        if number == compacted:  # a snapshot, and the changes after it
            replay(b"".join(log.take()), contents)
            contents = Contents()
            ended = [replay(b"".join(body), contents) for body in snapshot(state.gather()())]
            assert ended == [False] * (len(ended) - 1) + [True]
        state.execute(client, number, op, tuple(args))
    replay(b"".join(log.take()), contents)
    assert contents == state.gather()()
    again = StoreState(quota=counted)
    again.restore(contents)
    assert counted.nbytes == quota.nbytes
    for client in ("one", "two"):  # clients without a session are unknown after a restart
        state.leave(client)
    assert again.gather()() == state.gather()()


def test_append_to_a_long_value_rarely_copies_it_also_in_replay():
    (state, log), contents, value = recorded_state(), Contents(), bytearray(4 << 20)
    state.execute("c", 0, Op.SET, ("k", bytes(value)))

    def append() -> None:
        for number in range(1, 1001):
            state.execute("c", number, Op.APPEND, ("k", b"piece"))

    def copy() -> None:
        for _ in range(300):
            bytes(value)

    assert cpu_seconds(append) < cpu_seconds(copy)
    body = b"".join(log.take())
    assert cpu_seconds(lambda: replay(body, contents)) < cpu_seconds(copy)
    assert contents == state.gather()()
    assert contents.values == {"k": bytes(value) + b"piece" * 1000}


def cpu_seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


@given(st.binary(max_size=60))
def test_malformed_changes_are_refused(body):
    with contextlib.suppress(ProtocolError):
        replay(body, Contents())


# -- files ------------------------------------------------------------------------------------------


def test_log_cut_at_any_byte_has_the_frames_before(tmp_path, caplog):
    ends = written(tmp_path / "whole")
    content = (tmp_path / "whole" / "log-1").read_bytes()
    for nbytes in range(len(content) + 1):
        folder = tmp_path / str(nbytes)
        folder.mkdir()
        (folder / "log-1").write_bytes(content[:nbytes])
        caplog.clear()
        journal, contents = opened(folder)
        whole = max([end for end in ends if end <= nbytes], default=0)
        expected = {"a": bytes([ends.index(whole) - 1])} if whole > ends[0] else {}
        assert contents.values == expected
        if whole and whole != nbytes:
            assert f"cut {nbytes - whole} bytes off {folder}/log-1 at offset {whole}" in caplog.text
        elif not whole:
            assert f"create {folder}/log-1 again: it has {nbytes} bytes and no complete header" in caplog.text
        else:
            assert not caplog.text
        journal.commit(b"\x93\x01\xa1b\xc4\x01v", sync=False)
        journal.close()
        assert held(folder) == {**expected, "b": b"v"}
        shutil.rmtree(folder)


def test_damaged_byte_is_refused_with_its_offset(tmp_path):
    ends = written(tmp_path / "whole")
    content = (tmp_path / "whole" / "log-1").read_bytes()
    folder = tmp_path / "damaged"
    folder.mkdir()
    for offset in range(len(content)):
        (folder / "log-1").write_bytes(content[:offset] + bytes([content[offset] ^ 0x10]) + content[offset + 1 :])
        if offset < ends[-2]:
            frame = max([end for end in ends if end <= offset], default=0)
            place = re.escape(f"{folder}/log-1 is damaged at offset {frame} (")
            with pytest.raises(JournalError, match=place):
                opened(folder)
        else:  # the last frame may be incomplete after a power failure
            assert held(folder) == {"a": b"\2"}


def test_segment_of_a_header_with_a_wrong_checksum_is_created_again_with_a_warning(tmp_path, caplog):
    written(tmp_path, [])
    (tmp_path / "log-1").write_bytes(bytes(log_format.HEADER_NBYTES))
    opened(tmp_path)[0].close()
    assert (
        f"create {tmp_path}/log-1 again: it has {log_format.HEADER_NBYTES} bytes and no complete header" in caplog.text
    )


def misplaced(frames: list[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield frames with one removed, repeated or swapped with the next, and the index of the first wrong one."""
    last = len(frames) - 1
    for place in range(last + 1):
        before, frame, after = frames[:place], frames[place], frames[place + 1 :]
        yield place + 1, [*before, frame, frame, *after]
        if place < last:
            yield place, [*before, *after]
            yield place, [*before, after[0], frame, *after[1:]]


def test_removed_repeated_or_swapped_frame_in_the_last_segment_is_refused_with_its_offset(tmp_path):
    ends = written(tmp_path / "whole")
    content = (tmp_path / "whole" / "log-1").read_bytes()
    frames = [content[begin:end] for begin, end in pairwise(ends)]
    for place, harmed in misplaced(frames):
        (tmp_path / "whole" / "log-1").write_bytes(content[: ends[0]] + b"".join(harmed))
        with pytest.raises(JournalError, match=rf"log-1 is damaged at offset {ends[place]} \(frame \d stands where"):
            opened(tmp_path / "whole")


def test_removed_repeated_or_swapped_frame_of_a_snapshot_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(change_log, "_CHUNK_NBYTES", 1)
    journal, state, _ = filled(tmp_path)
    for number in range(3):
        state.execute("c", number, Op.SET, (f"k{number}", b"v"))
    journal.write_snapshot(journal.rotate(), state.gather()(), lambda: True)
    journal.close()
    path = tmp_path / "snapshot-2"
    content = path.read_bytes()
    ends = frame_ends(content)
    assert len(ends) > 3
    frames = [content[begin:end] for begin, end in pairwise(ends)]
    for place, harmed in misplaced(frames):
        path.write_bytes(content[: ends[0]] + b"".join(harmed))
        with pytest.raises(JournalError, match=rf"snapshot-2 is damaged at offset {ends[place]} \("):
            opened(tmp_path)


def test_frame_removed_from_the_end_of_an_earlier_segment_is_refused(tmp_path):
    journal, _ = opened(tmp_path)
    for _ in range(2):
        for body in BODIES:
            journal.commit(body, sync=False)
        journal.rotate()
    journal.close()
    opened(tmp_path)[0].close()
    content = (tmp_path / "log-1").read_bytes()
    ends = frame_ends(content)
    (tmp_path / "log-1").write_bytes(content[: ends[-2]])
    missing = rf"log-1 is damaged at offset {ends[-2]} \(frame 3 belongs here, and log-2 begins with frame 4"
    with pytest.raises(JournalError, match=missing):
        opened(tmp_path)


def test_frame_numbers_go_on_after_a_restart(tmp_path):
    for _ in range(2):
        journal, _ = opened(tmp_path)
        journal.commit(BODIES[1], sync=False)
        journal.close()
        with (tmp_path / "log-1").open("ab") as file:
            file.write(b"torn")
    journal, contents = opened(tmp_path)
    journal.rotate()
    journal.commit(BODIES[2], sync=False)
    journal.close()
    assert contents.values == {"a": b"\1"}
    assert log_format.read_header((tmp_path / "log-2").read_bytes())[1] == 2
    assert held(tmp_path) == {"a": b"\2"}


def frame_ends(content: bytes) -> list[int]:
    """Return where the header of a log ends, and where each of its frames does."""
    salt, number = log_format.read_header(content)
    ends, file = [log_format.HEADER_NBYTES], io.BytesIO(content)
    file.seek(ends[0])
    while log_format.read_frame(file, len(content) - ends[-1], ends[-1], salt, number) is not None:
        ends.append(file.tell())
        number += 1
    return ends


@pytest.mark.parametrize("harm", ["cut", "hole"])
def test_log_stored_as_a_value_is_not_taken_for_frames(tmp_path, harm):
    written(tmp_path / "other")
    stored = (tmp_path / "other" / "log-1").read_bytes()
    state, log = recorded_state()
    state.execute("c", 1, Op.SET, ("k", stored + log_format.frame_head(bytes(8), 0)[:5]))
    body = b"".join(log.take())
    ends = written(tmp_path / "data", [*BODIES, body])
    path = tmp_path / "data" / "log-1"
    content = path.read_bytes()
    if harm == "cut":
        path.write_bytes(content[:-20])  # in the value, behind frames of another log
    else:
        path.write_bytes(
            content[: ends[-2]] + bytes(log_format.FRAME_NBYTES) + content[ends[-2] + log_format.FRAME_NBYTES :]
        )
    assert held(tmp_path / "data") == {"a": b"\3"}
    assert path.stat().st_size == ends[-2]


@pytest.mark.parametrize("content", [bytes(100), b"%PDF-1.7" + bytes(100), log_format.MAGIC[:-2] + b"1\n" + bytes(100)])
def test_file_that_is_not_a_log_is_refused_and_kept(tmp_path, content):
    (tmp_path / "log-1").write_bytes(content)
    with pytest.raises(JournalError, match="does not begin like a store's log"):
        opened(tmp_path)
    assert (tmp_path / "log-1").read_bytes() == content


def test_truncated_lineage_is_generated_again(tmp_path):
    opened(tmp_path)[0].close()
    for content in (b"", b"0123456789", bytes(16)):
        (tmp_path / "lock").write_bytes(content)
        journal, _ = opened(tmp_path)
        assert re.fullmatch("[0-9a-f]{16}", journal.lineage)
        assert (tmp_path / "lock").read_text() == journal.lineage
        journal.close()


def test_malformed_change_with_a_right_checksum_is_refused_also_at_the_end(tmp_path):
    ends = written(tmp_path / "data", [*BODIES, b"\x92\x63\x01"])
    with pytest.raises(JournalError, match=f"log-1 is damaged at offset {ends[-2]}"):
        opened(tmp_path / "data")


def test_folder_in_use_is_refused(tmp_path):
    journal, _ = opened(tmp_path / "data")
    with pytest.raises(JournalError, match="another store uses"):
        opened(tmp_path / "data")
    journal.close()
    opened(tmp_path / "data")[0].close()


def test_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(JournalError, match="cannot open the store's data"):
        opened(tmp_path / "file" / "data")


def test_long_value_is_written_without_a_copy(tmp_path):
    value = b"v" * (LONG_NBYTES + 1)
    state, log = recorded_state()
    state.execute("c", 1, Op.SET, ("a", b"short"))
    state.execute("c", 2, Op.SET, ("k", value))
    state.execute("c", 3, Op.QUEUE_PUSH, ("q", value))
    state.execute("c", 4, Op.SET, ("b", b"short"))
    body = log.take()
    assert [piece is value for piece in body] == [False, True, False, True, False]
    assert log.pending_nbytes == 0
    journal, _ = opened(tmp_path)
    journal.commit(*body, sync=True)
    assert journal.nbytes == (tmp_path / "log-1").stat().st_size - log_format.HEADER_NBYTES
    journal.close()
    journal, contents = opened(tmp_path)
    assert contents == state.gather()()
    assert any(piece is value for body in snapshot(state.gather()()) for piece in body)
    journal.close()


def test_frame_of_more_pieces_than_one_writev_takes(tmp_path):
    journal, _ = opened(tmp_path)
    pieces = [b"\x93\x01\xa1%c\xc4\x01v" % (97 + number % 26) for number in range(3000)]
    journal.commit(*pieces, sync=False)
    journal.close()
    journal, contents = opened(tmp_path)
    assert len(contents.values) == 26
    journal.close()


def test_partial_write_is_continued(tmp_path, monkeypatch):
    writev = os.writev
    journal, _ = opened(tmp_path)
    monkeypatch.setattr(os, "writev", lambda fd, pieces: writev(fd, [b"".join(pieces)[:7]]))
    journal.commit(*BODIES, sync=False)
    monkeypatch.undo()
    journal.close()
    assert held(tmp_path) == {"a": b"\3"}


# -- compaction -------------------------------------------------------------------------------------


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def filled(folder: Path) -> tuple[Journal, StoreState, ChangeLog]:
    journal, _ = opened(folder, compact_nbytes=100)
    state, log = recorded_state()
    for number in range(100):
        state.execute("c", number, Op.SET, ("k", b"%d" % number))
    journal.commit(*log.take(), sync=True)
    assert journal.wants_compaction
    return journal, state, log


def test_compaction_can_be_interrupted_at_any_step(tmp_path):
    journal, state, log = filled(tmp_path / "data")
    held = state.gather()()
    moments = []

    def moment() -> None:
        copy = tmp_path / f"moment {len(moments)}"
        shutil.copytree(tmp_path / "data", copy)
        moments.append((copy, dict(state.gather()().values)))

    moment()
    number = journal.rotate()
    moment()
    state.execute("c", 1, Op.SET, ("l", b"after"))
    journal.commit(*log.take(), sync=True)
    moment()
    assert names(tmp_path / "data") == {"lock", "log-1", "log-2"}

    def pause() -> bool:
        moment()
        return True

    journal.write_snapshot(number, held, pause)
    moment()
    assert names(tmp_path / "data") == {"lock", "log-2", "snapshot-2"}
    assert not journal.wants_compaction
    journal.close()
    before = tmp_path / "moment 2"  # the snapshot is there, and nothing has been removed
    shutil.copy(tmp_path / "data" / "snapshot-2", before)
    for copy, values in moments:
        journal, contents = opened(copy)
        assert contents.values == values
        assert not [name for name in names(copy) if name.endswith(".unfinished")]
        journal.close()
    assert names(before) == {"lock", "log-2", "snapshot-2"}


@pytest.fixture
def compacted(tmp_path) -> Path:
    journal, state, _ = filled(tmp_path)
    journal.write_snapshot(journal.rotate(), state.gather()(), lambda: True)
    journal.rotate()
    journal.close()
    assert names(tmp_path) == {"lock", "log-2", "log-3", "snapshot-2"}
    return tmp_path


@pytest.mark.parametrize("name", ["snapshot-2", "log-2"])
def test_damage_before_the_last_segment_is_refused(compacted, name):
    path = compacted / name
    content = path.read_bytes()
    for offset in range(len(content)):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        with pytest.raises(JournalError, match=rf"{name} is damaged at offset \d+"):
            opened(compacted)
    for nbytes in [*range(len(content)), len(content) + 1]:
        path.write_bytes((content + b"x")[:nbytes])
        with pytest.raises(JournalError, match=f"{name} is damaged at offset"):
            opened(compacted)


@pytest.mark.parametrize("missing", [["log-2"], ["log-2", "log-3"]])
def test_missing_segment_is_refused(compacted, missing):
    for name in missing:
        (compacted / name).unlink()
    with pytest.raises(JournalError, match=r"log-2 is damaged at offset 0 .the file is missing"):
        opened(compacted)


def test_aborted_or_failed_snapshot_leaves_no_file(tmp_path, monkeypatch):
    journal, state, _ = filled(tmp_path)
    number = journal.rotate()
    journal.write_snapshot(number, state.gather()(), lambda: False)
    assert names(tmp_path) == {"lock", "log-1", "log-2"}

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        journal.write_snapshot(number, state.gather()(), lambda: True)
    monkeypatch.undo()
    assert names(tmp_path) == {"lock", "log-1", "log-2"}
    assert held(shutil.copytree(tmp_path, tmp_path.with_name("copy"))) == {"k": b"99"}
    journal.write_snapshot(journal.rotate(), state.gather()(), lambda: True)
    assert names(tmp_path) == {"lock", "log-3", "snapshot-3"}
    journal.close()


def test_recovered_log_counts_for_the_next_compaction(tmp_path):
    journal, state, log = filled(tmp_path)
    journal.close()
    journal, _ = opened(tmp_path, compact_nbytes=100)
    assert journal.nbytes == (tmp_path / "log-1").stat().st_size
    assert journal.wants_compaction
    state.execute("c", 1, Op.SET, ("large", bytes(5000)))
    journal.commit(*log.take(), sync=False)
    journal.write_snapshot(journal.rotate(), state.gather()(), lambda: True)
    journal.close()
    journal, _ = opened(tmp_path, compact_nbytes=100)
    state.execute("c", 2, Op.SET, ("k", bytes(4000)))
    journal.commit(*log.take(), sync=False)
    assert not journal.wants_compaction  # the snapshot is longer, and would be written again
    state.execute("c", 3, Op.SET, ("k", bytes(4000)))
    journal.commit(*log.take(), sync=False)
    assert journal.wants_compaction
    journal.close()
