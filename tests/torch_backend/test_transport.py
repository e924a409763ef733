"""The one-sided transport: what torch asks of it, and what it promises beyond that when peers die, stop or misbehave."""

import asyncio
import os
import pickle
import threading
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path

import msgpack
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import asyncdist
from asyncdist.errors import (
    LoopThreadError,
    OperationTimeoutError,
    PeerLostError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)
from asyncdist.kernel.one_sided.process_memory import OutOfReachError, ProcessMemory
from asyncdist.torch_backend.one_sided.memory import RemoteMemory
from asyncdist.torch_backend.one_sided.transport import OneSidedTransport

PROGRAM = Path(__file__).parent / "programs_transport.py"
LARGE = 20 << 20
"""More bytes than a stopped peer's sockets and shared memory take."""

needs_torch = pytest.mark.skipif(not OneSidedTransport.supported(), reason="torch before 2.15 has no transports")
pytestmark = needs_torch if not OneSidedTransport.supported() else []


def registered(count):
    return asyncdist.empty(count, dtype=torch.uint8).fill_(0)


def ordinary(count):
    return torch.zeros(count, dtype=torch.uint8)


def numbered(make, count):
    return make(count).copy_(torch.arange(count) % 251)


@pytest.fixture(params=["mapped", "traced", "staged", "tcp"])
def new(request, monkeypatch):
    """What makes the tensors that peers use: mapped, traced, or passed in messages, on one host and between hosts."""
    if request.param == "staged":

        def refuse(*_):
            raise OutOfReachError

        monkeypatch.setattr(ProcessMemory, "__init__", refuse)
    request.getfixturevalue("new_pair").between_hosts = request.param == "tcp"
    return registered if request.param == "mapped" else ordinary


@pytest.fixture
def new_pair(monkeypatch):
    """Make two connected transports of this process: ``new_pair()``."""
    made = []

    def new_pair():
        pair = []
        for name in ("first", "second"):
            if new_pair.between_hosts:
                monkeypatch.setenv("ASYNCDIST_HOST", name)
            pair.append(OneSidedTransport("cpu", timeout=30.0))
        first, second = pair
        made.extend(pair)
        ends = [each.bind() for each in pair]
        assert first.connect(ends[1]) == second.connect(ends[0]) == 0
        assert first.connected()
        return first, second

    new_pair.between_hosts = False
    yield new_pair
    for each in made:
        each.close()


@pytest.fixture
def pair(new, new_pair):
    return new_pair()


def described(memory):
    """Return what a peer makes of the descriptor of memory."""
    return RemoteMemory.deserialize(memory.to_remote_buffer().serialize())


# -- transfers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4096, 3_000_000])
def test_memory_is_read_and_written(pair, new, count):
    first, second = pair
    theirs, ours = numbered(new, count), ordinary(count)
    remote, memory = described(second.register_memory(theirs)), first.register_memory(ours)
    assert first.read(memory.to_mutable_view(), remote) == 0
    assert torch.equal(ours, theirs)
    ours += 1
    assert first.write(memory.to_view(), remote) == 0
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_tensors_of_every_kind_are_bytes(pair, dtype):
    first, second = pair
    theirs = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    ours = torch.zeros_like(theirs)
    remote = described(second.register_memory(theirs.requires_grad_(dtype.is_floating_point and dtype.itemsize > 1)))
    first.read(first.register_memory(ours).to_mutable_view(), remote)
    assert torch.equal(ours.view(torch.uint8), theirs.detach().view(torch.uint8))


@pytest.mark.parametrize("count", [48, 3_000_000])
def test_part_of_a_memory_is_written(pair, new, count):
    first, second = pair
    source, target = numbered(ordinary, 2 * count), new(count + 5)
    memory = first.register_memory(source)
    view = memory.to_view(7, count)
    assert view.size() == count
    first.write(view, described(second.register_memory(target)))
    assert torch.equal(target[:count], source[7 : count + 7])
    assert not target[count:].any(), "bytes beyond the view have changed"
    first.write(memory.to_view(3, 0), described(second.register_memory(target)))


def test_works_end_and_have_futures(pair, new):
    from torch.distributed._transport import Work

    first, second = pair
    theirs, ours = numbered(new, 100_000), ordinary(100_000)
    memory, remote = first.register_memory(ours), described(second.register_memory(theirs))
    work = first.read(memory.to_mutable_view(), remote, async_op=True)
    assert isinstance(work, Work)
    assert work.wait(timedelta(seconds=30))
    assert (work.is_completed(), work.is_success(), work.exception(), work.result()) == (True, True, None, [])
    assert work.get_future().wait() == []
    assert torch.equal(ours, theirs)


@pytest.mark.each_loop
async def test_transfers_are_awaited(pair, new):
    from torch.distributed._transport import wait_all

    first, second = pair
    sources = [numbered(new, 300_000 + number) for number in range(50)]
    remotes = [described(second.register_memory(each)) for each in sources]
    targets = [torch.zeros_like(each) for each in sources]
    views = [first.register_memory(each).to_mutable_view() for each in targets]
    await asyncio.gather(*map(first.read_async, views, remotes))
    assert all(map(torch.equal, sources, targets))
    for each in targets:
        each.add_(1)
    await wait_all(first.write(view, remote, async_op=True) for view, remote in zip(views, remotes, strict=True))
    assert all(map(torch.equal, sources, targets))
    await first.read(views[0], remotes[0], async_op=True)
    await first.write_async(views[1], remotes[1], timeout=30.0)
    await first.close_async(timeout=30.0)
    await first.close_async()
    assert not first.connected()


async def test_other_tasks_run_during_a_long_copy(new_pair):
    first, second = new_pair()
    remote = described(second.register_memory(registered(LARGE)))
    view = first.register_memory(ordinary(LARGE)).to_mutable_view()
    await first.read_async(view, remote)

    async def turns_meanwhile():
        turns, copying = 0, asyncio.ensure_future(first.read_async(view, remote))
        while not copying.done():
            turns += 1
            await asyncio.sleep(0)
        await copying
        return turns

    # On a busy machine the copy may end before this thread has its processor again.
    assert any([await turns_meanwhile() >= 5 for _ in range(20)])


def test_threads_transfer_at_the_same_time(pair, new):
    first, second = pair
    errors = []

    def transfer(number):
        theirs, ours = numbered(new, 50_000 + number), ordinary(50_000 + number)
        remote, view = described(second.register_memory(theirs)), first.register_memory(ours).to_mutable_view()
        for _ in range(20):
            first.read(view, remote)
        errors.extend([] if torch.equal(theirs, ours) else [number])

    threads = [threading.Thread(target=transfer, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []


# -- descriptors and wrong calls ---------------------------------------------------------------------


def test_descriptors_are_plain_bytes(new_pair):
    first, _ = new_pair()
    remote = first.register_memory(ordinary(10)).to_remote_buffer()
    data = remote.serialize()
    assert type(data) is bytes
    assert RemoteMemory.deserialize(data) == remote == pickle.loads(pickle.dumps(remote))
    assert msgpack.unpackb(data)[-1] == 10


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0", b"{}", pickle.dumps("anything"), "text", bytearray(b"x"), msgpack.packb([]),
        msgpack.packb(["asyncdist memory 1", "port", 1]), msgpack.packb(["asyncdist memory 1", "port", 1, -1]),
        msgpack.packb(["asyncdist memory 1", "port", True, 1]), msgpack.packb(["asyncdist memory 2", "port", 1, 1]),
        msgpack.packb(["asyncdist endpoint 1", 1, 2]), msgpack.packb({1: 2}),
        msgpack.packb(["asyncdist memory 1", 2, 1, 1]),
    ],
)  # fmt: skip
def test_other_bytes_are_no_descriptor_and_no_endpoint(data):
    with pytest.raises(UsageError):
        RemoteMemory.deserialize(data)
    with pytest.raises((UsageError, asyncdist.errors.ProtocolError)), OneSidedTransport() as transport:
        transport.connect(data)


def test_truncated_and_altered_descriptors_are_refused(pair, new):
    first, second = pair
    remote = second.register_memory(new(100)).to_remote_buffer()
    data = remote.serialize()
    for length in range(len(data)):
        with pytest.raises(UsageError):
            RemoteMemory.deserialize(data[:length])
    ours = ordinary(1000)
    view = first.register_memory(ours).to_mutable_view()
    with pytest.raises(UsageError, match="refuses: this memory is not registered"):
        first.read(view, RemoteMemory(remote.port, 77, 1000))
    with pytest.raises(UsageError, match="not that of"):
        first.read(view, RemoteMemory("another", remote.number, 1000))
    # The owner knows the size better than an altered descriptor.
    with pytest.raises(UsageError, match="1000 bytes"):
        first.read(view, RemoteMemory(remote.port, remote.number, 1000))
    with pytest.raises(UsageError, match="1000 bytes"):
        first.write(view, RemoteMemory(remote.port, remote.number, 1000))
    assert not ours.any()
    first.read(first.register_memory(ordinary(100)).to_mutable_view(), remote)


def test_wrong_sizes_and_views_are_refused(new_pair):
    first, second = new_pair()
    memory, remote = first.register_memory(ordinary(20)), described(second.register_memory(ordinary(10)))
    for offset, length in [(21, None), (-1, None), (0, 21), (15, 6), (0, -1)]:
        with pytest.raises(UsageError):
            memory.to_view(offset, length)
    with pytest.raises(UsageError, match="20 bytes"):
        first.write(memory.to_view(), remote)
    with pytest.raises(UsageError, match="to_mutable_view"):
        first.read(memory.to_view(), remote)
    with pytest.raises(UsageError, match="descriptor"):
        first.write(memory.to_view(), remote.serialize())
    with pytest.raises(UsageError, match="registered"):
        second.write(memory.to_view(), remote)
    with pytest.raises(UsageError, match="registered"):
        second.unregister_memory(memory)


def test_calls_that_cannot_work_are_refused(new_pair):
    first, second = new_pair()
    for tensor in (torch.zeros(4, 4).t(), torch.zeros(0), [1.0]):
        with pytest.raises(UsageError):
            first.register_memory(tensor)
    with FakeTensorMode(), pytest.raises(UnsupportedError):
        first.register_memory(torch.zeros(3))
    with pytest.raises(UnsupportedError, match="host memory"):
        first.register_memory(torch.zeros(3, device="meta"))
    with pytest.raises(UnsupportedError, match="host memory"):
        OneSidedTransport("cuda")
    with pytest.raises(UsageError, match="is connected to"):
        first.connect(second.bind())
    view, remote = first.register_memory(ordinary(4)).to_mutable_view(), described(second.register_memory(ordinary(4)))
    with pytest.raises(UnsupportedError, match="stream"):
        first.read_stream(view, remote)
    with pytest.raises(UnsupportedError, match="stream"):
        first.write_stream(view, remote)
    for timeout in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            asyncio.run(first.write_async(view, remote, timeout=timeout))
        with pytest.raises(ValueError, match="timeout"):
            first.close(timeout=timeout)
    with OneSidedTransport() as lonely, pytest.raises(UsageError, match="not connected"):
        lonely.read(lonely.register_memory(ordinary(4)).to_mutable_view(), remote)


def test_resized_tensor_is_refused(new_pair):
    first, second = new_pair()
    tensor = ordinary(10)
    view, remote = first.register_memory(tensor).to_view(), described(second.register_memory(ordinary(10)))
    tensor.set_(ordinary(10))
    with pytest.raises(UsageError, match="register it again"):
        first.write(view, remote)


def test_blocking_call_on_the_background_loop_is_refused(new_pair):
    from asyncdist.base.background_loop import background_loop

    first, second = new_pair()
    view, remote = first.register_memory(ordinary(4)).to_view(), described(second.register_memory(ordinary(4)))
    with pytest.raises(LoopThreadError):
        background_loop().call(lambda: first.write(view, remote))
    first.write(view, remote)


def test_unregistered_memory_is_not_used_any_more(pair, new):
    first, second = pair
    theirs = new(100_000)
    memory, again = second.register_memory(theirs), second.register_memory(theirs)
    remote, other = described(memory), described(again)
    view = first.register_memory(ordinary(100_000)).to_mutable_view()
    first.read(view, remote)
    second.unregister_memory(memory)
    second.unregister_memory(memory)
    with pytest.raises(UsageError, match="register"):
        memory.to_view()
    with pytest.raises(UsageError, match="register"):
        memory.to_remote_buffer()
    for transfer in (first.read, first.write):
        with pytest.raises(UsageError, match="not registered any more"):
            transfer(view, remote)
    # Each registration of a tensor ends alone.
    first.read(view, other)


def test_unregistering_waits_for_a_copy_of_the_peer(new_pair):
    first, second = new_pair()
    theirs = registered(LARGE)
    memory, source = second.register_memory(theirs), first.register_memory(ordinary(LARGE).fill_(1))
    remote = described(memory)
    first.write(source.to_view(0, 1), remote)
    refused = 0
    stop = threading.Event()

    def write():
        nonlocal refused
        while not stop.is_set() and not refused:
            try:
                first.write(source.to_view(), remote)
            except UsageError:
                refused += 1

    writer = threading.Thread(target=write)
    writer.start()
    second.unregister_memory(memory)
    theirs.fill_(7)
    stop.set()
    writer.join()
    assert (theirs == 7).all(), "the memory is written after it was unregistered"


# -- failures ----------------------------------------------------------------------------------------


@pytest.fixture
def start_keeper(nursery):
    """Start a process that keeps memory, and connect to it: transport, process, descriptor."""
    made = []

    def start_keeper(make, count=LARGE, **environment):
        transport = OneSidedTransport("cpu", timeout=30.0)
        made.append(transport)
        keeper = nursery.start(PROGRAM, "keep", transport.bind(), count, make is registered, environment=environment)
        endpoint, descriptor = keeper.hear()
        transport.connect(endpoint)
        return transport, keeper, RemoteMemory.deserialize(descriptor)

    yield start_keeper
    for each in made:
        each.close()


@pytest.mark.processes
@pytest.mark.parametrize("make", [registered, ordinary])
def test_process_reads_and_writes_the_memory_of_another(start_keeper, make):
    transport, keeper, remote = start_keeper(make, 5_000_000)
    ours = ordinary(5_000_000)
    memory = transport.register_memory(ours)
    transport.read(memory.to_mutable_view(), remote)
    assert torch.equal(ours, numbered(ordinary, 5_000_000))
    ours.fill_(3)
    transport.write(memory.to_view(), remote)
    keeper.say("sum")
    assert keeper.hear() == 15_000_000
    keeper.say("close")
    assert keeper.wait() == 0, keeper.output()
    with pytest.raises(PeerLostError, match="closed its transport"):
        transport.read(memory.to_mutable_view(), remote)
    assert not transport.connected()


def begin_transfers(transport, remote):
    """Begin a read and a write that cannot end while the peer is stopped; return their works and the read's tensor."""
    ours = ordinary(LARGE)
    memory = transport.register_memory(ours)
    source = transport.register_memory(ordinary(LARGE))
    return ours, [
        transport.read(memory.to_mutable_view(), remote, async_op=True),
        transport.write(source.to_view(), remote, async_op=True),
    ]


@pytest.mark.processes
async def test_death_of_the_peer_ends_pending_transfers_with_its_name(start_keeper):
    transport, keeper, remote = start_keeper(ordinary)
    keeper.stop()
    ours, works = begin_transfers(transport, remote)
    view = transport.register_memory(ordinary(10)).to_mutable_view()
    reading = asyncio.create_task(transport.read_async(view, remote))
    await asyncio.sleep(0)
    keeper.kill()
    for work in works:
        with pytest.raises(PeerLostError, match=f"process {keeper.pid} .*was lost"):
            await work
        assert isinstance(work.exception(), PeerLostError)
        # A future of torch raises an error of a callback as RuntimeError.
        with pytest.raises(RuntimeError, match=f"PeerLostError: process {keeper.pid}"):
            work.get_future().wait()
    with pytest.raises(PeerLostError, match=f"process {keeper.pid}"):
        await reading
    ours.fill_(9)
    with pytest.raises(PeerLostError, match=f"process {keeper.pid}"):
        transport.read(view, remote)
    transport.close()
    assert (ours == 9).all(), "the buffer is written after its transfer has ended"


@pytest.mark.processes
@pytest.mark.parametrize("hosts", [{}, {"ASYNCDIST_HOST": "there"}], ids=["local", "between hosts"])
def test_stopped_peer_ends_transfers_by_name(start_keeper, hosts, monkeypatch):
    monkeypatch.setenv("ASYNCDIST_HEARTBEAT", "0.5")
    transport, keeper, remote = start_keeper(ordinary, ASYNCDIST_HEARTBEAT="0.5", **hosts)
    keeper.stop()
    _, works = begin_transfers(transport, remote)
    for work in works:
        with pytest.raises(PeerLostError, match=f"process {keeper.pid} .*no heartbeat"):
            work.wait()
    assert not transport.connected()


async def read_for_ever(transport, view, remote):
    while True:
        await transport.read_async(view, remote)


@pytest.mark.processes
async def test_memory_of_a_stopped_peer_that_is_mapped_is_read(start_keeper):
    transport, keeper, remote = start_keeper(registered)
    ours = ordinary(LARGE)
    view = transport.register_memory(ours).to_mutable_view()
    await transport.read_async(view, remote)
    keeper.stop()
    ours.zero_()
    await transport.read_async(view, remote)
    assert torch.equal(ours, numbered(ordinary, LARGE))
    keeper.kill()
    with pytest.raises(PeerLostError, match=f"process {keeper.pid}"):
        await read_for_ever(transport, view, remote)


@pytest.mark.processes
async def test_buffers_are_free_after_a_timeout_and_a_cancellation(start_keeper):
    transport, keeper, remote = start_keeper(ordinary)
    ours = ordinary(LARGE)
    memory = transport.register_memory(ours)
    keeper.stop()
    for transfer in (transport.read, transport.write):
        with pytest.raises(OperationTimeoutError, match=f"process {keeper.pid}"):
            transfer(memory.to_mutable_view(), remote, timeout=0.05)
    for transfer in (transport.read_async, transport.write_async):
        with pytest.raises(OperationTimeoutError, match=f"process {keeper.pid}"):
            await transfer(memory.to_mutable_view(), remote, timeout=0.05)
        waiting = asyncio.create_task(transfer(memory.to_mutable_view(), remote))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    ours.fill_(9)
    # No transfer is under way any more.
    transport.unregister_memory(memory)
    keeper.resume()
    again = transport.register_memory(ordinary(LARGE))
    transport.read(again.to_mutable_view(), remote)
    assert (ours == 9).all(), "the buffer is written after its transfer has ended"


@pytest.mark.processes
def test_timed_out_close_can_be_repeated(start_keeper):
    transport, keeper, remote = start_keeper(ordinary)
    keeper.stop()
    ours, (reading, writing) = begin_transfers(transport, remote)
    with pytest.raises(WaitTimeoutError):
        reading.wait(timedelta(milliseconds=10))
    for _ in range(2):
        with pytest.raises(WaitTimeoutError, match="2 transfers"):
            transport.close(timeout=0.01)
    with pytest.raises(WaitTimeoutError, match="2 transfers"):
        asyncio.run(transport.close_async(timeout=0.01))
    with pytest.raises(UsageError, match="closed"):
        transport.register_memory(ours)
    with pytest.raises(UsageError, match="closed"):
        transport.bind()
    keeper.resume()
    transport.close()
    assert reading.is_success()
    assert writing.is_success()
    transport.close()


@pytest.mark.processes
def test_memory_with_pending_transfers_stays_registered(start_keeper):
    transport, keeper, remote = start_keeper(ordinary)
    memory = transport.register_memory(ordinary(LARGE))
    keeper.stop()
    work = transport.read(memory.to_mutable_view(), remote, async_op=True)
    with pytest.raises(UsageError, match="wait for it"):
        transport.unregister_memory(memory)
    keeper.resume()
    work.wait()
    transport.unregister_memory(memory)


def test_transport_belongs_to_its_process(new_pair):
    first, _ = new_pair()
    child = os.fork()
    if not child:
        try:
            first.bind()
        except UsageError as error:
            os._exit("parent" not in str(error))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# -- torch's registry and its bootstrap --------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """torch's registry, with this transport alone."""
    from torch.distributed import _transport

    monkeypatch.setattr(_transport._registry, "_registered_transports", {})
    _transport.register_transport("asyncdist", OneSidedTransport, replace=True)
    return _transport


def test_entry_point_loads_the_transport():
    (entry,) = entry_points(group="torch.distributed.transports", name="asyncdist")
    assert entry.load() is OneSidedTransport


def test_torch_makes_the_transport_by_its_name(registry):
    assert "asyncdist" in registry.available_transports()
    with registry.new_transport("ASYNCDIST", "cpu", timeout=3.0) as transport:
        assert isinstance(transport, registry.Transport)
        assert transport.device == torch.device("cpu")
    with registry.new_transport("asyncdist") as transport:
        assert transport.device is None
        memory = transport.register_memory(ordinary(3))
        assert isinstance(memory, registry.Memory)
        assert isinstance(memory.to_view(), registry.MemoryView)
        assert not isinstance(memory.to_view(), registry.MutableMemoryView)
        assert isinstance(memory.to_mutable_view(), registry.MutableMemoryView)
        assert isinstance(memory.to_remote_buffer(), registry.RemoteBuffer)
    with pytest.raises(RuntimeError, match="failed to create") as caught:
        registry.new_transport("asyncdist", "cuda")
    assert isinstance(caught.value.__cause__, UnsupportedError)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["asyncdist", "torch"])
def test_ranks_pair_through_a_store(nursery, request, ended, kind):
    served = None
    if kind == "torch":
        served = nursery.start(PROGRAM, "serve_store")
    port = served.hear() if served else request.getfixturevalue("daemon").port
    ranks = [nursery.start(PROGRAM, "pair", rank, port, kind) for rank in range(2)]
    for _ in range(2):
        assert [rank.hear() for rank in ranks] == ["read", "read"]
        for rank in ranks:
            rank.say("go on")
    assert [rank.hear() for rank in ranks] == [[1000.0, 2000.0], [0.0, 1000.0]]
    if served:
        served.say("end")
        ranks.append(served)
    ended(*ranks)
