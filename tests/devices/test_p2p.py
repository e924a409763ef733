"""Point-to-point messages between devices: the choice of the backend, order, concurrency and failures.

They run over pretended devices, whose drivers keep CUDA's rules for shared memory and interprocess events.
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
from asyncdist.transport.device_p2p import MAX_PAYLOAD_NBYTES, ControlChannel, ControlMessage
from tests.support.cuda import PretendDriver, cuda_ipc_over
from tests.support.devices import PretendStreams, device_group, devices_of, run_on_devices
from tests.support.nccl import PretendNccl, nccl_over

WAYS = ["cuda_ipc", "nccl", "staged"]
LONG = 60.0  # seconds
# Elements of 4 bytes of a message that goes from device to device.
LARGE = 40_000


class Room(bytearray):
    """Memory that can be referenced weakly."""


class Counting(PretendStreams):
    """A device that counts the bytes that are copied through the host."""

    def __init__(self, uuid="GPU-counting"):
        super().__init__(uuid)
        self.pinned_nbytes = 0

    def pinned(self, count, dtype):
        self.pinned_nbytes += count * dtype.itemsize
        return super().pinned(count, dtype)


def by_nccl():
    """Return the NCCL backend over a pretended NCCL, and that NCCL."""
    nccl = PretendNccl()
    return [nccl_over(nccl)], nccl


def ways_of(name):
    """Return the backends of that name, for `run`; None is cuda_ipc."""
    return {"cuda_ipc": None, "staged": [], "nccl": by_nccl()[0]}[name]


def from_rank_0(device):
    """Send from rank 0 to rank 1; return what each rank holds in the end."""
    tensor = torch.full((LARGE,), float(device.rank()))
    (device.recv(tensor, 0) if device.rank() else device.send(tensor, 1)).wait()
    return tensor[0].item()


@pytest.fixture
def run(until):
    """Run ``program(device)`` on each rank's device, and check that nothing stays mapped or allocated.

    ``refusing`` is a rank that can map nothing.
    """

    def run(size, program, *, made=None, kinds=None, streams=None, transport="inproc", hosts=None, refusing=None):
        made = [] if made is None else made
        ways = {rank: [cuda_ipc_over(made)] if kinds is None else kinds for rank in range(size)}
        if refusing is not None:
            ways[refusing] = [cuda_ipc_over(made, refuses=RuntimeError("no peer access")), *(kinds or ())[1:]]
        streams = streams or [PretendStreams(f"GPU-{rank}") for rank in range(size)]
        results = run_on_devices(size, program, ways.get, streams, transport=transport, hosts=hosts)
        # An executor's thread may still release memory.
        until(lambda: not any(driver.mapped or driver.taken for driver in made))
        return results

    return run


# -- the backend -------------------------------------------------------------------------------------


def test_large_messages_bypass_the_host_and_need_no_negotiation(run):
    streams = [Counting() for _ in range(3)]
    made = []

    def program(group):
        rank = group.rank()
        out, into = torch.full((LARGE,), float(rank)), torch.empty(LARGE)
        works = [group.send(out, (rank + 1) % 3), group.recv(into, (rank - 1) % 3)]
        for work in works:
            work.wait()
        assert group.backend is None, "messages negotiated a backend"
        return into.unique().tolist()

    assert run(3, program, streams=streams, made=made) == [[2.0], [0.0], [1.0]]
    assert [each.pinned_nbytes for each in streams] == [0, 0, 0]
    assert len(made) == 3
    assert all(driver.maps for driver in made)


def test_small_messages_are_staged(run):
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
def test_every_message_case(crosses, transport, run):
    made = []
    todo = [drill for count in (0, 1, LARGE) for drill in between_two(3, count, torch.float32)]
    todo += between_two(3, LARGE, torch.complex64)

    def program(group):
        for work in [work for drill in todo for work in drill.start(group)]:
            work.wait()

    run(3, program, made=made, kinds=[cuda_ipc_over(made, crosses=crosses)], transport=transport)
    for drill in todo:
        drill.check()


def test_messages_between_hosts_are_staged(caplog, run):
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


def test_refused_offers_fall_back_to_the_host(caplog, run):
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


def test_mapping_of_other_memory_is_refused(run):
    """A handle may mean other memory, as between containers that number their processes alike."""
    made = []

    class Elsewhere(cuda_ipc_over(made)):
        @classmethod
        def make_p2p(cls, context):
            found = super().make_p2p(context)
            if context.rank == 0:
                found._memory.probe = found._memory.probe[:-16] + bytes(16)
            return found

    streams = [Counting() for _ in range(2)]
    assert run(2, from_rank_0, made=made, kinds=[Elsewhere], streams=streams) == [0.0, 0.0]
    assert all(each.pinned_nbytes == 4 * LARGE for each in streams)


def test_backend_that_only_the_sender_has_is_refused():
    kinds = [[cuda_ipc_over()], []]
    assert run_on_devices(2, from_rank_0, kinds.__getitem__) == [0.0, 0.0]


@pytest.mark.parametrize("piece_nbytes", [1, 7, 64, 400])
async def test_staged_messages_are_split_into_pieces(piece_nbytes, transport):
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


def test_ranks_with_a_device_each_use_nccl(until, transport, run):
    kinds, nccl = by_nccl()
    streams = [Counting(f"GPU-{rank}") for rank in range(3)]
    todo = [drill for _ in range(3) for drill in between_two(3, LARGE, torch.float32)]

    def program(group):
        for work in [work for drill in todo for work in drill.start(group)]:
            work.wait()
        assert group.backend is None, "messages negotiated a backend"

    run(3, program, kinds=kinds, streams=streams, transport=transport)
    for drill in todo:
        drill.check()
    assert [each.pinned_nbytes for each in streams] == [0, 0, 0]
    assert len(nccl.communicators) == 6, "one for each two ranks"
    ended(nccl, until)


def test_both_ends_of_a_communicator_enqueue_in_the_same_order(until, run):
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


def test_ranks_that_share_a_device_do_not_use_nccl(caplog, run):
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


def test_refused_offers_fall_back_to_nccl(run):
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


def test_different_nccl_versions_fall_back_to_the_host():
    ways = [[nccl_over(PretendNccl())], [nccl_over(PretendNccl(version=22704))]]
    streams = [Counting(f"GPU-{rank}") for rank in range(2)]

    assert run_on_devices(2, from_rank_0, ways.__getitem__, streams) == [0.0, 0.0]
    assert [each.pinned_nbytes for each in streams] == [4 * LARGE] * 2


def test_failed_communicator_fails_the_message(until):
    kinds, nccl = by_nccl()
    plain = nccl.NcclCommunicator.__init__

    def init(self, size, unique_id, rank):
        if rank == 1:
            raise nccl.NcclError(1)
        plain(self, size, unique_id, rank)

    nccl.NcclCommunicator.__init__ = init

    def program(device):
        tensor = torch.ones(LARGE)
        work = device.recv(tensor, 0) if device.rank() else device.send(tensor, 1)
        with pytest.raises(GroupError) as caught:
            joined([work, device.barrier()]).wait()
        return str(caught.value)

    for words in run_on_devices(2, program, kinds, [PretendStreams(f"GPU-{rank}") for rank in range(2)]):
        assert "NCCL failed" in words
    nccl.hang_up()
    until(lambda: all(made.ended for made in nccl.communicators))


# -- concurrency ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_both_send_first_do_not_deadlock(way, count, transport, run):
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
def test_ranks_may_order_messages_and_collectives_differently(way, count, run):
    def program(group):
        tensor, message = torch.ones(LARGE), torch.ones(count)
        group.all_reduce(tensor).wait()
        if group.rank() == 0:
            reduced = group.all_reduce(tensor)
            group.send(message, 1).wait()
            group.recv(message, 1, background=False)
            reduced.wait()
        else:
            group.recv(message, 0).wait()
            group.send(message, 0, background=False)
            group.all_reduce(tensor, background=False)
        return tensor.unique().tolist()

    assert run(2, program, kinds=ways_of(way)) == [[4.0], [4.0]]


def test_events_are_reused_and_never_too_early(run):
    """`TheirEvent` asserts that each wait finds the record that it means."""
    made = []

    def program(group):
        rank = group.rank()
        for number in range(60):
            tensors = [torch.full((LARGE,), float(number)) for _ in range(1 + number % 4)]
            peers = [peer for peer in range(3) if peer != rank]
            works = [group.recv(torch.empty(LARGE), peer, tag) for tag in range(len(tensors)) for peer in peers]
            works += [group.send(tensor, peer, tag) for tag, tensor in enumerate(tensors) for peer in peers]
            for work in works:
                work.wait()

    run(3, program, made=made, transport="shm")
    # 60 rounds of up to 4 messages in each direction with 2 peers.
    assert max(driver.made_events for driver in made) <= 2 * 2 * 4 + 8


def test_receive_from_any_rank_of_large_and_small_messages(run):
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


async def test_strided_messages_between_ranks_of_one_loop():
    made = []
    async with devices_of(3, [cuda_ipc_over(made)]) as groups:
        for count in (10, LARGE):
            into = [torch.empty(count, 2)[:, 0] for _ in groups]  # strided
            out = [torch.full((2, count), float(rank)).t()[:, 1] for rank in range(3)]
            works = [group.recv(into[rank], (rank + 1) % 3) for rank, group in enumerate(groups)]
            works += [group.send(out[rank], (rank - 1) % 3) for rank, group in enumerate(groups)]
            assert (await asyncio.gather(*works))[:3] == [1, 2, 0]
            assert [tensor.unique().tolist() for tensor in into] == [[1.0], [2.0], [0.0]]
        assert all(driver.maps for driver in made)


def test_message_to_the_own_rank_is_refused(run):
    def program(group):
        for call in (lambda: group.send(torch.ones(LARGE), group.rank()), lambda: group.recv(torch.ones(1), 0)):
            with pytest.raises(UsageError, match="a message to oneself is a copy"):
                call()

    run(1, program)


# -- streams ------------------------------------------------------------------------------------------


def test_wait_does_not_block_for_the_device(run):
    streams = [PretendStreams() for _ in range(2)]

    def program(group):
        rank = group.rank()
        group.host.barrier().wait()
        streams[rank].hold()
        tensor = torch.ones(LARGE)
        work = group.recv(tensor, 0) if rank else group.send(tensor, 1)
        assert work.wait()
        assert not work.is_completed()
        assert streams[rank].log[-1] == ("wait_event", "caller")
        streams[rank].release()
        work.synchronize()

    run(2, program, streams=streams)


def test_message_that_waits_for_the_device_does_not_delay_others(run):
    streams = [PretendStreams() for _ in range(2)]

    def program(group):
        if group.rank():
            group.send(torch.ones(3), 0).wait()
            group.recv(into := torch.zeros(3), 0).wait()
            return into.tolist()
        streams[0].hold()
        sent = group.send(torch.full((3,), 2.0), 1)
        group.recv(into := torch.zeros(3), 1).wait()
        assert not sent.is_completed()
        streams[0].release()
        sent.synchronize()
        return into.tolist()

    assert run(2, program, streams=streams) == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("count", [10, LARGE])
def test_tensors_live_until_the_device_is_done(count, until, run):
    streams = [PretendStreams() for _ in range(2)]

    def program(group):
        rank = group.rank()
        group.host.barrier().wait()
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
def test_rank_may_leave_when_its_messages_are_complete(way, count, transport, run):
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
def test_message_completes_after_its_control_messages_are_sent(way, until, monkeypatch, run):
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
        rank, tensor, executed = group.rank(), torch.ones(LARGE), threading.Event()
        work = group.recv(tensor, 0) if rank else group.send(tensor, 1)
        while not work.is_completed():
            until(lambda: held[rank] or work.is_completed())
            executed.clear()
            group.messages.executor.put(executed.set)
            assert executed.wait(LONG)
            assert not (held[rank] and work.is_completed())
            while held[rank]:
                held[rank].pop()()
        work.wait()

    run(2, program, kinds=ways_of(way))


def test_message_succeeds_if_the_receiver_leaves_after_its_answer():
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
def test_mismatched_sizes_and_dtypes_raise(sent, expected):
    def program(group):
        work = group.recv(expected.clone(), 0) if group.rank() else group.send(sent, 1)
        # The barrier fails too: a small message may be complete for its sender.
        with pytest.raises(GroupError) as caught:
            joined([work, group.barrier()]).wait()
        return caught.value

    errors = run_on_devices(2, program, [cuda_ipc_over()])
    assert isinstance(errors[1], MismatchError)
    assert "send" in str(errors[0]) or "send" in str(errors[1])


async def test_mismatched_size_that_the_fingerprint_cannot_hold_raises():
    async with devices_of(2, [cuda_ipc_over()]) as (first, second):
        huge = torch.ones(1, dtype=torch.uint8).expand(1 << 24)  # equals 0 modulo 2^24
        works = [first.send(huge, 1), second.recv(torch.empty(0, dtype=torch.uint8), 0)]
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        assert "rank 0 sent 16777216 bytes where 0 were expected" in str(outcomes[1])
        assert isinstance(outcomes[0], GroupError)


@pytest.mark.parametrize("count", [10, LARGE])
def test_unmatched_receive_times_out(count):
    timed_out = threading.Event()

    def program(device):
        if device.rank() == 0:
            with pytest.raises(OperationTimeoutError):
                device.recv(torch.empty(count), 1, timeout=0.3).wait()
            timed_out.set()
        assert timed_out.wait(LONG)
        with pytest.raises(GroupError):
            device.barrier().wait()

    run_on_devices(2, program, [cuda_ipc_over()])


async def test_pending_messages_fail_when_the_group_is_destroyed():
    async with devices_of(2, [cuda_ipc_over()]) as groups:
        works = [groups[0].send(torch.ones(LARGE), 1), groups[0].recv(torch.ones(LARGE), 1)]
        groups[0].close()
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(outcome, GroupAbortedError)
            assert "the group was destroyed" in str(outcome)


async def test_receive_completes_after_all_senders_have_left(transport, eventually):
    async with devices_of(3, transport=transport) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        free = threading.Event()
        last = groups[0]
        last.messages.executor.put(free.wait)
        last.desync_detector.listen()
        into = [torch.zeros(5) for _ in range(2)]
        works = [last.recv(room, peer) for room, peer in zip(into, (1, 2), strict=True)]
        for group in groups[1:]:
            await group.send(torch.full((5,), float(group.rank())), 0)
            group.close()
            group.host.mesh.close()
        await eventually(lambda: last.desync_detector.error)
        last._check_health(last._watcher._pending[0])
        free.set()
        assert await asyncio.gather(*works) == [1, 2]
        assert [room.tolist() for room in into] == [[1.0] * 5, [2.0] * 5]


async def test_device_error_reaches_the_peer():
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


# -- control messages ---------------------------------------------------------------------------------------


def test_control_message_round_trip():
    for message in (ControlMessage("cuda_ipc", 7, 1 << 40, b"x" * MAX_PAYLOAD_NBYTES), ControlMessage("", 0, 0)):
        assert message.packed().numel() == 512
        assert ControlMessage.unpacked(message.packed()) == message
