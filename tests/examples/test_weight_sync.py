"""The example `weight_sync.py`: servers answer requests while they receive new weights."""

import re

import pytest

PROGRAM = "weight_sync.py"
VERSIONS = 6
RATE = 150  # requests per second
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
    assert answers[-1] > 0
    first, last = rows[0][5], rows[-1][5]
    assert first < 50 < last  # percent of correct answers

    answered, failed = re.search(r"(\d+) requests answered, (\d+) failed", result.stdout).groups()
    assert int(answered) == sum(answers)
    assert int(failed) == 0
    during, overall = re.search(r"loop: ([\d.]+) ms during arrivals, ([\d.]+) ms overall", result.stdout).groups()
    assert 0 < float(during) <= float(overall)
    # A loop that blocked for weights would pause from one version to the next.
    between = 1e3 * sorted(answers)[VERSIONS // 2] / RATE
    assert sorted(row[3] for row in rows)[VERSIONS // 2] < between / 2
    assert (tmp_path / "out" / "weight_sync.png").read_bytes().startswith(b"\x89PNG")
