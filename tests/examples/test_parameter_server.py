"""The example `parameter_server.py`: gradients of workers of which one is killed and one is added."""

import re

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
def test_training_goes_on_although_a_worker_is_killed(run_example, tmp_path):
    ended = run_example("parameter_server.py", "--updates=900", "--workers=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    updates = dict(re.findall(r"│ +(\d) │ +([\d,]+) │", ended.stdout))
    assert set(updates) == {"0", "1", "2"}
    assert int(updates["2"].replace(",", "")) >= 50
    assert float(re.search(r"held-out digits ([\d.]+)", ended.stdout)[1]) >= 0.93
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "out" / "parameter_server.png").read_bytes().startswith(b"\x89PNG")
