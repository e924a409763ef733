"""The examples of sharded, tensor parallel and pipelined training, with few steps."""

import re

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]


def table_of(result):
    """Return the rows of the table that an example prints: the first cell, and all numbers in the others."""
    assert result.returncode == 0, result.stdout + result.stderr
    rows = re.findall(r"(?m)^│ (.*?) +│(.*)│$", result.stdout)
    return {
        name: [float(number.replace(",", "")) for number in re.findall(r"\d[\d.,e+-]*\d|\d", cells)]
        for name, cells in rows
    }


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_fsdp2_resumes_with_another_number_of_ranks(run_example, tmp_path):
    small = ["--width", "64", "--layers", "2", "--context", "32", "--steps", "30"]
    first = run_example("fsdp2_gpt.py", *small, ranks=2)
    table = table_of(first)
    (before,), (after,) = table["loss on held-out text, before"], table["loss on held-out text, after"]
    assert before > 4.5  # a little below log(128), the loss of a uniform guess
    assert after < before - 1.2
    own, total = table["parameters and optimizer state on rank 0"]
    assert 0.4 * total < own < 0.6 * total
    assert "over asyncdist" in first.stdout
    assert is_picture(tmp_path / "out/fsdp2_gpt/loss.png")

    second = run_example("fsdp2_gpt.py", *small, "--steps", "15", "--resume", ranks=3)
    table = table_of(second)
    found, saved = re.search(r"resumed on 3 ranks after step 30: .* (\S+), when saved (\S+)", second.stdout).groups()
    assert float(saved) == pytest.approx(after, abs=1e-3)
    assert float(found) == pytest.approx(float(saved), abs=1e-2)  # bfloat16 in other shapes
    assert table["steps"] == [15, 45]
    assert table["loss on held-out text, after"][0] < after
    assert not (tmp_path / "out/fsdp2_gpt/checkpoint.new").exists()

    other = run_example("fsdp2_gpt.py", *small, "--heads", "2", "--resume")
    assert other.returncode == 1
    assert "--heads 2: the model in out/fsdp2_gpt/checkpoint has 4; pass that, or another --out" in other.stderr
    assert "Traceback" not in other.stderr


def test_tensor_parallel_gives_the_weights_of_one_process(run_example, tmp_path):
    table = table_of(run_example("tensor_parallel.py", "--steps", "40", ranks=2))
    first, last = table["loss"]
    assert last < first - 0.3
    assert 0 < table["largest difference of a weight"][0] < 1e-5  # zero would mean that nothing was split
    own, total = table["weights on rank 0"]
    assert 0.45 < own / total < 0.55
    assert is_picture(tmp_path / "out/tensor_parallel.png")


def test_pipeline_gives_the_weights_of_one_process(run_example, tmp_path):
    table = table_of(run_example("pipeline.py", "--steps", "15", "--width", "128", ranks=2))
    for before, after in zip(table["loss"][::2], table["loss"][1::2], strict=True):
        assert after < before / 2
    assert all(0 < difference < 1e-5 for difference in table["largest difference"])
    assert table["micro-batches held"] == [8, 8, 2, 1]
    assert is_picture(tmp_path / "out/pipeline.png")
