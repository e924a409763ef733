"""The example `ddp_with_parameter_server.py`: an embedding on a server, and layers that two trainers hold in common."""

import re

import pytest

pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
def test_layers_stay_equal_while_the_table_is_on_the_server(run_example, tmp_path):
    ended = run_example("ddp_with_parameter_server.py", "--steps=200")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.findall(r"│ +(\d) │ +[\d.]+ │ +[\d.]+ │ +[\d.]+ │ +[\d.]+ │", ended.stdout) == ["0", "1"]
    assert float(re.search(r"held-out digits ([\d.]+);", ended.stdout)[1]) >= 0.85
    assert "differ by 0\n" in ended.stdout
    assert "Error" not in ended.stderr
    assert (tmp_path / "out" / "ddp_with_parameter_server.png").read_bytes().startswith(b"\x89PNG")
