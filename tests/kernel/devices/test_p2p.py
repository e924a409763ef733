"""Point-to-point messages between devices: the choice of the backend, order, concurrency and failures.

They run over pretended devices. The drivers of these keep CUDA's rules for shared memory and interprocess events.
"""

import asyncio
import functools
import gc
import logging
import threading
from dataclasses import replace

import pytest
import torch

from asyncdist import sync
from asyncdist.config import Config
from asyncdist.errors import (
    GroupAbortedError,
    GroupError,
    MismatchError,
    OperationTimeoutError,
    PeerLostError,
    UsageError,
    WaitTimeoutError,
)
from asyncdist.groups.group import Group
from asyncdist.kernel.engine.work import Work, joined
from asyncdist.kernel.transport.device_p2p import ControlChannel
from asyncdist.testing.cluster import run_ranks
from asyncdist.testing.collective_cases import between_two
from tests.support.cuda import HANDLE, PretendDriver, cuda_ipc_over
from tests.support.devices import (
    PretendStreams,
    device_group,
    devices_of,
    run_cases,
    run_cases_in_flight,
    run_on_devices,
    weakly_held,
)  # fmt: skip
from tests.support.nccl import PretendNccl, nccl_over

BACKENDS = ["cuda_ipc", "nccl", "staged"]
# Seconds.
LONG = 60.0
# Number of float32 elements of a message that goes from device to device.
LARGE = 40_000


class Counting(PretendStreams):
    """A device that counts the bytes that are copied through the host."""

    def __init__(self, uuid="GPU-counting"):
        super().__init__(uuid)
        self.pinned_nbytes = 0

    def pinned(self, count, dtype):
        self.pinned_nbytes += count * dtype.itemsize
        return super().pinned(count, dtype)


def gpus(size):
    return [Counting(f"GPU-{rank}") for rank in range(size)]


def classes_of(backend):
    """Return the backend classes of that name, for `run`; None is cuda_ipc."""
    return {"cuda_ipc": None, "staged": [], "nccl": [nccl_over(PretendNccl())]}[backend]


def from_rank_0(device, count=LARGE):
    """Send from rank 0 to each other rank; return the value that each rank holds in the end."""
    tensor = torch.full((count,), float(device.rank()))
    peers = range(1, device.size())
    joined([device.recv(tensor, 0)] if device.rank() else [device.send(tensor, peer) for peer in peers]).wait()
    return tensor[0].item()


# -- the backend -------------------------------------------------------------------------------------


def test_large_messages_bypass_the_host_and_need_no_negotiation(run):
    streams, made = [Counting() for _ in range(3)], []

    def program(device):
        rank = device.rank()
        out, into = torch.full((LARGE,), float(rank)), torch.empty(LARGE)
        joined([device.send(out, (rank + 1) % 3), device.recv(into, (rank - 1) % 3)]).wait()
        assert device.backend is None, "messages negotiated a backend"
        return into.unique().tolist()

    assert run(3, program, streams=streams, made=made) == [[2.0], [0.0], [1.0]]
    assert [each.pinned_nbytes for each in streams] == [0, 0, 0]
    assert len(made) == 3
    assert all(driver.maps for driver in made)


def test_small_messages_are_staged(run):
    streams, made = [Counting() for _ in range(2)], []
    assert run(2, functools.partial(from_rank_0, count=16_384), streams=streams, made=made) == [0.0, 0.0]
    assert [each.pinned_nbytes for each in streams] == [65536] * 2
    assert not any(driver.maps for driver in made)


@pytest.mark.parametrize("shareable", [True, False], ids=["exported", "copied"])
def test_every_message_case(shareable, transport, run):
    made = []
    cases = [case for count in (0, 1, LARGE) for case in between_two(3, count, torch.float32)]
    cases += between_two(3, LARGE, torch.complex64)
    run_cases_in_flight(run, 3, cases, made=made, kinds=[cuda_ipc_over(made, shareable=shareable)], transport=transport)
    assert len(made) == 3
    assert all(driver.maps for driver in made)


class Elsewhere(PretendDriver):
    """A handle means other memory, as between containers that number their processes alike."""

    other = torch.zeros(1 << 20)

    def map(self, handle):
        return super().map(HANDLE.pack(self.other.data_ptr(), 1))


REFUSALS = {
    "another host": ([[cuda_ipc_over()]] * 2, ["a", "b"], "cuda_ipc: it is on another host"),
    "not mapped": (
        [[cuda_ipc_over()], [cuda_ipc_over(refuses=RuntimeError("no peer access"))]], None,
        "cuda_ipc: its device's memory cannot be mapped: no peer access",
    ),
    "other memory": (
        [[cuda_ipc_over(kind=Elsewhere)]] * 2, None,
        "cuda_ipc: the memory mapped from its device is not the sender's",
    ),
    "no back end": ([[cuda_ipc_over()], []], None, "cuda_ipc: rank 1 does not have this backend"),
    "other version": (
        [[nccl_over(PretendNccl())], [nccl_over(PretendNccl(version=22704))]], None,
        "nccl: NCCL is 2.29.7 on the sender, but 2.27.4 on the receiver",
    ),
    "one device": (
        [[nccl_over(PretendNccl())]] * 2, None, "nccl: both ranks share one device, and NCCL needs a device per rank"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kinds", "hosts", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_refused_messages_go_through_the_host(kinds, hosts, reason, caplog):
    """The sender offers a refused back end once."""
    caplog.set_level(logging.INFO, "asyncdist")
    streams = [Counting("GPU-0"), Counting("GPU-0" if "share one device" in reason else "GPU-1")]

    def program(device):
        return [from_rank_0(device) for _ in range(3)]

    assert run_on_devices(2, program, kinds.__getitem__, streams, hosts=hosts) == [[0.0] * 3] * 2
    assert [each.pinned_nbytes // (4 * LARGE) for each in streams] == [3, 3]
    logged = [record.message for record in caplog.records if "cannot use" in record.message]
    assert logged == [f"messages to rank 1 cannot use {reason}"]


@pytest.mark.parametrize("piece_nbytes", [7, 64])
async def test_staged_messages_are_split_into_pieces(piece_nbytes, transport):
    config = replace(Config(), device_piece_nbytes=piece_nbytes)
    async with devices_of(2, transport=transport, config=config) as (first, second):
        for count in (0, 1, 16, 100):
            sent, into = torch.arange(count, dtype=torch.float32), torch.zeros(count)
            _, source = await asyncio.gather(first.send(sent, 1), second.recv(into))
            assert source == 0
            assert torch.equal(sent, into)


# -- by NCCL ------------------------------------------------------------------------------------------


@pytest.fixture
def nccl(until):
    """A pretended NCCL, whose communicators end with the test."""
    nccl = PretendNccl()
    yield nccl
    until(lambda: all(made.ended for made in nccl.communicators))
    assert not nccl.collected
    assert not any(messages for made in nccl.communicators for messages in made.meeting.messages.values())


def test_ranks_with_a_device_each_use_nccl(nccl, transport, run, until):
    streams = gpus(3)
    cases = [case for _ in range(3) for case in between_two(3, LARGE, torch.float32)]
    backends = run_cases(run, 3, cases, kinds=[nccl_over(nccl)], streams=streams, transport=transport)
    assert backends == [None] * 3, "messages negotiated a backend"
    assert [each.pinned_nbytes for each in streams] == [0, 0, 0]
    # One for each two ranks, each with a thread of its own.
    until(lambda: [made.ended for made in nccl.communicators] == ["destroyed"] * 6)


def test_both_ends_of_a_communicator_enqueue_in_the_same_order(nccl, run):
    def program(device):
        rank, peer, works = device.rank(), 1 - device.rank(), []
        for tag in range(40):  # each rank in an order of its own
            tag = tag if rank else 39 - tag
            works.append(device.send(torch.full((LARGE,), float(tag)), peer, tag))
            works.append(device.recv(torch.empty(LARGE), peer, tag))
        joined(works).wait()

    run(2, program, kinds=[nccl_over(nccl)])
    one, other = sorted(nccl.communicators, key=lambda made: made.rank)
    names = [[call[0] for call in made.log] for made in (one, other)]
    assert names[0][:2] == names[1][:2] == ["send", "recv"]  # the first ones, together
    mirrored = {"send": "recv", "recv": "send"}
    assert names[0][2:] == [mirrored[name] for name in names[1][2:]]


def test_refused_offers_fall_back_to_nccl(nccl, run):
    streams, made = gpus(2), []

    def program(device):
        return [from_rank_0(device) for _ in range(3)]

    classes = [cuda_ipc_over(made), nccl_over(nccl)]
    assert run(2, program, made=made, kinds=classes, streams=streams, refusing=1) == [[0.0] * 3] * 2
    assert [each.pinned_nbytes for each in streams] == [0, 0]
    assert len(nccl.communicators) == 2


def test_failed_communicator_fails_the_message(nccl):
    nccl.fail_creation(1)

    def program(device):
        tensor = torch.ones(LARGE)
        work = device.recv(tensor, 0) if device.rank() else device.send(tensor, 1)
        with pytest.raises(GroupError) as caught:
            joined([work, device.barrier()]).wait()
        return str(caught.value)

    for words in run_on_devices(2, program, [nccl_over(nccl)], gpus(2)):
        assert "NCCL failed" in words
    nccl.hang_up()


# -- concurrency ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_both_send_first_do_not_deadlock(backend, count, run):
    def program(device):
        rank, peer = device.rank(), 1 - device.rank()
        out = [torch.full((count,), float(10 * rank + which)) for which in range(8)]
        into = [torch.empty(count) for _ in out]
        works = [device.send(tensor, peer) for tensor in out]
        joined([*works, *[device.recv(tensor, peer) for tensor in into]]).wait()
        assert [tensor[0].item() for tensor in into] == [10 * peer + which for which in range(8)]

    run(2, program, kinds=classes_of(backend), transport="shm")


# The pretended NCCL blocks where the real one does not.
@pytest.mark.parametrize("backend", ["cuda_ipc", "staged"])
@pytest.mark.parametrize("count", [10, LARGE])
def test_ranks_may_order_messages_and_collectives_differently(backend, count, run):
    def program(device):
        tensor, message = torch.ones(LARGE), torch.ones(count)
        device.all_reduce(tensor).wait()
        if device.rank() == 0:
            reduced = device.all_reduce(tensor)
            device.send(message, 1).wait()
            device.recv(message, 1, background=False)
            reduced.wait()
        else:
            device.recv(message, 0).wait()
            device.send(message, 0, background=False)
            device.all_reduce(tensor, background=False)
        return tensor.unique().tolist()

    assert run(2, program, kinds=classes_of(backend)) == [[4.0], [4.0]]


def test_events_are_reused_and_never_too_early(run):
    """`TheirEvent` asserts that each wait finds the record that it means."""
    made = []

    def program(device):
        rank = device.rank()
        for number in range(24):
            tensors = [torch.full((LARGE,), float(number)) for _ in range(1 + number % 4)]
            peers = [peer for peer in range(3) if peer != rank]
            works = [device.recv(torch.empty(LARGE), peer, tag) for tag in range(len(tensors)) for peer in peers]
            works += [device.send(tensor, peer, tag) for tag, tensor in enumerate(tensors) for peer in peers]
            joined(works).wait()

    run(3, program, made=made, transport="shm")
    # 24 rounds of up to 4 messages in each direction with 2 peers.
    assert max(driver.made_events for driver in made) <= 2 * 2 * 4 + 8


async def test_strided_messages_between_ranks_of_one_loop():
    made = []
    async with devices_of(3, [cuda_ipc_over(made)]) as groups:
        for count in (10, LARGE):
            into = [torch.empty(count, 2)[:, 0] for _ in groups]  # strided
            out = [torch.full((2, count), float(rank)).t()[:, 1] for rank in range(3)]
            works = [device.recv(into[rank], (rank + 1) % 3) for rank, device in enumerate(groups)]
            works += [device.send(out[rank], (rank - 1) % 3) for rank, device in enumerate(groups)]
            assert (await asyncio.gather(*works))[:3] == [1, 2, 0]
            assert [tensor.unique().tolist() for tensor in into] == [[1.0], [2.0], [0.0]]
        assert all(driver.maps for driver in made)


def test_message_to_the_own_rank_is_refused(run):
    def program(device):
        for call in (lambda: device.send(torch.ones(LARGE), device.rank()), lambda: device.recv(torch.ones(1), 0)):
            with pytest.raises(UsageError, match="a message to oneself is a copy"):
                call()

    run(1, program)


# -- streams ------------------------------------------------------------------------------------------


def test_wait_does_not_block_for_the_device(run):
    streams = [PretendStreams() for _ in range(2)]

    def program(device):
        rank = device.rank()
        device.host.barrier().wait()
        streams[rank].hold()
        tensor = torch.ones(LARGE)
        work = device.recv(tensor, 0) if rank else device.send(tensor, 1)
        assert work.wait()
        assert not work.is_completed()
        assert streams[rank].log[-1] == ("wait_event", "caller")
        streams[rank].release()
        work.synchronize()

    run(2, program, streams=streams)


def test_message_that_waits_for_the_device_does_not_delay_others(run):
    streams = [PretendStreams() for _ in range(2)]

    def program(device):
        if device.rank():
            device.send(torch.ones(3), 0).wait()
            device.recv(into := torch.zeros(3), 0).wait()
            return into.tolist()
        streams[0].hold()
        sent = device.send(torch.full((3,), 2.0), 1)
        device.recv(into := torch.zeros(3), 1).wait()
        assert not sent.is_completed()
        streams[0].release()
        sent.synchronize()
        return into.tolist()

    assert run(2, program, streams=streams) == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize("stride", [1, 2])
def test_tensors_live_until_the_device_is_done(count, stride, until, run):
    streams = [PretendStreams() for _ in range(2)]

    def program(device):
        rank = device.rank()
        device.host.barrier().wait()
        alive, tensor = weakly_held(count * stride)
        tensor = tensor[::stride]
        if rank:
            streams[1].hold()
        work = device.recv(tensor, 0) if rank else device.send(tensor, 1)
        del tensor
        work.wait()
        if rank:
            gc.collect()
            assert alive() is not None, "the device may still write there"
            streams[1].release()
        work.synchronize()
        del work
        until(lambda: gc.collect() >= 0 and alive() is None)

    run(2, program, streams=streams)


# -- leaving ------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [0, 10, LARGE])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_may_leave_when_its_messages_are_complete(backend, count, transport, run):
    def program(device):
        works = []
        for tag in range(2):
            tensor = torch.full((count,), float(device.rank()))
            works.append(device.recv(tensor, 0, tag) if device.rank() else device.send(tensor, 1, tag))
        joined(works).wait()

    for _ in range(3):
        run(2, program, kinds=classes_of(backend), transport=transport)


@pytest.mark.parametrize("backend", ["cuda_ipc", "nccl"])
def test_message_completes_after_its_control_messages_are_sent(backend, until, monkeypatch, run):
    send, held = ControlChannel.send, ([], [])

    def hold(channel, kind="", payload=b""):
        sent = Work()

        def release():
            send(channel, kind, payload).add_done_callback(lambda _: (sent.finish(), sent.run_callbacks()))

        held[1 - channel.peer].append(release)
        return sent

    monkeypatch.setattr(ControlChannel, "send", hold)

    def program(device):
        rank, tensor, executed = device.rank(), torch.ones(LARGE), threading.Event()
        work = device.recv(tensor, 0) if rank else device.send(tensor, 1)
        while not work.is_completed():
            until(lambda: held[rank] or work.is_completed())
            executed.clear()
            device.messages.executor.put(executed.set)
            assert executed.wait(LONG)
            assert not (held[rank] and work.is_completed())
            while held[rank]:
                held[rank].pop()()
        work.wait()

    run(2, program, kinds=classes_of(backend))


def test_message_succeeds_if_the_receiver_leaves_after_its_answer():
    left = threading.Event()

    class Late(PretendDriver):
        def event_of(self, handle):
            assert left.wait(LONG)
            return super().event_of(handle)

    def rank(group):
        rank, other = group.rank(), group.world.new_group([0, 1])
        device = device_group(group, [cuda_ipc_over(kind=PretendDriver if rank else Late)])
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
    def program(device):
        work = device.recv(expected.clone(), 0) if device.rank() else device.send(sent, 1)
        # The barrier fails too: a small message may be complete for its sender.
        with pytest.raises(GroupError) as caught:
            joined([work, device.barrier()]).wait()
        return caught.value

    errors = run_on_devices(2, program, [cuda_ipc_over()])
    assert isinstance(errors[1], MismatchError)
    assert "send" in str(errors[0]) or "send" in str(errors[1])


@pytest.mark.parametrize("small", [0, 512, 40_000])
async def test_mismatched_size_that_the_fingerprint_cannot_hold_raises(small):
    """It holds the size modulo 2^24. A large message begins with a control message of 512 bytes, a small one with data."""
    async with devices_of(2, [cuda_ipc_over()]) as (first, second):
        large = torch.ones(1, dtype=torch.uint8).expand((1 << 24) + small)
        works = [first.send(large, 1), second.recv(torch.empty(small, dtype=torch.uint8), 0)]
        outcomes = await asyncio.gather(*works, return_exceptions=True)
        assert isinstance(outcomes[1], MismatchError)
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


async def test_pending_messages_fail_when_the_group_is_destroyed(caplog):
    # Works of earlier tests may be logged when they are collected.
    gc.collect()
    caplog.clear()
    async with devices_of(2, [cuda_ipc_over()]) as groups:
        works = [groups[0].send(torch.ones(LARGE), 1), groups[0].recv(torch.ones(LARGE), 1)]
        groups[0].close()
        for outcome in await asyncio.gather(*works, return_exceptions=True):
            assert isinstance(outcome, GroupAbortedError)
            assert "the group was destroyed" in str(outcome)
    gc.collect()
    assert "(control_group)" not in caplog.text, "the works of the control messages were logged, too"


async def test_receive_completes_after_all_senders_have_left(transport, eventually, monkeypatch):
    async with devices_of(3, transport=transport) as groups:
        await asyncio.gather(*(device.barrier() for device in groups))
        free = threading.Event()
        last = groups[0]
        last.messages.executor.put(free.wait)
        last.desync_detector.listen()
        into = [torch.zeros(5) for _ in range(2)]
        works = [last.recv(room, peer) for room, peer in zip(into, (1, 2), strict=True)]
        for device in groups[1:]:
            await device.send(torch.full((5,), float(device.rank())), 0)
            device.close()
            device.host.endpoint.close()
        await eventually(lambda: last.desync_detector.error)
        checks = []
        monkeypatch.setattr(last.desync_detector, "listen", lambda: checks.append(None))
        await eventually(lambda: len(checks) > 1)  # the slow receive was checked after the senders had left
        free.set()
        assert await asyncio.gather(*works) == [1, 2]
        assert [room.tolist() for room in into] == [[1.0] * 5, [2.0] * 5]


# -- control messages ---------------------------------------------------------------------------------------


def test_blocking_receive_returns_before_the_device_has_the_data(monkeypatch):
    devices, streams = {}, [PretendStreams(), PretendStreams()]
    streams[1].hold()
    monkeypatch.setattr("asyncdist.groups.group.device_of", lambda value: torch.device("cuda"))
    monkeypatch.setattr(Group, "_on", lambda group, device: devices.get(group, group))

    def program(group):
        rank = group.rank()
        devices[group] = device = device_group(group, (), streams[rank])
        tensor = torch.full((LARGE,), float(1 - rank))
        if rank == 0:
            sync.send(tensor, 1, group=group)
            found = None
        else:
            found = sync.recv(tensor, 0, group=group)
            streams[1].release()
        device.close()
        return found, tensor.unique().tolist()

    assert run_ranks(2, program) == [(None, [1.0]), (0, [1.0])]


# -- blocking calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocking_messages_in_both_directions(backend, transport, run):
    sizes = (0, 1, 128, 16_384, 16_385, LARGE)

    def program(device):
        rank, found = device.rank(), []
        for number, count in enumerate(sizes):
            out, into = torch.full((count,), 10.0 * number + rank), torch.zeros(count)
            calls = [lambda: device.send(out, 1 - rank, number, background=False)]  # noqa: B023
            calls.append(lambda: device.recv(into, 1 - rank, number, background=False))  # noqa: B023
            for call in calls if rank else calls[::-1]:
                assert call().is_success()
            found.append(into.unique().tolist())
        return found

    wanted = [[[10.0 * number + other] if count else [] for number, count in enumerate(sizes)] for other in (1, 0)]
    assert run(2, program, kinds=classes_of(backend), transport=transport) == wanted


def test_blocking_call_does_not_keep_earlier_messages_from_going_on(run):
    """Rank 0's send waits for steps of its executor while its blocking receive waits for rank 1."""

    def program(device):
        large, small = torch.full((LARGE,), float(device.rank())), torch.full((4,), float(device.rank()))
        if device.rank() == 0:
            sent = device.send(large, 1)
            device.recv(small, 1, background=False)
            sent.wait()
            return small.tolist()
        device.recv(large, 0, background=False)
        device.send(small, 0, background=False)
        return large.unique().tolist()

    assert run(2, program) == [[1.0] * 4, [0.0]]


def test_operations_go_on_while_a_blocking_receive_waits_for_a_device(run):
    """Rank 0's device goes on only when rank 1 has answered a message that it received in the background."""

    def program(device):
        tensor, host = torch.full((LARGE,), float(device.rank())), device.host
        if device.rank() == 0:
            assert "cuda_ipc" in device.messages.backends
            (driver,) = device.drivers
            driver.holds = True
            work = device.send(tensor, 1)
            host.send(torch.ones(1), 1, 7).wait()
            host.recv(torch.ones(1), 1, 8).wait()
            driver.go_on()
            work.wait()
        else:
            asked = host.recv(torch.ones(1), 0, 7)
            asked.add_done_callback(lambda _: host.send(torch.ones(1), 0, 8))
            device.recv(tensor, 0, background=False)
        return tensor.unique().tolist()

    assert run(2, program) == [[0.0]] * 2


def test_wait_for_a_message_ends_at_its_timeout(run):
    def program(device):
        if device.rank() == 1:
            work = device.recv(torch.zeros(4), 0)
            with pytest.raises(WaitTimeoutError, match="continues"):
                work.wait(0.05)
        device.barrier(background=False)
        if device.rank() == 0:
            device.send(torch.ones(4), 1, background=False)
            return True
        return work.wait(60)

    assert run(2, program) == [True, True]


def test_blocking_receive_from_a_rank_that_leaves_raises():
    def program(device):
        if device.rank() == 1:
            device.host.abort("this rank has left")
            return
        with pytest.raises(GroupError, match="this rank has left"):
            device.recv(torch.zeros(4), 1, background=False).result()

    run_on_devices(2, program)
