"""The example `weight_sync.py`: servers answer all the time, with newer and newer weights."""

from __future__ import annotations

import re

import pytest

PROGRAM = "weight_sync.py"
VERSIONS = 6
RATE = 150  # requests a second, whatever happens
ROW = re.compile(
    r"│ +(\d+) │ +([\d.]+) ms │ +(\d+) │ +([\d.]+) ms │ +(\d+) │ +(nan|[\d.]+)% │ +(?:nan|[\d.]+) ms │ +(?:nan|[\d.]+) ms │"
)
pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
def test_servers_answer_while_weights_arrive(run_example, tmp_path):
    ranks = 4
    small = [f"--versions={VERSIONS}", "--steps=60", "--width=400", "--lr=0.02", f"--rate={RATE}"]
    result = run_example(PROGRAM, *small, ranks=ranks)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{ranks - 2} server(s)" in result.stdout

    rows = [[float(cell) for cell in row.groups()] for row in ROW.finditer(result.stdout)]
    assert [row[0] for row in rows] == list(range(VERSIONS))
    answers = [int(row[4]) for row in rows]
    assert answers[0] > 0
    assert answers[-1] > 0  # requests met the first version as well as the last
    first, last = rows[0][5], rows[-1][5]
    assert first < 50 < last  # percent: it was guessing, and now it knows

    answered, not_answered = re.search(r"(\d+) requests answered, (\d+) not", result.stdout).groups()
    assert int(answered) == sum(answers)
    assert int(not_answered) == 0
    during, ever = re.search(r"loop: ([\d.]+) ms while weights came, ([\d.]+) ms ever", result.stdout).groups()
    assert 0 < float(during) <= float(ever)
    # A loop that waited for weights would stand still from one version to the next, however long that is here.
    between = 1e3 * sorted(answers)[VERSIONS // 2] / RATE
    assert sorted(row[3] for row in rows)[VERSIONS // 2] < between / 2
    assert (tmp_path / "out" / "weight_sync.png").read_bytes().startswith(b"\x89PNG")
