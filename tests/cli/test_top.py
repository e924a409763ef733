"""The picture that ``asyncdist top`` draws, and what it says about arguments and jobs that are not there."""

import pytest
from click.testing import CliRunner
from rich.console import Console

from asyncdist.cli import main
from asyncdist.cli.top_view import picture
from asyncdist.kernel.tracing.job_status import JobStatus, RankStatus
from asyncdist.kernel.tracing.trace_record import TracedCall
from tests.support.ports import free_port

CALL = TracedCall("world", "all_reduce", 412, None, "all_reduce(262144 x float32, SUM)", 1 << 20, 0.0, None, None, 1)


def status(size=4, late=2):
    rows = [
        RankStatus(
            rank, "pending", f"node{rank // 8}", 4000 + rank, 3, call=CALL, seconds=12.4, last_heard=0.0,
            calls_per_second=31.0, bytes_per_second=3.25e7, waits_for=[late],
        )
        for rank in range(size)
    ]  # fmt: skip
    rows[late] = RankStatus(
        late, "silent", "10.0.0.1", 4321, culprit=True, reason="its process is stopped", last_heard=8.25,
        waited_for_by=[rank for rank in range(size) if rank != late],
    )  # fmt: skip
    return JobStatus("w" * 16, size, "digits", 3, 0, 0.0, rows, [f"rank {late} is silent: its process is stopped."])


def drawn(status, width, limit=None):
    console = Console(width=width, height=40, color_system=None, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(status, "asyncdist://10.0.0.1:29500/digits", console, limit=limit))
    console.file.close()
    return console.export_text()


def test_picture_has_a_row_per_rank_with_all_columns():
    text = drawn(status(), 170)
    header, titles, _, *rows = [line.rstrip() for line in text.splitlines()]
    for part in ("4 ranks", "generation 3", "97.5 MB/s", "answered by rank 0", "STUCK"):
        assert part in header
    assert titles.split() == (
        "rank host pid gen state operation for done calls/s bytes/s heard waits for holds up remarks".split()
    )
    call = "#412 all_reduce(262144 x float32, SUM)"
    assert rows[0].split() == f"0 node0 4000 3 pending {call} 12.4 s 31 32.5 MB now 2".split()
    assert rows[2].split() == "▶ 2 10.0.0.1 4321 silent 8.2 s 0, 1, 3 its process is stopped".split()
    assert text.rstrip().endswith("rank 2 is silent: its process is stopped.")


@pytest.mark.parametrize("width", [60, 80, 110, 150])
def test_picture_fits_and_keeps_numbers_and_the_culprit(width):
    text = drawn(status(), width)
    table = [line for line in text.splitlines()[2:] if "pending" in line or "silent" in line]
    assert max(map(len, table)) <= width
    assert "12.4 s" in text
    assert "▶ 2" in text
    assert "waits for" in text
    assert ("32.5 MB" in text) == (width >= 100)


def test_large_world_shows_the_stuck_rank_first_and_counts_the_rest():
    text = drawn(status(64, 40), 150, limit=10)
    rows = [line for line in text.splitlines() if "pending" in line or "silent" in line]
    assert rows[0].split()[:2] == ["▶", "40"]
    assert "0, 1, 2, 3, … (63)" in rows[0]
    assert "and 54 more ranks (--ranks 0 shows all)" in text
    assert len([line for line in rows if "pending" in line]) == 9


def test_healthy_job_is_ok_and_former_members_are_not_counted():
    one = status()
    one.rows[2].culprit, one.rows[2].is_member, one.story = False, False, []
    text = drawn(one, 150)
    assert "3 of 4 ranks" in text
    assert "  ok" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["127.0.0.1:{port}", "--timeout", "0.2"], "no store answered at 127.0.0.1"),
        (["file://{folder}/none", "--timeout", "0.2"], "check that the job has begun"),
        (["file://{folder}/none", "--timeout", "0.2"], "objects of asyncdist.rpc, or exchange asyncdist.weights"),
        (["127.0.0.1:1", "--stacks", "-1"], "is not the number of a rank, and not 'all'"),
        (["127.0.0.1:1", "--stacks", "first"], "is not the number of a rank, and not 'all'"),
        (["http://127.0.0.1:1"], "has an unknown scheme"),
    ],
)
def test_job_that_is_not_there_and_wrong_arguments_are_errors_with_exit_status_2(tmp_path, arguments, words):
    run = CliRunner().invoke(main, ["top", *(each.format(port=free_port(), folder=tmp_path) for each in arguments)])
    assert run.exit_code == 2
    assert words in run.output
