"""A publisher and a subscriber as processes, which a test paces, kills, stops and replaces."""

import contextlib
import logging
import os
import signal
from pathlib import Path

import torch

from asyncdist.net import PeerChannel
from asyncdist.sync import weights
from asyncdist.weights.content.layout import BLOCK_NBYTES
from asyncdist.weights.errors import WeightsError
from asyncdist.weights.transfer.pulling import Pull

LIMIT = 60.0
CHANGED = 50
"""One value in so many changes between two versions of `few_changes`."""


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


def few_changes(test, job, width, role):
    """Publish, or swap in, versions of which one value in `CHANGED` is the step and the others are zeros; see `_die_at`."""
    logging.basicConfig(level=logging.WARNING)
    state = {"weight": torch.zeros(8 * width * width, dtype=torch.bfloat16)}
    if role == "publisher":
        with weights.Publisher(state, job=job) as publisher:
            test.send("entered")
            for step, dies_at in iter(test.recv, None):
                _die_at(PeerChannel, "deliver", dies_at)
                state["weight"][::CHANGED] = step
                publisher.publish(step)
                test.send("published")
        return
    with weights.Subscriber(like=state, job=job) as subscriber:
        test.send("entered")
        for order, dies_at in iter(test.recv, None):
            _die_at(Pull, "arrived", dies_at)
            if order == "swap":
                with subscriber.swap(subscriber.next(LIMIT)):
                    pass
            with subscriber.reading() as (read, version):
                changed = read["weight"][::CHANGED]
                step, total = changed[0].item(), read["weight"].sum(dtype=torch.float32).item()
                test.send((version.step, step, bool((changed == step).all()) and total == step * len(changed)))


def _die_at(kind, method, number):
    """Let this process be killed in the call of a method that gets the differences of this number of messages; 0: never."""
    original, left = getattr(kind, method), number or float("inf")

    def call(self, first, buffers=()):
        nonlocal left
        left -= bool(buffers) and max(buffer.nbytes for buffer in buffers) < BLOCK_NBYTES // 4
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, first, buffers)

    setattr(kind, method, call)
