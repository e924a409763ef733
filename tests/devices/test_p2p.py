"""Messages between devices: which way each takes, what may be under way at once, and what becomes of one that fails.

Over pretended devices, whose drivers keep CUDA's rules for memory and events that cross.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from dataclasses import replace

import pytest
import torch

from asyncdist.config import Config
from asyncdist.engine.work import Work, joined
from asyncdist.errors import (
    GroupAbortedError,
    GroupError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    UsageError,
)
from asyncdist.testing.cluster import run_ranks
from asyncdist.testing.collective_cases import between_two
from asyncdist.transport.device_p2p import MAX_PAYLOAD_NBYTES, ControlChannel, ControlMessage, TransferRefused
from tests.support.cuda import PretendDriver, cuda_ipc_over
from tests.support.devices import PretendStreams, device_group, devices_of
from tests.support.nccl import PretendNccl, nccl_over

WAYS = ["cuda_ipc", "nccl", "staged"]
LONG = 60.0  # seconds
LARGE = 40_000  # elements of 4 bytes: what goes from device to device


class Room(bytearray):
    """Memory of which one sees when it is let go of."""


class Counting(PretendStreams):
    """A device that counts what it has copied through the host."""

    def __init__(self, uuid="GPU-counting"):
        super().__init__(uuid)
        self.pinned_nbytes = 0

    def pinned(self, count, dtype):
        self.pinned_nbytes += count * dtype.itemsize
        return super().pinned(count, dtype)


def by_nccl():
    """Return the way of NCCL, and what stands in its place."""
    nccl = PretendNccl()
    return [nccl_over(nccl)], nccl


def ways_of(name):
    """Return the ways of that name, for `run`; None is cuda_ipc."""
    return {"cuda_ipc": None, "staged": [], "nccl": by_nccl()[0]}[name]


@pytest.fixture
def run(until):
    """Run ``program(group)`` on each rank's device, and see that nothing stays mapped or allocated.

    ``refusing`` is a rank on which nothing can be mapped.
    """

    def run(size, program, *, made=None, kinds=None, streams=None, transport="inproc", hosts=None, refusing=None):
        made = [] if made is None else made
        ways = {rank: [cuda_ipc_over(made)] if kinds is None else kinds for rank in range(size)}
        if refusing is not None:
            ways[refusing] = [cuda_ipc_over(made, refuses=RuntimeError("no peer access")), *(kinds or ())[1:]]
        streams = streams or [PretendStreams(f"GPU-{rank}") for rank in range(size)]

        def rank(group):
            device = device_group(group, ways[group.rank()], streams[group.rank()])
            try:
                return program(device)
            finally:
                device.close()

        results = run_ranks(size, rank, transport=transport, hosts=hosts)
        until(lambda: not any(driver.mapped or driver.taken for driver in made))  # by a line's thread, perhaps
        return results

    return run


# -- which way --------------------------------------------------------------------------------------


def test_large_messages_never_touch_the_host_and_need_no_meeting(run):
    streams = [Counting() for _ in range(3)]
    made = []

    def program(group):
        rank = group.rank()
        out, into = torch.full((LARGE,), float(rank)), torch.empty(LARGE)
        works = [group.send(out, (rank + 1) % 3), group.recv(into, (rank - 1) % 3)]
        for work in works:
            work.wait()
        assert group.backend is None, "messages made the ranks meet"
        return into.unique().tolist()

    assert run(3, program, streams=streams, made=made) == [[2.0], [0.0], [1.0]]
    assert [each.pinned_nbytes for each in streams] == [0, 0, 0]
    assert len(made) == 3
    assert all(driver.maps for driver in made)


def test_small_messages_go_through_the_host(run):
    streams = [Counting() for _ in range(2)]
    made = []

    def program(group):
        tensor = torch.full((16_384,), float(group.rank()))
        (group.recv(tensor, 0) if group.rank() else group.send(tensor, 1)).wait()
        return tensor[0].item()

    assert run(2, program, streams=streams, made=made) == [0.0, 0.0]
    assert [each.pinned_nbytes for each in streams] == [65536] * 2
    assert not any(driver.maps for driver in made)


@pytest.mark.parametrize("crosses", [True, False], ids=["shown", "copied"])
def test_every_drill(crosses, transport, run):
    made = []
    todo = [drill for count in (0, 1, LARGE) for drill in between_two(3, count, torch.float32)]
    todo += between_two(3, LARGE, torch.complex64)

    def program(group):
        for work in [work for drill in todo for work in drill.start(group)]:
            work.wait()

    run(3, program, made=made, kinds=[cuda_ipc_over(made, crosses=crosses)], transport=transport)
    for drill in todo:
        drill.check()


def test_ranks_of_other_hosts_are_reached_through_the_host(caplog, run):
    caplog.set_level(logging.INFO, "asyncdist")
    streams = [Counting() for _ in range(3)]

    def program(group):
        rank = group.rank()
        for _ in range(3):
            if rank == 0:
                for peer in (1, 2):
                    group.send(torch.ones(LARGE), peer).wait()
            else:
                group.recv(into := torch.zeros(LARGE), 0).wait()
                assert bool((into == 1).all())

    run(3, program, streams=streams, hosts=["a", "a", "b"])
    assert [each.pinned_nbytes // (4 * LARGE) for each in streams] == [3, 0, 3]
    told = [record.message for record in caplog.records if "cannot use" in record.message]
    assert told == ["messages to rank 2 cannot use cuda_ipc: it is on another host"]


def test_what_was_offered_in_vain_orders_nothing_later(run):
    def program(group):
        first, second = torch.ones(LARGE), torch.zeros(LARGE)
        for sender in range(2):
            tensor = first if group.rank() == sender else second
            work = group.send(tensor, 1 - sender) if group.rank() == sender else group.recv(tensor, sender)
            work.wait()
        return second.sum().item()

    assert run(2, program, refusing=1) == [LARGE] * 2


def test_what_cannot_be_mapped_goes_through_the_host(caplog, run):
    caplog.set_level(logging.INFO, "asyncdist")

    def program(group):
        into = torch.zeros(LARGE)
        works = [group.send(torch.ones(LARGE), 1 - group.rank()) for _ in range(3)]
        works += [group.recv(into, 1 - group.rank()) for _ in range(3)]
        for work in works:
            work.wait()
        return into.sum().item()

    assert run(2, program, refusing=1) == [LARGE] * 2
    told = {record.message for record in caplog.records if "cannot use" in record.message}
    assert told == {"messages to rank 1 cannot use cuda_ipc: its device's memory cannot be mapped: no peer access"}


def test_memory_that_is_not_the_peers_is_not_read(run):
    """As where processes are numbered anew, and a handle means something else."""
    made = []

    class Elsewhere(cuda_ipc_over(made)):
        @classmethod
        def make_p2p(cls, context):
            found = super().make_p2p(context)
            if context.rank == 0:
                found._probe_bytes = bytes(16)
            return found

    streams = [Counting() for _ in range(2)]

    def program(group):
        tensor = torch.full((LARGE,), float(group.rank()))
        (group.recv(tensor, 0) if group.rank() else group.send(tensor, 1)).wait()
        return tensor[0].item()

    assert run(2, program, made=made, kinds=[Elsewhere], streams=streams) == [0.0, 0.0]
    assert all(each.pinned_nbytes == 4 * LARGE for each in streams)


def test_a_way_that_only_one_rank_knows_is_refused():
    made = []

    def rank(group):
        device = device_group(group, [cuda_ipc_over(made)] if group.rank() == 0 else [])
        tensor = torch.full((LARGE,), float(group.rank()))
        (device.recv(tensor, 0) if group.rank() else device.send(tensor, 1)).synchronize()
        device.close()
        return tensor[0].item()

    assert run_ranks(2, rank) == [0.0, 0.0]


@pytest.mark.parametrize("piece_nbytes", [1, 7, 64, 400])
async def test_large_messages_through_the_host_go_in_pieces(piece_nbytes, transport):
    config = replace(Config(), device_piece_nbytes=piece_nbytes)
    async with devices_of(2, transport=transport, config=config) as (first, second):
        for count in (0, 1, 16, 100):
            sent, into = torch.arange(count, dtype=torch.float32), torch.zeros(count)
            _, source = await asyncio.gather(first.send(sent, 1), second.recv(into))
            assert source == 0
            assert torch.equal(sent, into)


# -- by NCCL ------------------------------------------------------------------------------------------


def ended(nccl, until):
    until(lambda: all(made.ended for made in nccl.communicators))
    assert {made.ended for made in nccl.communicators} == {"destroyed"}
    assert not nccl.collected
    assert not any(messages for made in nccl.communicators for messages in made.meeting.messages.values())


def test_ranks_with_a_device_each_send_by_nccl(until, transport, run):
    kinds, nccl = by_nccl()
    streams = [Counting(f"GPU-{rank}") for rank in range(3)]
    todo = [drill for _ in range(3) for drill in between_two(3, LARGE, torch.float32)]

    def program(group):
        for work in [work for drill in todo for work in drill.start(group)]:
            work.wait()
        assert group.backend is None, "messages made the ranks meet"

    run(3, program, kinds=kinds, streams=streams, transport=transport)
    for drill in todo:
        drill.check()
    assert [each.pinned_nbytes for each in streams] == [0, 0, 0]
    assert len(nccl.communicators) == 6, "one for each two ranks"
    ended(nccl, until)


def test_both_ends_of_a_communicator_see_the_same_order(until, run):
    kinds, nccl = by_nccl()

    def program(group):
        rank, peer, works = group.rank(), 1 - group.rank(), []
        for tag in range(40):  # each rank in an order of its own
            tag = tag if rank else 39 - tag
            works.append(group.send(torch.full((LARGE,), float(tag)), peer, tag))
            works.append(group.recv(torch.empty(LARGE), peer, tag))
        for work in works:
            work.wait()

    run(2, program, kinds=kinds)
    one, other = sorted(nccl.communicators, key=lambda made: made.rank)
    names = [[call[0] for call in made.log] for made in (one, other)]
    assert names[0][:2] == names[1][:2] == ["send", "recv"]  # the first ones, together
    mirrored = {"send": "recv", "recv": "send"}
    assert names[0][2:] == [mirrored[name] for name in names[1][2:]]
    ended(nccl, until)


def test_ranks_of_one_device_do_not_send_by_nccl(caplog, run):
    caplog.set_level(logging.INFO, "asyncdist")
    kinds, _ = by_nccl()
    streams = [Counting("GPU-0"), Counting("GPU-0"), Counting("GPU-1")]

    def program(group):
        tensor = torch.full((LARGE,), float(group.rank()))
        if group.rank() == 0:
            for peer in (1, 2):
                group.send(tensor, peer).wait()
        else:
            group.recv(tensor, 0).wait()
        return tensor[0].item()

    assert run(3, program, kinds=kinds, streams=streams) == [0.0] * 3
    assert [each.pinned_nbytes // (4 * LARGE) for each in streams] == [1, 1, 0]
    assert "messages to rank 1 cannot use nccl: both ranks share one device" in caplog.text


def test_what_cannot_be_mapped_goes_by_the_next_way(run):
    kinds, nccl = by_nccl()
    streams = [Counting(f"GPU-{rank}") for rank in range(2)]

    def program(group):
        tensor = torch.full((LARGE,), float(group.rank()))
        for _ in range(3):
            (group.recv(tensor, 0) if group.rank() else group.send(tensor, 1)).wait()
        return tensor[0].item()

    made = []
    assert run(2, program, made=made, kinds=[cuda_ipc_over(made), *kinds], streams=streams, refusing=1) == [0.0, 0.0]
    assert [each.pinned_nbytes for each in streams] == [0, 0]
    assert len(nccl.communicators) == 2


def test_versions_of_nccl_that_differ_are_told():
    ways = [[nccl_over(PretendNccl())], [nccl_over(PretendNccl(version=22704))]]
    streams = [Counting(f"GPU-{rank}") for rank in range(2)]

    def rank(group):
        device = device_group(group, ways[group.rank()], streams[group.rank()])
        tensor = torch.full((LARGE,), float(group.rank()))
        (device.recv(tensor, 0) if group.rank() else device.send(tensor, 1)).wait()
        device.close()
        return tensor[0].item()

    assert run_ranks(2, rank) == [0.0, 0.0]
    assert [each.pinned_nbytes for each in streams] == [4 * LARGE] * 2


def test_a_communicator_that_cannot_be_made_fails_the_message(until):
    kinds, nccl = by_nccl()
    plain = nccl.NcclCommunicator.__init__

    def init(self, size, unique_id, rank):
        if rank == 1:
            raise nccl.NcclError(1)
        plain(self, size, unique_id, rank)

    nccl.NcclCommunicator.__init__ = init

    def rank(group):
        device = device_group(group, kinds, PretendStreams(f"GPU-{group.rank()}"))
        tensor = torch.ones(LARGE)
        work = device.recv(tensor, 0) if group.rank() else device.send(tensor, 1)
        try:
            with pytest.raises(GroupError) as caught:
                joined([work, device.barrier()]).wait()
            return str(caught.value)
        finally:
            device.close()

    for words in run_ranks(2, rank):
        assert "NCCL failed" in words
    nccl.hang_up()
    until(lambda: all(made.ended for made in nccl.communicators))


# -- what may be under way at once --------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_both_send_first_do_not_hold_each_other_up(way, count, transport, run):
    def program(group):
        rank, peer = group.rank(), 1 - group.rank()
        out = [torch.full((count,), float(10 * rank + which)) for which in range(8)]
        into = [torch.empty(count) for _ in out]
        works = [group.send(tensor, peer) for tensor in out]
        works += [group.recv(tensor, peer) for tensor in into]
        for work in works:
            work.wait()
        assert [tensor[0].item() for tensor in into] == [10 * peer + which for which in range(8)]

    run(2, program, kinds=ways_of(way), transport=transport)


@pytest.mark.parametrize("way", ["cuda_ipc", "staged"])  # the pretended NCCL blocks where the real one does not
@pytest.mark.parametrize("count", [10, LARGE])
def test_ranks_may_call_messages_and_collectives_in_another_order(way, count, run):
    def program(group):
        tensor, message = torch.ones(LARGE), torch.ones(count)
        group.all_reduce(tensor).wait()
        if group.rank() == 0:
            reduced = group.all_reduce(tensor)  # stands in line, until the other rank comes to it
            group.send(message, 1).wait()
            group.recv(message, 1, background=False)
            reduced.wait()
        else:
            group.recv(message, 0).wait()
            group.send(message, 0, background=False)
            group.all_reduce(tensor, background=False)
        return tensor.unique().tolist()

    assert run(2, program, kinds=ways_of(way)) == [[4.0], [4.0]]


def test_events_are_used_again_and_never_too_early(run):
    """`TheirEvent` asserts that each wait finds the record that it means."""
    made = []

    def program(group):
        rank, events = group.rank(), 0
        for number in range(60):
            tensors = [torch.full((LARGE,), float(number)) for _ in range(1 + number % 4)]
            peers = [peer for peer in range(3) if peer != rank]
            works = [group.recv(torch.empty(LARGE), peer, tag) for tag in range(len(tensors)) for peer in peers]
            works += [group.send(tensor, peer, tag) for tag, tensor in enumerate(tensors) for peer in peers]
            for work in works:
                work.wait()
            if number == 30:
                events = len(group._messages._backends["cuda_ipc"]._events.all)
        return events, len(group._messages._backends["cuda_ipc"]._events.all)

    for early, late in run(3, program, made=made, transport="shm"):
        assert late <= early + 8, (
            f"{early} events after half of the messages, {late} after all: they are not used again"
        )
        assert late <= 2 * 2 * 4 + 8


def test_from_any_rank_large_and_small_in_turn(run):
    def program(group):
        rank = group.rank()
        counts = [10, LARGE, 10, LARGE]
        if rank:
            for count in counts:
                group.send(torch.full((count,), float(rank)), 0, tag=count).wait()
            return None
        sources = []
        for count in counts * 2:
            group_work = group.recv(into := torch.empty(count), tag=count)
            group_work.wait()
            sources.append(group_work.result())
            assert into.unique().tolist() == [float(sources[-1])]
        return sorted(sources)

    assert run(3, program)[0] == [1] * 4 + [2] * 4


async def test_awaited_on_one_loop():
    made = []
    async with devices_of(3, [cuda_ipc_over(made)]) as groups:
        for count in (10, LARGE):
            into = [torch.empty(count, 2)[:, 0] for _ in groups]  # not in a row
            out = [torch.full((2, count), float(rank)).t()[:, 1] for rank in range(3)]
            works = [group.recv(into[rank], (rank + 1) % 3) for rank, group in enumerate(groups)]
            works += [group.send(out[rank], (rank - 1) % 3) for rank, group in enumerate(groups)]
            assert (await asyncio.gather(*works))[:3] == [1, 2, 0]
            assert [tensor.unique().tolist() for tensor in into] == [[1.0], [2.0], [0.0]]
        assert all(driver.maps for driver in made)


def test_to_oneself_is_refused(run):
    def program(group):
        for call in (lambda: group.send(torch.ones(LARGE), group.rank()), lambda: group.recv(torch.ones(1), 0)):
            with pytest.raises(UsageError, match="a message to oneself is a copy"):
                call()

    run(1, program)


# -- streams ------------------------------------------------------------------------------------------


def test_wait_leaves_the_device_going(run):
    streams = [PretendStreams() for _ in range(2)]

    def program(group):
        rank = group.rank()
        group._host.barrier().wait()
        streams[rank].hold()
        tensor = torch.ones(LARGE)
        work = group.recv(tensor, 0) if rank else group.send(tensor, 1)
        assert work.wait()
        assert not work.is_completed()
        assert streams[rank].log[-1] == ("wait_event", "caller")
        streams[rank].release()
        work.synchronize()

    run(2, program, streams=streams)


def test_a_message_that_waits_for_the_device_holds_up_no_other(run):
    streams = [PretendStreams() for _ in range(2)]

    def program(group):
        if group.rank():
            group.send(torch.ones(3), 0).wait()
            group.recv(into := torch.zeros(3), 0).wait()
            return into.tolist()
        streams[0].hold()
        sent = group.send(torch.full((3,), 2.0), 1)  # is still on its way down to the host
        group.recv(into := torch.zeros(3), 1).wait()
        assert not sent.is_completed()
        streams[0].release()
        sent.synchronize()
        return into.tolist()

    assert run(2, program, streams=streams) == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("count", [10, LARGE])
def test_tensors_are_held_until_the_device_is_done(count, until, run):
    streams = [PretendStreams() for _ in range(2)]

    def program(group):
        rank = group.rank()
        group._host.barrier().wait()
        room = Room(4 * count)
        seen, tensor = weakref.ref(room), torch.frombuffer(room, dtype=torch.float32)
        del room
        if rank:
            streams[1].hold()
            work = group.recv(tensor, 0)
        else:
            work = group.send(tensor, 1)
        del tensor
        work.wait()
        if rank:
            gc.collect()
            assert seen() is not None, "the device may still write there"
            streams[1].release()
        work.synchronize()
        del work
        until(lambda: gc.collect() >= 0 and seen() is None)

    run(2, program, streams=streams)


# -- leaving ------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [0, 10, LARGE])
@pytest.mark.parametrize("way", WAYS)
def test_who_leaves_when_its_messages_are_over_is_missed_by_nobody(way, count, transport, run):
    def program(group):
        works = []
        for tag in range(2):
            tensor = torch.full((count,), float(group.rank()))
            works.append(group.recv(tensor, 0, tag) if group.rank() else group.send(tensor, 1, tag))
        for work in works:
            work.wait()

    for _ in range(5):
        run(2, program, kinds=ways_of(way), transport=transport)


@pytest.mark.parametrize("way", ["cuda_ipc", "nccl"])
def test_no_message_is_over_before_its_letters_have_left(way, until, monkeypatch, run):
    say, held = ControlChannel.send, ([], [])

    def hold(channel, kind="", payload=b""):
        left = Work()

        def leave():
            sent = say(channel, kind, payload)
            sent.add_done_callback(lambda _: (left.finish(), left.run_callbacks()))

        held[1 - channel.peer].append(leave)
        return left

    monkeypatch.setattr(ControlChannel, "send", hold)

    def program(group):
        rank, tensor, stands = group.rank(), torch.ones(LARGE), threading.Event()
        work = group.recv(tensor, 0) if rank else group.send(tensor, 1)
        while not work.is_completed():
            until(lambda: held[rank] or work.is_completed())
            stands.clear()
            group._messages.executor.put(stands.set)  # behind the step in which it was said
            assert stands.wait(LONG)
            assert not (held[rank] and work.is_completed())
            while held[rank]:
                held[rank].pop()()
        work.wait()

    run(2, program, kinds=ways_of(way))


def test_an_answer_heard_after_its_sender_has_left_ends_the_message_well():
    """What the sender would say then would reach nobody, and fail its messages to others."""
    left = threading.Event()

    class Late(PretendDriver):
        def event_of(self, handle):
            assert left.wait(LONG)
            return super().event_of(handle)

    class Slow(cuda_ipc_over()):
        make_driver = staticmethod(lambda device: Late())

    def rank(group):
        rank, other = group.rank(), group.world.new_group([0, 1])
        device = device_group(group, [Slow] if rank == 0 else [cuda_ipc_over()])
        tensor = torch.full((LARGE,), float(rank))
        try:
            if rank:
                device.recv(tensor, 0).wait()
                return tensor[0].item()
            first = device.send(tensor, 1)
            with pytest.raises(PeerLostError, match="rank 1"):
                other.recv(torch.zeros(1), 1).wait()
            left.set()
            first.wait()
            device.send(tensor, 2).wait()
            return tensor[0].item()
        finally:
            device.close()

    assert run_ranks(3, rank) == [0.0] * 3


# -- failing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(torch.ones(LARGE), torch.ones(LARGE + 1)), (torch.ones(LARGE), torch.ones(LARGE, dtype=torch.int32)),
     (torch.ones(5), torch.ones(LARGE)), (torch.ones(LARGE), torch.ones(5))],
    ids=["longer", "other dtype", "small and large", "large and small"],
)  # fmt: skip
def test_sizes_and_types_that_differ_are_told_apart(sent, expected):
    def program(group):
        work = group.recv(expected.clone(), 0) if group.rank() else group.send(sent, 1)
        with pytest.raises(GroupError) as caught:
            joined([work, group.barrier()]).wait()  # a small message may have left before it was found not to fit
        return caught.value

    def rank(group):
        device = device_group(group, [cuda_ipc_over()])
        try:
            return program(device)
        finally:
            device.close()

    errors = run_ranks(2, rank)
    assert isinstance(errors[1], MismatchError)
    assert "send" in str(errors[0]) or "send" in str(errors[1])


def test_a_count_beyond_the_fingerprint_is_told_apart():
    async def main():
        async with devices_of(2, [cuda_ipc_over()]) as (first, second):
            huge = torch.ones(1, dtype=torch.uint8).expand(1 << 24)  # the same number modulo 2^24 as none
            works = [first.send(huge, 1), second.recv(torch.empty(0, dtype=torch.uint8), 0)]
            outcomes = await asyncio.gather(*works, return_exceptions=True)
            assert "rank 0 sent 16777216 bytes where 0 were expected" in str(outcomes[1])
            assert isinstance(outcomes[0], GroupError)

    asyncio.run(main())


@pytest.mark.parametrize("count", [10, LARGE])
def test_a_message_that_nobody_takes_ends_at_its_deadline(count):
    def rank(group):
        device = device_group(group, [cuda_ipc_over()])
        try:
            if group.rank() == 0:
                with pytest.raises(OperationTimeoutError):
                    device.recv(torch.empty(count), 1, timeout=0.3).wait()
            with pytest.raises(GroupError):
                device.barrier().wait()
        finally:
            device.close()

    run_ranks(2, rank)


async def test_what_is_pending_fails_when_the_group_is_destroyed():
    async with devices_of(2, [cuda_ipc_over()]) as groups:
        works = [groups[0].send(torch.ones(LARGE), 1), groups[0].recv(torch.ones(LARGE), 1)]
        groups[0].close()
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(outcome, GroupAbortedError)
            assert "the group was destroyed" in str(outcome)


async def test_who_waits_still_when_all_others_have_left_has_what_they_sent(transport, eventually):
    async with devices_of(3, transport=transport) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        free = threading.Event()
        last = groups[0]
        last._messages.executor.put(free.wait)  # a busy process
        last._desync_detector.listen()  # as who has waited for some time does
        into = [torch.zeros(5) for _ in range(2)]
        works = [last.recv(room, peer) for room, peer in zip(into, (1, 2), strict=True)]
        for group in groups[1:]:
            await group.send(torch.full((5,), float(group.rank())), 0)
            group.close()
            group._host.mesh.close()
        await eventually(lambda: last._desync_detector.error)
        last._check_health(last._watcher._pending[0])
        free.set()
        assert await asyncio.gather(*works) == [1, 2]
        assert [room.tolist() for room in into] == [[1.0] * 5, [2.0] * 5]


async def test_what_a_device_reports_is_told_to_the_other():
    streams = [PretendStreams() for _ in range(2)]
    async with devices_of(2, [cuda_ipc_over()], streams) as groups:
        await asyncio.gather(groups[0].send(torch.ones(LARGE), 1), groups[1].recv(torch.ones(LARGE), 0))
        streams[1].broken = RuntimeError("an illegal memory access was encountered")
        works = [groups[0].send(torch.ones(4), 1), groups[1].recv(torch.ones(4), 0), groups[0].recv(torch.ones(4), 1)]
        outcomes = await asyncio.gather(*works[1:], return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, GroupAbortedError)
            assert outcome.peer == 1
            assert "an illegal memory access" in str(outcome)
        streams[1].broken = None


# -- control_group ------------------------------------------------------------------------------------------


def test_letters_are_of_one_size_and_keep_what_they_say():
    for message in (ControlMessage("cuda_ipc", 7, 1 << 40, b"x" * MAX_PAYLOAD_NBYTES), ControlMessage("", 0, 0)):
        assert message.packed().numel() == 512
        assert ControlMessage.unpacked(message.packed()) == message
    assert issubclass(TransferRefused, Exception)
