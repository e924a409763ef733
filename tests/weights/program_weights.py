"""A publisher and a subscriber as processes, which a test paces, kills, stops and replaces."""

import contextlib
import logging
from pathlib import Path

import torch

from asyncdist.sync import weights
from asyncdist.weights.errors import WeightsError

LIMIT = 60.0


def span(model):
    """Return the least and the greatest parameter."""
    return model.weight.min().item(), model.weight.max().item()


def publisher(test, job, width, tries=0):
    """Publish a model whose parameters all equal the step that the test sends; without end if ``tries`` is set."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(width, width, bias=False).requires_grad_(False)
    with weights.Publisher(model, job=job) as publisher:
        test.send(("incarnation", publisher.incarnation))
        step = test.recv()
        while step is not None:
            model.weight.fill_(step)
            try:
                test.send(("published", publisher.publish(step).number))
            except WeightsError as error:
                test.send((type(error).__name__, error.summary))
            step = step + 1 if tries and step < tries else test.recv()


def subscriber(test, job, width):
    """Swap each version in, and report it; then do what the test says until it says None."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    like = torch.nn.Linear(width, width, bias=False).requires_grad_(False)
    with weights.Subscriber(like=like, job=job) as subscriber, contextlib.ExitStack() as held:
        test.send("entered")
        while (order := test.recv()) is not None:
            if order == "swap":
                version = subscriber.next(LIMIT)
                with subscriber.swap(version) as model:
                    test.send((version.step, *span(model)))
            elif order == "read":
                with subscriber.reading() as (model, version):
                    test.send((version.step, *span(model)))
            elif order == "hold":
                kept, its_version = held.enter_context(subscriber.reading())
                test.send(its_version.step)
            elif order == "held":
                test.send((its_version.step, *span(kept)))
            elif order == "mapped":
                test.send(
                    sum("memfd:asyncdist-segment" in line for line in Path("/proc/self/maps").read_text().splitlines())
                )
