"""The status of a job from the answers of its ranks: rows, culprits and their order."""

import json

import pytest

from asyncdist.kernel.tracing.job_status import job_status, stuck_first

CALL = "all_reduce(8 x float32, SUM)"
NOW = 1_000_000.0


def call(number, *, since=None, took=0.1, op="all_reduce", text=CALL, fingerprint=1, **more):
    """Return a call that has been pending for some seconds, or ended just now."""
    issued = 100.0 - (took if since is None else since)
    entry = {
        "group": "world", "op": op, "seq": number, "peer": None, "nbytes": 32, "issued": issued,
        "finished": 0.0 if since is not None else 100.0, "error": None, "fingerprint": fingerprint, "call": text,
    }  # fmt: skip
    return entry | more


def rank(number, size, *calls, last=None, **more):
    """Return the answer of one rank."""
    group = {"ranks": list(range(size)), "last": last or max((each["seq"] for each in calls), default=0), "open": True}
    content = {
        "world": "w" * 16, "rank": number, "world_size": size, "host": f"node{number // 2}", "pid": 1000 + number,
        "reason": "a test", "time": NOW, "clock": 100.0, "groups": {"world": group}, "entries": list(calls),
        "rates": {"calls": 2.0, "nbytes": 64.0}, "name": "job", "generation": 0, "members": list(range(size)),
    }  # fmt: skip
    return content | more


def answer(size, *ranks, silent=()):
    """Return the answer of a world; rank 2 is on another host than the rest."""
    return {
        "world": "w" * 16, "world_size": size, "answered_by": ranks[0]["rank"], "ranks": list(ranks),
        "silent": [[each, why, 99] for each, why in silent],
        "addresses": [["10.0.0.2" if each == 2 else "10.0.0.1", 1] for each in range(size)],
    }  # fmt: skip


def test_rank_that_others_wait_for_is_the_culprit_after_a_while():
    waiting = [rank(each, 3, call(1), call(2, since=12.0)) for each in (0, 2)]
    found = answer(3, waiting[0], rank(1, 3, call(1)), waiting[1])
    status = job_status(found, late=10.0)
    assert [(row.state, row.waits_for, row.waited_for_by, row.culprit) for row in status.rows] == [
        ("pending", [1], [], False),
        ("idle", [], [0, 2], True),
        ("pending", [1], [], False),
    ]
    assert status.rows[1].remarks == ["late: 2 wait for it"]
    assert not status.healthy
    assert status.story[-1].startswith("  rank 1 has not called it: the other ranks wait for it.")
    assert job_status(found, late=13.0).healthy


def test_chain_of_waits_ends_at_one_culprit():
    chain = [
        rank(0, 3, call(1, since=20.0)),
        rank(1, 3, call(1, since=20.0, awaits=[2])),
        rank(2, 3, call(1, since=20.0, awaits=[])),
    ]
    status = job_status(answer(3, *chain))
    assert [row.culprit for row in status.rows] == [False, False, True]
    assert [row.waits_for for row in status.rows] == [[], [2], []]


def test_silent_and_lost_ranks_are_culprits_with_their_reasons():
    known = {"lost": [[2, "no heartbeat for 5.0 s"]], "heard": [[1, 3.5]]}
    status = job_status(
        answer(
            4, rank(0, 4, call(1, since=1.0), **known), rank(3, 4, call(1, since=1.0), heard=[[1, 2.5]]),
            silent=[(1, "its process is stopped"), (2, "it does not answer")],
        )
    )  # fmt: skip
    silent, lost = status.rows[1:3]
    assert (silent.state, silent.reason, silent.last_heard) == ("silent", "its process is stopped", 2.5)
    assert (lost.state, lost.reason, lost.last_heard) == ("lost", "no heartbeat for 5.0 s", None)
    assert (silent.pid, silent.host) == (99, "node1")
    assert lost.host == "10.0.0.2"
    assert silent.culprit
    assert lost.culprit
    assert status.rows[0].waits_for == [1, 2]
    assert status.story[:2] == ["rank 1 is silent: its process is stopped.", "rank 2 is lost: no heartbeat for 5.0 s."]


def test_rank_that_left_and_former_member_are_no_problem():
    present = {"members": [0, 1], "generation": 3, "lost": [[2, "killed"]]}
    status = job_status(answer(3, *[rank(each, 3, call(1), **present) for each in (0, 1)]))
    assert (status.generation, status.members, status.world_size) == (3, 2, 3)
    assert (status.rows[2].state, status.rows[2].is_member, status.healthy) == ("lost", False, True)
    left = {"lost": [[1, "it has destroyed its process group"]]}
    status = job_status(answer(2, rank(0, 2, call(1), **left)))
    assert (status.rows[1].state, status.healthy) == ("left", True)


def test_rank_with_another_call_is_a_culprit():
    ranks = [rank(each, 3, call(1, since=1.0)) for each in (0, 1)]
    ranks.append(rank(2, 3, call(1, since=1.0, op="barrier", text="barrier()", fingerprint=2)))
    status = job_status(answer(3, *ranks))
    assert [row.culprit for row in status.rows] == [False, False, True]
    assert "the ranks made different calls" in "\n".join(status.story)


def test_failed_group_is_shown_with_its_error_and_destroyed_group_not_at_all():
    failed = {"groups": {"world": {"ranks": [0, 1], "last": 1, "open": True, "error": "rank 1 aborted: why"}}}
    status = job_status(answer(2, rank(0, 2, call(1, error="GroupError"), **failed), rank(1, 2, call(1))))
    assert (status.rows[0].state, status.rows[0].reason, status.healthy) == ("failed", "rank 1 aborted: why", False)
    destroyed = {"groups": {"world": {"ranks": [0, 1], "last": 5, "open": False, "error": "rank 1 aborted: why"}}}
    status = job_status(answer(2, *[rank(each, 2, call(each + 4), **destroyed) for each in (0, 1)]))
    assert [(row.state, row.call) for row in status.rows] == [("idle", None)] * 2
    assert status.story == []
    assert status.healthy


@pytest.mark.parametrize(("done", "nbytes", "progress"), [(8, 32, 0.25), (None, 32, None), (0, 0, None)])
def test_progress_of_a_pending_call(done, nbytes, progress):
    status = job_status(answer(1, rank(0, 1, call(1, since=1.0, done=done, nbytes=nbytes))))
    assert status.rows[0].progress == progress


def test_stuck_ranks_come_first():
    ranks = [rank(each, 64, call(1), call(2, since=float(each))) for each in range(64) if each not in (7, 9)]
    status = job_status(answer(64, *ranks, rank(7, 64, call(1)), silent=[(9, "stopped")]))
    assert [row.rank for row in stuck_first(status.rows)[:4]] == [9, 7, 63, 62]


def test_status_is_json_with_the_documented_keys():
    status = job_status(answer(2, rank(0, 2, call(1, since=20.0, done=8)), rank(1, 2)))
    found = json.loads(json.dumps(status.as_dict()))
    assert {name: value for name, value in found.items() if name not in ("ranks", "report")} == {
        "world": "w" * 16, "world_size": 2, "name": "job", "generation": 0, "answered_by": 0, "time": NOW, "members": 2,
        "healthy": False,
    }  # fmt: skip
    assert found["ranks"][0] == {
        "rank": 0, "state": "pending", "host": "node0", "pid": 1000, "generation": 0, "member": True, "reason": "",
        "operation": "all_reduce", "number": 1, "call": CALL, "group": "world", "nbytes": 32, "done_nbytes": 8,
        "seconds": 20.0, "pending_calls": 1, "calls_per_second": 2.0, "bytes_per_second": 64.0, "last_heard": 0.0,
        "waits_for": [1], "waited_for_by": [], "remarks": [], "culprit": False,
    }  # fmt: skip
