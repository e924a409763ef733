"""The picture and the description of a training step."""

import pytest
import torch
from torch import nn

from asyncdist.ddp import BucketTimes, DistributedDataParallel, StepTimes
from asyncdist.ddp.timeline import describe_step, draw_step
from asyncdist.errors import UsageError
from tests.support.ranks import on_ranks


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


def step_of(count):
    """A backward from second 1 to second 3, in which ``count`` buckets are ready, and whose last all-reduce ends later."""
    buckets = [
        BucketTimes(number, 2048, ready=1 + 2 * (number + 1) / count, started=1 + 2 * (number + 1) / count)
        for number in range(count)
    ]
    for bucket in buckets:
        bucket.finished = bucket.started + 0.5
    return StepTimes(1.0, 3.0, 3.5, buckets, forward_started=0.25)


def test_hidden_share_is_that_of_the_time_during_backward():
    assert step_of(2).hidden_share == 0.5
    assert step_of(4).hidden_share == 0.75
    assert StepTimes(0.0).hidden_share == 1.0


def test_description_names_the_times_and_the_last_parameters():
    assert describe_step(step_of(2), [["b.weight"], ["a.weight", "a.bias"]]) == (
        "forward 750.00 ms, backward 2000.00 ms, wait for all-reduces 500.00 ms: 50% of the all-reduces' time passed "
        "during backward; the last gradients were those of a.weight, a.bias"
    )


@pytest.mark.parametrize("count", [0, 1, 40])
def test_any_number_of_buckets_can_be_drawn(count):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    draw_step(axes, step_of(count), ["layer, "] * count)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "this rank"
    assert labels[1:2] == ["layer, 2.0 KiB"] * (count > 0)
    assert len(labels) <= 17
    assert axes.get_xlim() == (0.0, pytest.approx(1.02 * 3250.0))


@pytest.mark.usefixtures("matplotlib")
@on_ranks(2)
def test_step_of_a_model_is_drawn(group, tmp_path):
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    with pytest.raises(UsageError, match="no backward has averaged gradients yet"):
        model.timeline()
    model(torch.ones(2, 4)).sum().backward()
    path = tmp_path / f"step{group.rank()}.png"
    said = model.timeline(path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert said == model.timeline()
    assert said.endswith(f"the last gradients were those of {', '.join(model.bucket_parameters[-1])}")
    step = model.last_step
    assert 0 < step.forward_started < step.backward_started < step.backward_finished <= step.finished


@pytest.mark.usefixtures("matplotlib")
@on_ranks(2)
def test_file_that_cannot_be_drawn_is_refused(group, tmp_path):
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UsageError, match="must end in png, svg or pdf"):
        model.timeline(tmp_path / "step.txt")
