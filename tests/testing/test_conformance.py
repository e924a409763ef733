"""The conformance tests of transports: every bundled transport passes them, and they detect each injected fault.

The faults are injected into the transport of docs/writing-a-transport.md.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncdist.errors import PeerLostError
from asyncdist.kernel.transport import registry
from asyncdist.kernel.transport.wire_format import HEADER_NBYTES
from asyncdist.testing import conformance
from asyncdist.testing.cluster import world_of
from asyncdist.testing.collective_cases import between_two
from asyncdist.testing.conformance import PROMISES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-transport.md"


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_product_transports_conform(transport, promise):
    if transport == "inproc" and promise is conformance.peer_declared_lost_is_told:
        pytest.skip("the connection between ranks of one process cannot break")
    await promise(transport)


# -- injected faults ----------------------------------------------------------------------------------


@pytest.fixture
def pair(monkeypatch):
    """The module of the page, registered as the only transport."""
    code = re.search(r"```python\n# asyncdist_pair.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    names = {"__name__": "asyncdist_pair"}
    exec(compile(code, "asyncdist_pair.py", "exec"), names)
    monkeypatch.setattr(registry, "selected", lambda _: [names["PairTransport"]])
    return SimpleNamespace(**names)


def messages_overtake_others(pair):
    def send(self, message):
        outlet = self._connected()
        outlet.queue.insert(1 if outlet.queue and outlet.queue[0].sent else 0, message)
        return False

    pair.PairLink.send = send


def sends_complete_too_early(pair):
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


def failed_receives_are_written_to(pair):
    expect = pair.Inlet._expect

    def keep_the_receive(self, receive):
        if not isinstance(receive, pair.DiscardReceive):
            expect(self, receive)

    pair.Inlet._expect = keep_the_receive


def links_never_open(pair):
    pair.PairLink.open = lambda self: None


def goodbye_is_missing(pair):
    drop = pair.PairTransport.drop
    pair.PairTransport.drop = lambda self, end, *, goodbye: drop(self, end, goodbye=False)


def disconnect_does_nothing(pair):
    pair.PairTransport.disconnect = lambda self, peer: None


FAULTS = {
    messages_overtake_others: (conformance.messages_queue_in_order, "message 2 of one tag came as"),
    sends_complete_too_early: (conformance.messages_queue_in_order, r"message 1 of one tag came as \[-1.0"),
    failed_receives_are_written_to: (conformance.cancelled_receive_leaves_memory_alone, "wrote into the memory"),
    links_never_open: (conformance.receiver_learns_of_closed_link, "only by its own query that its peer left"),
    goodbye_is_missing: (conformance.orderly_departure_is_not_a_loss, "rank 1 was lost"),
    disconnect_does_nothing: (conformance.peer_declared_lost_is_told, "that its peer left"),
}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_documented_example_transport_conforms(pair, promise):
    await promise("pair")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_conformance_detects_injected_fault(pair, fault, monkeypatch):
    monkeypatch.setattr(conformance, "_PATIENCE", 1.0)  # a receive whose peer has left unnoticed ends after this
    promise, words = FAULTS[fault]
    fault(pair)
    with pytest.raises((AssertionError, PeerLostError), match=words):
        await promise("pair")


@pytest.mark.parametrize(
    "fault", [messages_overtake_others, sends_complete_too_early], ids=lambda fault: fault.__name__
)
async def test_collective_cases_detect_injected_fault(pair, fault):
    async def run_cases():
        async with world_of(2, transport="pair") as groups:
            for case in between_two(2, 200_000, torch.float32):
                await asyncio.gather(*(work for group in groups for work in case.start(group)))
                case.check()

    fault(pair)
    with pytest.raises(AssertionError, match="messages of 200000"):
        await run_cases()
