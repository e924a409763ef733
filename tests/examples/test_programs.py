"""Each example runs to its end, prints what it promises, and draws its picture."""

import importlib.util
import re

import pytest

HAS_RAY = importlib.util.find_spec("ray") is not None
pytestmark = pytest.mark.processes
exhaustive = pytest.mark.exhaustive


@pytest.fixture
def ran(run_example, tmp_path):
    """Run an example that succeeds, and return its output; ``picture`` is what it draws, by default a file of its name."""

    def ran(program, *options, picture="out/{}.png", **how):
        ended = run_example(f"{program}.py", *options, **how)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert not re.search("Error|Traceback", ended.stderr), ended.stderr
        if picture:
            assert (tmp_path / picture.format(program)).read_bytes().startswith(b"\x89PNG")
        return ended.stdout

    return ran


@exhaustive
def test_policy_improves_although_an_actor_is_killed(ran):
    output = ran("actor_learner", "--updates=80", "--actors=2")
    assert "actor 0: player.rollout()" in output
    assert set(re.findall(r"actor (\d): \d+ rollouts", output)) == {"0", "1", "2"}
    assert int(re.search(r"stays up for (\d+) steps at the end", output)[1]) >= 150


@exhaustive
def test_layers_stay_equal_while_the_table_is_on_the_server(ran):
    output = ran("ddp_with_parameter_server", "--steps=200")
    assert re.findall(r"│ +(\d) │ +[\d.]+ │ +[\d.]+ │ +[\d.]+ │ +[\d.]+ │", output) == ["0", "1"]
    assert float(re.search(r"held-out digits ([\d.]+);", output)[1]) >= 0.85
    assert "differ by 0\n" in output


@exhaustive
def test_methods_with_few_exchanges_end_as_accurate_as_data_parallel_training(ran, run_example):
    output = ran("few_exchanges", ranks=2)
    assert output.count("│") >= 25
    assert "streaming, int4" in output
    refused = run_example("few_exchanges.py", "--steps", "99")
    assert (refused.returncode, "--steps 99: must be at least 100" in refused.stderr) == (2, True)


@exhaustive
def test_training_goes_on_although_a_worker_is_killed(ran):
    output = ran("parameter_server", "--updates=900", "--workers=2")
    updates = dict(re.findall(r"│ +(\d) │ +([\d,]+) │", output))
    assert set(updates) == {"0", "1", "2"}
    assert int(updates["2"].replace(",", "")) >= 50
    assert float(re.search(r"held-out digits ([\d.]+)", output)[1]) >= 0.93


@exhaustive
def test_prompts_are_answered_although_a_replica_is_killed(ran):
    output = ran("serve_rollouts", "--steps=10", picture="")
    assert "replica 0 is lost" in output
    assert "all 160 answers are right" in output
    assert set(re.findall(r"replica (\d): \d+ prompts", output)) == {"0", "1", "2"}


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install ray")
def test_ranks_on_ray_train_and_answer_calls(ran):
    output = ran("on_ray", "--steps=600", picture="")
    assert "the weights of the ranks are equal" in output
    of_rank_0, _ = [int(count) for count in re.findall(r"(\d+) │$", output, re.MULTILINE)]
    assert of_rank_0 > 0, "the driver asks rank 0"


@exhaustive
@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_missing_ray_is_reported(run_example):
    assert run_example("on_ray.py", "--help").stdout.startswith("usage: on_ray.py")
    ended = run_example("on_ray.py")
    assert (ended.returncode, ended.stderr.strip()) == (1, "Ray is not installed: pip install ray")


# -- digits -------------------------------------------------------------------------------------------


def figures(output):
    """Return the accuracy, and the difference from the weights of one process."""
    return [float(re.search(rf"{what} (\S+)", output)[1]) for what in ("test accuracy", "single process:")]


@pytest.mark.parametrize("epochs", [1, pytest.param(6, marks=exhaustive)])
def test_two_ranks_give_the_weights_of_one_process_and_are_accurate_after_some_epochs(run_example, tmp_path, epochs):
    result = run_example("train_digits.py", "--epochs", str(epochs), ranks=2, forked=epochs == 1)
    accuracy, difference = figures(result.stdout)
    assert (result.returncode, accuracy >= 0.97) == ((0, True) if epochs == 6 else (1, False)), result.stderr
    assert ("the accuracy is below 0.97: train for at least five --epochs" in result.stderr) is (epochs == 1)
    assert 0 < difference <= 1e-5  # zero would mean that the runs were not independent
    assert len(re.findall(rf"(?m)^epoch +\d+/{epochs} +loss \d", result.stdout)) == epochs, "only rank 0 prints"
    assert (tmp_path / "out/train_digits.png").read_bytes().startswith(b"\x89PNG")


@exhaustive
def test_one_process_gives_its_own_weights(run_example, tmp_path):
    result = run_example("train_digits.py", "--epochs", "1", "--out", "elsewhere/picture.png")
    assert figures(result.stdout)[1] == 0
    assert (tmp_path / "elsewhere/picture.png").exists()


# -- weights for servers --------------------------------------------------------------------------------

VERSIONS, RATE = 6, 150
"""Versions of the weights, and requests per second."""
ROW = re.compile(
    r"│ +(\d+) │ +([\d.]+) ms │ +(\d+) │ +([\d.]+) ms │ +(\d+) │ +(nan|[\d.]+)% │ +(?:nan|[\d.]+) ms │ +(?:nan|[\d.]+) ms │"
)


@exhaustive
def test_servers_answer_while_weights_arrive(ran):
    small = [f"--versions={VERSIONS}", "--steps=60", "--width=400", "--lr=0.02", f"--rate={RATE}"]
    output = ran("weight_sync", *small, ranks=4)
    assert "2 server(s)" in output
    rows = [[float(cell) for cell in row.groups()] for row in ROW.finditer(output)]
    assert [row[0] for row in rows] == list(range(VERSIONS))
    answers = [int(row[4]) for row in rows]
    assert answers[0] > 0
    assert answers[-1] > 0
    assert rows[0][5] < 50 < rows[-1][5]  # percent of correct answers
    assert f"{sum(answers)} requests answered, 0 failed" in output
    during, overall = re.search(r"loop: ([\d.]+) ms during arrivals, ([\d.]+) ms overall", output).groups()
    assert 0 < float(during) <= float(overall)
    # A loop that blocked for weights would pause from one version to the next.
    between = 1e3 * sorted(answers)[VERSIONS // 2] / RATE
    assert sorted(row[3] for row in rows)[VERSIONS // 2] < between / 2


# -- sharded, tensor parallel and pipelined training, with few steps --------------------------------------


def table_of(output):
    """Return the rows of the table that an example prints: the first cell, and all numbers in the others."""
    rows = re.findall(r"(?m)^│ (.*?) +│(.*)│$", output)
    return {
        name: [float(number.replace(",", "")) for number in re.findall(r"\d[\d.,e+-]*\d|\d", cells)]
        for name, cells in rows
    }


@exhaustive
def test_fsdp2_resumes_with_another_number_of_ranks(ran, run_example, tmp_path):
    small = ["--width", "64", "--layers", "2", "--context", "32", "--steps", "30"]
    first = ran("fsdp2_gpt", *small, ranks=2, picture="out/fsdp2_gpt/loss.png")
    table = table_of(first)
    (before,), (after,) = table["loss on held-out text, before"], table["loss on held-out text, after"]
    assert before > 4.5  # a little below log(128), the loss of a uniform guess
    assert after < before - 1.2
    own, total = table["parameters and optimizer state on rank 0"]
    assert 0.4 * total < own < 0.6 * total
    assert "over asyncdist" in first

    second = ran("fsdp2_gpt", *small, "--steps", "15", "--resume", ranks=3, picture="out/fsdp2_gpt/loss.png")
    table = table_of(second)
    found, saved = re.search(r"resumed on 3 ranks after step 30: .* (\S+), when saved (\S+)", second).groups()
    assert float(saved) == pytest.approx(after, abs=1e-3)
    assert float(found) == pytest.approx(float(saved), abs=1e-2)  # bfloat16 in other shapes
    assert table["steps"] == [15, 45]
    assert table["loss on held-out text, after"][0] < after
    assert not (tmp_path / "out/fsdp2_gpt/checkpoint.new").exists()

    other = run_example("fsdp2_gpt.py", *small, "--heads", "2", "--resume")
    assert other.returncode == 1
    assert "--heads 2: the model in out/fsdp2_gpt/checkpoint has 4; pass that, or another --out" in other.stderr
    assert "Traceback" not in other.stderr


@exhaustive
def test_tensor_parallel_gives_the_weights_of_one_process(ran):
    table = table_of(ran("tensor_parallel", "--steps", "40", ranks=2))
    first, last = table["loss"]
    assert last < first - 0.3
    assert 0 < table["largest difference of a weight"][0] < 1e-5  # zero would mean that nothing was split
    own, total = table["weights on rank 0"]
    assert 0.45 < own / total < 0.55


@exhaustive
def test_pipeline_gives_the_weights_of_one_process(ran):
    table = table_of(ran("pipeline", "--steps", "15", "--width", "128", ranks=2))
    for before, after in zip(table["loss"][::2], table["loss"][1::2], strict=True):
        assert after < before / 2
    assert all(0 < difference < 1e-5 for difference in table["largest difference"])
    assert table["micro-batches held"] == [8, 8, 2, 1]
