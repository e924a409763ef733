"""Programs of the ranks in the GPU tests. ``test`` is the pipe to the test, ``where`` the arguments of the world."""

import asyncio
import contextlib
import faulthandler
import itertools
import threading
import time

import torch
from torch.cuda import _sleep as keep_busy

import asyncdist
from asyncdist import rpc, sync
from asyncdist.errors import PeerLostError
from asyncdist.store import StoreServer
from asyncdist.testing.arithmetic import reductions, same
from asyncdist.testing.collective_cases import collective_cases, reducing
from asyncdist_transports.cuda_ipc import collectives
from tests.support.devices import part_on

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8, torch.uint16,
    torch.uint64, torch.bool,
]  # fmt: skip
# Cycles for which a stream is busy: some milliseconds.
BUSY = 20_000_000

# A rank that hangs says where, before the test gives up on it.
faulthandler.dump_traceback_later(45)


@contextlib.contextmanager
def world(where, backend=None):
    """Open the default world and yield its group. At the end the ranks meet in a barrier."""
    sync.init_process_group(backend, **where)
    try:
        yield asyncdist.group.WORLD
        sync.barrier()
    finally:
        sync.destroy_process_group()


class Moved:
    """A group that moves the tensors of its operations to another device, and keeps them."""

    def __init__(self, group, device):
        self._group, self._device = group, device
        self.tensors = []

    def __getattr__(self, name):
        wanted = getattr(self._group, name)
        return (lambda *args, **how: wanted(*map(self._moved, args), **how)) if callable(wanted) else wanted

    def _moved(self, value):
        if isinstance(value, (list, tuple)):
            return [self._moved(one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        # A copy also on the host: cases overwrite their inputs when the operation has completed.
        self.tensors.append(value.to(self._device, copy=True))
        return self.tensors[-1]


def _ways(group, device):
    """Return the backend of a group's tensors on a CUDA device."""
    return part_on(group, torch.device(device)).backend if device.startswith("cuda") else None


def every_drill(test, where, device, backend):
    """Run each operation on the device and on the host, and compare this rank's results."""
    size, compared = where["world_size"], 0
    with world(where, backend) as group:
        counts = (1, 1000, 300_000) if device != "cpu" else (1, 1000)
        cases = [(dtype, count) for dtype in DTYPES for count in counts]
        for dtype, count in cases:
            made = [itertools.chain(collective_cases(size, count, dtype), *_more(size, count, dtype)) for _ in range(2)]
            for on_host, on_device in zip(*made, strict=True):
                if on_host.name.startswith("monitored_barrier"):
                    continue
                ours, theirs = Moved(group, "cpu"), Moved(group, device)
                for work in on_host.start(ours):
                    work.wait()
                for work in on_device.start(theirs):
                    work.wait()
                assert len(ours.tensors) == len(theirs.tensors)
                for expected, tensor in zip(ours.tensors, theirs.tensors, strict=True):
                    assert same(tensor.cpu(), expected), on_host.name
                    compared += 1
        way = _ways(group, device)
    test.send((way, compared))


def _more(size, count, dtype):
    return [reducing(size, count, dtype, op) for op in reductions(dtype)] if count == 1000 else []


def streams(test, where, device, rounds):
    """Compute before and after collectives in a user's stream, without a wait of the host until the end."""
    rank, size = where["rank"], where["world_size"]
    with world(where) as group:
        side = torch.cuda.Stream(device)
        found = torch.zeros(rounds, 2, device=device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for number in range(rounds):
                tensor = torch.zeros(100_000, device=device)
                keep_busy(BUSY // 20)
                tensor += number + rank
                group.all_reduce(tensor).wait()
                found[number, 0], found[number, 1] = tensor[0], tensor[-1]
        side.synchronize()
        expected = torch.tensor([size * number + size * (size - 1) / 2.0 for number in range(rounds)])
        assert torch.equal(found.cpu(), expected.unsqueeze(1).expand(-1, 2))
    test.send("right")


def ticking(test, where, device):
    """Await an operation that is queued after long work on the device, and count the loop's iterations until then."""

    async def main():
        async with asyncdist.process_group(**where) as group:
            tensor = torch.ones(1000, device=device)
            await group.all_reduce(tensor)
            latest, last, ticks = 0.0, time.monotonic(), 0

            async def tick():
                nonlocal latest, last, ticks
                while True:
                    await asyncio.sleep(0.001)
                    now = time.monotonic()
                    latest, last, ticks = max(latest, now - last), now, ticks + 1

            ticker = asyncio.create_task(tick())
            keep_busy(10 * BUSY)
            await group.all_reduce(tensor)
            ticker.cancel()
            assert torch.equal(tensor.cpu(), torch.full((1000,), float(where["world_size"] ** 2)))
            await group.barrier()
            return ticks, latest

    test.send(asyncio.run(main()))


def freed(test, where, device):
    """Drop an operation's tensors while it is in flight, and allocate as much memory at once."""
    rank, size = where["rank"], where["world_size"]
    with world(where) as group:
        for number in range(30):
            output = torch.zeros(size * 1_000_000, device=device)
            keep_busy(BUSY // 10)
            work = group.all_gather_single(output, torch.full((1_000_000,), float(rank + number), device=device))
            rubbish = [torch.full((1_000_000,), -1.0, device=device) for _ in range(4)]
            work.wait()
            expected = [float(one + number) for one in range(size)]
            assert [part.unique().tolist() for part in output.chunk(size)] == [[value] for value in expected]
            del rubbish
    test.send("right")


def identifier(test, where, device):
    """Send the device's identifier."""
    test.send(str(torch.cuda.get_device_properties(device).uuid))


def two_groups(test, where, device):
    """Run operations of two groups at once, on tensors of the host and of the device in turn."""
    ranks = list(range(where["world_size"]))
    with world(where):
        groups = [asyncdist.new_group(ranks), asyncdist.new_group(ranks[::-1], sort_ranks=False)]
        tensors = [[torch.full((50_000,), float(which + 1), device=on) for on in (device, "cpu")] for which in (0, 1)]
        for _ in range(20):
            works = [
                group.all_reduce(tensor, asyncdist.ReduceOp.AVG)
                for group, pair in zip(groups, tensors, strict=True)
                for tensor in pair
            ]
            for work in works:
                work.wait()
        assert all((one == which + 1).all() for which, pair in enumerate(tensors) for one in pair)
    test.send("right")


def messages(test, where, device, rounds):
    """Exchange large messages in a user's stream, without a wait of the host, before any collective.

    Sends the refused backends and the created ones.
    """
    rank, size = where["rank"], where["world_size"]
    with world(where) as group:
        peers = [peer for peer in range(size) if peer != rank]
        on = part_on(group, torch.device(device))
        side = torch.cuda.Stream(device)
        found = torch.zeros(rounds, len(peers), 2, device=device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for number in range(rounds):
                out = torch.zeros(100_000, device=device)
                keep_busy(BUSY // 20)
                out += 10 * number + rank
                into = [torch.empty_like(out) for _ in peers]
                works = [group.send(out, peer, number) for peer in peers]
                works += [group.recv(room, peer, number) for room, peer in zip(into, peers, strict=True)]
                for work in works:
                    work.wait()
                out.fill_(-1)
                for place, room in enumerate(into):
                    found[number, place, 0], found[number, place, 1] = room[0], room[-1]
        side.synchronize()
        expected = torch.tensor([[10.0 * number + peer for peer in peers] for number in range(rounds)])
        assert torch.equal(found.cpu(), expected.unsqueeze(2).expand(-1, -1, 2))
        told = sorted(on.messages.refused), sorted(on.messages.backends)
        assert on.backend is None, "messages negotiated a backend"
    test.send(told)


def messages_of_many_kinds(test, where, device):
    """Exchange small and large messages with tags in another order, strided tensors and a receive from any rank."""
    rank = where["rank"]
    with world(where) as group:
        for count in (1, 16_384, 16_385, 1_000_000):
            if rank == 0:
                for tag in range(4):
                    columns = torch.full((count, 2), float(tag + count), device=device)
                    group.send(columns[:, 1], 1, tag)
                group.send(torch.tensor([count], device=device), 1, 9).wait()
                continue
            rooms = {tag: torch.zeros(count, 3, device=device) for tag in (3, 1, 2, 0)}
            works = [group.recv(room[:, 1], None, tag) for tag, room in rooms.items()]
            for work in works:
                work.wait()
                assert work.result() == 0
            for tag, room in rooms.items():
                assert room[:, 1].unique().tolist() == [float(tag + count)]
                assert not room[:, (0, 2)].any()
            group.recv(last := torch.zeros(1, dtype=torch.int64, device=device), 0, 9).wait()
            assert last.item() == count
    test.send("right")


class RemoteTensors:
    """An object whose methods take and return tensors of its device, which it is still computing when they return."""

    def __init__(self, device):
        self.device = device
        self.weights = torch.arange(1_000_000.0, device=device)
        self.lasts = 1

    def _busy(self):
        if self.device != "cpu":
            keep_busy(self.lasts * BUSY // 20)

    async def double(self, tensor):
        self._busy()
        return tensor * 2

    def add_in_thread(self, tensor):
        self._busy()
        return tensor + 1

    async def get(self):
        self._busy()
        self.weights += 1
        asyncio.get_running_loop().call_soon(self.weights.add_, 1)
        return self.weights

    async def items(self, count):
        item = torch.zeros(100_000, device=self.device)
        for number in range(count):
            self._busy()
            item.fill_(number)
            yield item

    async def be_slow(self, lasts):
        self.lasts = lasts

    async def ping(self):
        return 1


@contextlib.asynccontextmanager
async def _served(where, device):
    """Serve an object in each process; yield a function that finds that of a rank, and the group."""
    server = await StoreServer.start("127.0.0.1", 0) if where["rank"] == 0 else None
    try:
        async with asyncdist.process_group(**where) as group:
            job = [None if server is None else f"asyncdist://127.0.0.1:{server.port}/calls"]
            await group.broadcast_object_list(job, 0)
            objects = {"tensors": RemoteTensors(device), "other": RemoteTensors(device)}
            async with rpc.serve(objects, job[0], rank=where["rank"]):
                yield rpc.find, group
    finally:
        if server is not None:
            await server.close()


async def _is_lent(remote, tensor):
    """Call until tensors are lent to the object's process and it lends its own; return whether they are."""
    loans = remote._caller.loans
    for _ in range(300):
        await remote.double(tensor)
        if loans.lends(tensor):
            return True
        await asyncio.sleep(0.01)
    return False


def remote_calls(test, where, device, rounds):
    """Call an object of the next process with tensors in a stream of its own. Sends whether they are lent."""
    rank, size = where["rank"], where["world_size"]

    async def calls(remote):
        for number in range(rounds):
            tensor = torch.zeros(100_000 + number, device=device)
            if device != "cpu":
                keep_busy(BUSY // 20)
            tensor += 10 * number + rank
            found = await asyncio.gather(remote.double(tensor), remote.add_in_thread(tensor))
            assert [each.device for each in found] == [tensor.device] * 2
            assert torch.equal(found[0], tensor * 2)
            assert torch.equal(found[1], tensor + 1)
        columns = torch.arange(400_000.0, device=device).view(200_000, 2)[:, 1]
        assert torch.equal(await remote.double(columns), 2 * columns)
        for number in range(1, 4):
            found = await remote.get()
            assert torch.equal(found, torch.arange(1_000_000.0, device=device) + 2 * number - 1)
        assert [item.unique().tolist() async for item in remote.items(40)] == [[float(each)] for each in range(40)]
        ref = await remote.weights.ref()
        mine = torch.empty(1_000_000, device=device)
        assert torch.equal(await ref.read_into(mine), mine)

    async def main():
        async with _served(where, device) as (find, group):
            remote = await find("tensors", rank=(rank + 1) % size)
            lent = await _is_lent(remote, torch.ones(100_000, device=device))
            if device == "cpu":
                await calls(remote)
            else:
                # The methods that this process runs at that time use the stream too.
                usual, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
                side.wait_stream(usual)
                with torch.cuda.stream(side):
                    await calls(remote)
                    await group.barrier()
                usual.wait_stream(side)
            await group.barrier()
            return lent

    test.send(asyncio.run(main()))


def left_with_calls(test, where, device):
    """Lose the process whose result this one waits to read, and whose memory it has mapped."""

    async def main():
        async with _served(where, device) as (find, group):
            tensor = torch.ones(1_000_000, device=device)
            if where["rank"] == 1:
                await group.barrier()
                await asyncio.Event().wait()  # until it is killed
            remote, other = await find("tensors", rank=1), await find("other", rank=1)
            await _is_lent(remote, tensor)
            assert torch.equal(await remote.double(tensor), 2 * tensor)
            await remote.be_slow(10_000)
            call = remote.double(tensor)
            await other.ping()
            await group.barrier()
            test.send("waiting")
            try:
                await call
            except PeerLostError as error:
                test.send(str(error))
            assert tensor.sum().item() == 1_000_000  # the survivor's device is unharmed

    with contextlib.suppress(PeerLostError):
        asyncio.run(main())


def _model(device):
    torch.manual_seed(0)
    linear = [torch.nn.Linear(*sizes) for sizes in ((64, 512), (512, 512), (512, 8))]
    layers = [linear[0], torch.nn.Tanh(), linear[1], torch.nn.Tanh(), linear[2]]
    return torch.nn.Sequential(*layers).to(device)


def _trained(model, device, mine, steps=10):
    """Train on a part of each batch, which ``mine`` selects; return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        pictures, labels = torch.randn(32, 64, generator=random), torch.randint(8, (32,), generator=random)
        optimizer.zero_grad()
        output = model(mine(pictures).to(device))
        torch.nn.functional.cross_entropy(output, mine(labels).to(device)).backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def training(test, where, device, stock):
    """Train with asyncdist's or torch's DDP; the weights equal those of one rank with the whole batch."""
    rank, size = where["rank"], where["world_size"]

    def mine(batch):
        return batch.chunk(size)[rank]

    if stock:
        from datetime import timedelta

        import torch.distributed as dist

        from asyncdist import torch_backend  # noqa: F401 - registers the back end

        dist.init_process_group("asyncdist", **{**where, "timeout": timedelta(seconds=60)})
        trained = _trained(torch.nn.parallel.DistributedDataParallel(_model(device)), device, mine)
        dist.barrier()
        dist.destroy_process_group()
    else:
        with world(where):
            trained = _trained(asyncdist.DistributedDataParallel(_model(device), bucket_cap_mb=0.25), device, mine)
    for ours, alone in zip(trained, _trained(_model(device), device, lambda batch: batch), strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)
    test.send("right")


def _exchange(group, rank, tensor):
    return [group.send(tensor, 1 - rank), group.recv(torch.empty_like(tensor), 1 - rank)]


def left_behind(test, where, device, message=False):
    """Lose the peer whose device has not begun its part of an operation, and use the device afterwards."""
    with sync.process_group(**where) as group:
        tensor = torch.ones(1_000_000, device=device)
        for work in [group.all_reduce(tensor), *_exchange(group, where["rank"], tensor)]:
            work.synchronize()
        torch.cuda.synchronize()
        if where["rank"] == 1:
            keep_busy(2000 * BUSY)
            (group.send(tensor, 0) if message else group.all_reduce(tensor)).wait()  # until it is killed
        reached = threading.Event()

        def noting(function):
            return lambda *args: (reached.set(), function(*args))[1]

        collectives.passes = noting(collectives.passes)
        context = part_on(group, torch.device(device)).messages._context
        context.when_passed = noting(context.when_passed)
        work = group.recv(tensor, 1) if message else group.all_reduce(tensor)
        assert reached.wait(30), "this rank does not wait for the peer's device"
        test.send("waiting")
        try:
            work.wait()
        except PeerLostError as error:
            test.send((error.peer, str(error)))
    # No stream waits for the peer: the device can complete everything.
    torch.cuda.synchronize()
    assert (tensor + 1).isfinite().all().item()


def out_of_memory(test, where, device):
    """Run out of device memory in one rank's reduction; both ranks get an error that says so."""
    with sync.process_group(**where) as group:
        tensor = torch.ones(50_000_000, dtype=torch.float16, device=device)
        group.all_reduce(tensor[:1000]).synchronize()
        if where["rank"] == 1:
            # The mean of float16 needs a temporary tensor of 100 MB.
            used = torch.cuda.memory_reserved() + 20_000_000
            torch.cuda.set_per_process_memory_fraction(used / torch.cuda.get_device_properties(0).total_memory)
        try:
            group.all_reduce(tensor, asyncdist.ReduceOp.AVG).synchronize()
        except asyncdist.errors.GroupError as error:
            test.send(str(error))
        else:
            test.send("no error")
    torch.cuda.synchronize()


def made_in_inference_mode(test, where, device):
    """Run operations on tensors that were made in inference mode."""
    with world(where) as group, torch.inference_mode():
        size = where["world_size"]
        for count in (1000, 1_000_000):
            tensor = torch.full((count,), float(where["rank"]), device=device)
            group.all_reduce(tensor).wait()
            assert tensor.unique().tolist() == [size * (size - 1) / 2]
            group.broadcast(tensor.fill_(where["rank"]), size - 1).wait()
            assert tensor.unique().tolist() == [size - 1.0]
    test.send("right")


def left_alone(test, where, device, count, message=False):
    """Lose the peer, whose memory may be mapped, while an operation on the device waits for it."""
    with sync.process_group(**where) as group:
        tensor = torch.ones(count, device=device)
        for work in [group.all_reduce(tensor), *_exchange(group, where["rank"], tensor)]:
            work.synchronize() if device != "cpu" else work.wait()
        test.send("met")
        if where["rank"] == 1:
            test.recv()  # until it is killed
        try:
            (group.recv(tensor, 1) if message else group.all_reduce(tensor)).wait()
        except PeerLostError as error:
            test.send((error.peer, str(error)))
    torch.ones(3, device=device).sum().item()  # the survivor's device is unharmed
