"""The conformance tests of transports: every bundled transport passes, and each injected fault is detected.

The faulty ones are the transport of docs/writing-a-transport.md, each with one thing wrong.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncdist.errors import PeerLostError
from asyncdist.testing import conformance
from asyncdist.testing.cluster import world_of
from asyncdist.testing.collective_cases import between_two
from asyncdist.testing.conformance import PROMISES
from asyncdist.transport import registry
from asyncdist.transport.wire_format import HEADER_NBYTES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-transport.md"


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_product_transports_conform(transport, promise):
    if transport == "inproc" and promise is conformance.peer_declared_lost_is_told:
        pytest.skip("nothing lies between ranks of one process that could break")
    await promise(transport)


# -- transports with one thing wrong ------------------------------------------------------------------


@pytest.fixture
def pair(monkeypatch):
    """The page's module, announced as the only transport."""
    code = re.search(r"```python\n# asyncdist_pair.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    names = {"__name__": "asyncdist_pair"}
    exec(compile(code, "asyncdist_pair.py", "exec"), names)
    monkeypatch.setattr(registry, "selected", lambda _: [names["PairTransport"]])
    return SimpleNamespace(**names)


def overtakes(pair):
    def send(self, message):
        outlet = self._connected()
        outlet.queue.insert(1 if outlet.queue and outlet.queue[0].sent else 0, message)
        return False

    pair.PairLink.send = send


def finishes_before_it_has_left(pair):
    send = pair.PairLink.send

    def early(self, message):
        send(self, message)
        self._transport.host.post(message.finish)
        return False

    def send_some(self, message):
        at = message.sent - HEADER_NBYTES
        parts = (message.header[message.sent :], message.body) if at < 0 else (message.body[at:],)
        message.sent += self.sock.sendmsg(parts)
        if message.sent == HEADER_NBYTES + len(message.body):
            self.queue.popleft()
        return True

    pair.PairLink.send, pair.Outlet._send_some = early, send_some


def writes_on_into_what_was_given_up(pair):
    expect = pair.Inlet._expect

    def into_the_same(self, receive):
        if not isinstance(receive, pair.DiscardReceive):
            expect(self, receive)

    pair.Inlet._expect = into_the_same


def never_opens(pair):
    pair.PairLink.open = lambda self: None


def never_says_goodbye(pair):
    drop = pair.PairTransport.drop
    pair.PairTransport.drop = lambda self, end, *, goodbye: drop(self, end, goodbye=False)


def never_disconnects(pair):
    pair.PairTransport.disconnect = lambda self, peer: None


FAULTS = {
    overtakes: (conformance.messages_queue_in_order, "message 2 of one tag came as"),
    finishes_before_it_has_left: (conformance.messages_queue_in_order, r"message 1 of one tag came as \[-1.0"),
    writes_on_into_what_was_given_up: (
        conformance.cancelled_receive_leaves_memory_alone,
        "was written on into",
    ),
    never_opens: (conformance.receiver_learns_of_closed_link, "only by its own query that its peer left"),
    never_says_goodbye: (conformance.orderly_departure_is_not_a_loss, "rank 1 was lost"),
    never_disconnects: (conformance.peer_declared_lost_is_told, "that its peer left"),
}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_documented_example_transport_conforms(pair, promise):
    await promise("pair")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_conformance_detects_injected_fault(pair, fault, monkeypatch):
    monkeypatch.setattr(conformance, "_PATIENCE", 1.0)  # the time until a rank that is not told gives up
    promise, words = FAULTS[fault]
    fault(pair)
    with pytest.raises((AssertionError, PeerLostError), match=words):
        await promise("pair")


@pytest.mark.parametrize("fault", [overtakes, finishes_before_it_has_left], ids=lambda fault: fault.__name__)
async def test_drills_detect_injected_fault(pair, fault):
    fault(pair)
    with pytest.raises(AssertionError, match="messages of 200000"):
        await drilled()


async def drilled():
    async with world_of(2, transport="pair") as groups:
        for drill in between_two(2, 200_000, torch.float32):
            await asyncio.gather(*(work for group in groups for work in drill.start(group)))
            drill.check()
