"""The example `few_exchanges.py`: methods with few exchanges end as accurate as data-parallel training."""

import pytest

PROGRAM = "few_exchanges.py"
pytestmark = pytest.mark.processes


@pytest.mark.exhaustive
def test_methods_end_as_accurate_as_data_parallel_training(run_example, tmp_path):
    result = run_example(PROGRAM, ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("│") >= 25
    assert "streaming, int4" in result.stdout
    assert (tmp_path / "out" / "few_exchanges.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.exhaustive
def test_too_few_steps_are_refused(run_example):
    result = run_example(PROGRAM, "--steps", "99")
    assert result.returncode == 2
    assert "--steps 99: must be at least 100" in result.stderr
