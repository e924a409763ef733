"""Every collective of torch.distributed, in every form of the call; run by the teams of conftest.py.

Values are small integers, so that results do not depend on the order of summation. Where gloo refuses unequal sizes, the
reference consists of sends and receives.
"""

import itertools
import pickle
import warnings
from datetime import timedelta
from fractions import Fraction

import torch
import torch.distributed as dist
from toys import bindings, numbers

Op = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLES = (torch.int8, torch.uint8, torch.int32, torch.int64)


def over_gloo():
    return dist.get_backend() == "gloo"


# -- all_reduce --------------------------------------------------------------------------------------


COMPARISONS = (Op.PRODUCT, Op.MIN, Op.MAX)
REDUCTIONS = {
    "floats": (FLOATS, (Op.SUM, Op.AVG, *COMPARISONS)),
    "integers": (WHOLES, (Op.SUM, *COMPARISONS, Op.BAND, Op.BOR, Op.BXOR)),
    "bools": ((torch.bool,), (Op.SUM, *COMPARISONS, Op.BAND, Op.BOR)),
    "complex": ((torch.complex64, torch.complex128), (Op.SUM, Op.AVG)),
}


def all_reduce(rank, world, kind):
    results = {}
    for dtype, op in itertools.product(*REDUCTIONS[kind]):
        tensor = torch.tensor([True, False, rank == 0, rank > 0]) if kind == "bools" else numbers(rank)
        tensor = torch.complex(tensor, 2 * tensor).to(dtype) if kind == "complex" else tensor.to(dtype)
        assert dist.all_reduce(tensor, op) is None
        results[f"{dtype} {op}"] = tensor
    return results


class Call:
    """Makes the tensors of one call of a method of the process group, and lists the tensors to compare."""

    def __init__(self, rank, world):
        self.rank, self.world, self.at_root = rank, world, rank == world - 1
        self.x = numbers(rank)
        self.parts = [torch.zeros(5) for _ in range(world)]
        self.blocks = [numbers(rank + peer) for peer in range(world)]
        self.output, self.whole, self.all = torch.zeros(5), numbers(rank, world * 5), torch.zeros(world * 5)
        self.even = [5] * world

    def result(self):
        return [self.x, *self.parts, self.output, self.all]


SOON = timedelta(seconds=20)
FORMS = [
    ("broadcast", lambda c: ([c.x],), {}),
    ("broadcast", lambda c: (c.x, c.world - 1, SOON), {}),
    ("broadcast", lambda c: (), lambda c: {"tensor": c.x, "root": 1, "timeout": SOON}),
    ("allreduce", lambda c: ([c.x],), {}),
    ("allreduce", lambda c: (c.x,), {}),
    ("allreduce", lambda c: (c.x, Op.MAX, SOON), {}),
    ("allreduce", lambda c: (), lambda c: {"tensors": [c.x], "op": Op.MAX, "timeout": SOON}),
    ("allreduce", lambda c: (), lambda c: {"tensor": c.x, "timeout": SOON}),
    ("allreduce", lambda c: (), lambda c: {"tensors": [c.x], "opts": dist.AllreduceOptions()}),
    ("allreduce_coalesced", lambda c: ([c.x, c.whole],), {}),
    ("reduce", lambda c: (c.x, c.world - 1, Op.MAX, SOON), {}),
    ("reduce", lambda c: (), lambda c: {"tensor": c.x, "root": c.world - 1, "op": Op.MAX}),
    ("allgather", lambda c: ([c.parts], [c.x]), {}),
    ("allgather", lambda c: (c.parts, c.x, SOON), {}),
    ("allgather", lambda c: (), lambda c: {"output_tensors": c.parts, "input_tensor": c.x, "timeout": SOON}),
    ("gather", lambda c: (c.parts if c.at_root else [], c.x, c.world - 1), {}),
    ("gather", lambda c: (c.parts if c.at_root else [],), lambda c: {"input_tensor": c.x, "root": c.world - 1}),
    ("scatter", lambda c: (c.output, c.blocks if c.at_root else [], c.world - 1, SOON), {}),
    (
        "scatter",
        lambda c: (),
        lambda c: {"output_tensor": c.output, "input_tensors": c.blocks if c.rank == 0 else [], "root": 0},
    ),
    ("reduce_scatter", lambda c: ([c.output], [c.blocks]), {}),
    ("reduce_scatter", lambda c: (c.output, c.blocks, Op.MAX, SOON), {}),
    ("reduce_scatter", lambda c: (), lambda c: {"output": c.output, "input": c.blocks, "op": Op.MAX}),
    ("alltoall_base", lambda c: (c.all, c.whole, c.even, c.even, SOON), {}),
    (
        "alltoall_base",
        lambda c: (),
        lambda c: {
            "output": c.all, "input": c.whole, "output_split_sizes": [], "input_split_sizes": [], "timeout": SOON,
        },
    ),
    ("alltoall", lambda c: (c.parts, c.blocks), {}),
    ("barrier", lambda c: (), {}),
    ("barrier", lambda c: (SOON,), {}),
    ("barrier", lambda c: (), {"timeout": SOON}),
    ("_allgather_base", lambda c: (c.all, c.x), {}),
    ("_reduce_scatter_base", lambda c: (c.output, c.whole, dist.ReduceScatterOptions()), {}),
    ("allgather_into_tensor_coalesced", lambda c: ([c.all], [c.x]), {}),
    ("reduce_scatter_tensor_coalesced", lambda c: ([c.output], [c.whole]), {}),
    ("allgather_coalesced", lambda c: ([[part] for part in c.parts], [c.x]), {}),
    ("all_gather_single", lambda c: (c.all, c.x), {}),
    ("reduce_scatter_single", lambda c: (c.output, c.whole), {}),
    ("all_to_all_single", lambda c: (c.all, c.whole, c.even, c.even, SOON), {}),
]  # fmt: skip
"""Methods of process groups with the arguments of the forms that torch declares, by position and by name."""


def forms_of_methods(rank, world):
    """Call the methods of the process group in all of their forms."""
    results = {}
    for number, (name, positional, named) in enumerate(FORMS):
        if not hasattr(dist.ProcessGroup, name):
            continue
        call = Call(rank, world)
        getattr(dist.group.WORLD, name)(*positional(call), **(named(call) if callable(named) else named)).wait()
        if name == "reduce" and not call.at_root:
            call.x.zero_()  # it is not defined there
        results[f"{number} {name}"] = call.result()
    return results


def forms_that_do_not_exist(rank, world):
    group, x = dist.group.WORLD, numbers(rank)
    calls = [
        lambda: group.broadcast(x),
        lambda: group.allreduce(x, root=0),
        lambda: group.allreduce(),
        lambda: group.barrier(SOON, SOON),
        lambda: group.reduce(x, op=Op.MAX),
    ]
    refused = []
    for call in calls:
        try:
            call()
        except TypeError:
            refused.append(True)
    group.allreduce(x).wait()
    return [refused, x]


def all_reduce_sparse(rank, world):
    overlapping = torch.sparse_coo_tensor([[rank, 5]], [1.0, 2.0], (7,))
    rows = torch.sparse_coo_tensor([[rank, rank + 1]], numbers(rank, 6).view(2, 3), (world + 1, 3))
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (4,))
    unequal = torch.sparse_coo_tensor([list(range(rank))], [1.0] * rank, (world,))
    tensors = [overlapping, rows, nothing, unequal]
    for tensor in tensors:
        dist.all_reduce(tensor)
    return [[tensor.is_sparse, tensor.to_dense()] for tensor in tensors]


def all_reduce_coalesced(rank, world):
    tensors = [numbers(rank), numbers(rank, 3, torch.float32), torch.tensor(rank + 1.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced(tensors)
        dist.all_reduce_coalesced(again := [numbers(rank), numbers(rank)], Op.MAX, async_op=True).wait()
    return tensors + again


def coalescing_manager(rank, world):
    tensors = [numbers(rank), numbers(rank, 3)]
    together = dist._coalescing_manager
    with together(async_ops=True) as pending:
        for tensor in tensors:
            dist.all_reduce(tensor)
    pending.wait()
    outputs = [torch.zeros(world * 5), torch.zeros(world * 3)]
    with together():
        for output, tensor in zip(outputs, tensors, strict=True):
            dist.all_gather_into_tensor(output, tensor)
    return tensors + outputs


def asynchronous(rank, world):
    """Several operations at a time, waited for in reverse order."""
    tensors = [numbers(rank, count) for count in (1, 5, 70_000, 3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait()
    assert all(work.is_completed() for work in works)
    output = [torch.zeros(5) for _ in range(world)]
    gathering = dist.all_gather(output, numbers(rank), async_op=True)
    assert gathering.wait(timedelta(seconds=30))
    return tensors, output, torch.stack(works[1].result())


def futures(rank, world):
    tensor = numbers(rank)
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    chained = dist.all_reduce(numbers(rank), async_op=True).get_future().then(_reduces_again)
    return doubled.wait(), chained.wait(), tensor


def _reduces_again(future):
    """Block on a further collective in a callback, as PowerSGD does."""
    tensor = future.value()[0].clone()
    dist.all_reduce(tensor)
    return tensor


# -- one to all, all to one --------------------------------------------------------------------------


def broadcast(rank, world):
    results = []
    for src in range(world):
        for dtype in (*FLOATS, *WHOLES, torch.bool, torch.complex64):
            tensor = numbers(rank, dtype=dtype)
            dist.broadcast(tensor, src)
            results.append(tensor)
    transposed, scalar, empty = numbers(rank, 12).view(3, 4).t(), torch.tensor(float(rank)), torch.empty(0)
    for tensor in (transposed, scalar, empty):
        dist.broadcast(tensor, group_src=world - 1)
    waited = numbers(rank)
    dist.broadcast(waited, src=0, async_op=True).wait()
    return [*results, transposed, scalar, empty, waited]


def reduce(rank, world):
    results = []
    for dst in range(world):
        for op in (Op.SUM, Op.MAX, Op.PRODUCT):
            tensor = numbers(rank)
            dist.reduce(tensor, dst, op)
            results.append(tensor if rank == dst else torch.empty(0))  # elsewhere it is not defined
    whole = numbers(rank, dtype=torch.int64)
    dist.reduce(whole, group_dst=world - 1, async_op=True).wait()
    return [*results, whole if rank == world - 1 else torch.empty(0)]


def gather(rank, world):
    results = []
    for dst in range(world):
        gathered = [torch.zeros(5) for _ in range(world)] if rank == dst else None
        dist.gather(numbers(rank), gathered, dst=dst)
        results.append(gathered)
    return results


def _collected(mine, count_of, rank, world, dst):
    """Gather by sends and receives."""
    if rank != dst:
        dist.send(mine, dst)
        return None
    received = [mine.clone() if peer == dst else torch.zeros(count_of(peer), dtype=mine.dtype) for peer in range(world)]
    for peer in range(world):
        if peer != dst:
            dist.recv(received[peer], peer)
    return received


def scatter(rank, world):
    results = []
    for src in range(world):
        output = torch.zeros(5)
        dist.scatter(output, [numbers(10 * peer) for peer in range(world)] if rank == src else None, src=src)
        results.append(output)
    return results


# -- all to all --------------------------------------------------------------------------------------


def all_gather(rank, world):
    results = []
    for dtype in (*FLOATS, *WHOLES, torch.bool, torch.complex64):
        gathered = [torch.zeros(5, dtype=dtype) for _ in range(world)]
        dist.all_gather(gathered, numbers(rank, dtype=dtype))
        results.append(gathered)
    turned = [torch.zeros(4, 3).t() for _ in range(world)]
    dist.all_gather(turned, numbers(rank, 12).view(4, 3).t())
    views = list(torch.zeros(world, 5).unbind())
    dist.all_gather(views, numbers(rank))
    return [*results, turned, views, _all_gather_unequal(rank, world)]


def _all_gather_unequal(rank, world):
    mine = numbers(rank, rank)
    gathered = [torch.zeros(peer) for peer in range(world)]
    if over_gloo():
        for src in range(world):
            gathered[src] = mine if rank == src else gathered[src]
            dist.broadcast(gathered[src], src)
    else:
        dist.all_gather(gathered, mine)
    return gathered


def all_gather_into_tensor(rank, world):
    joined, whole = torch.zeros(world * 5), torch.zeros(world * 5, dtype=torch.int64)
    dist.all_gather_into_tensor(joined, numbers(rank))
    dist.all_gather_into_tensor(whole, numbers(rank, dtype=torch.int64), async_op=True).wait()
    matrix = torch.zeros(world * 2, 3)
    dist.all_gather_into_tensor(matrix, numbers(rank, 6).view(2, 3))
    in_place = torch.zeros(world * 5)
    in_place[rank * 5 : rank * 5 + 5] = numbers(rank)
    dist.all_gather_into_tensor(in_place, in_place[rank * 5 : rank * 5 + 5])
    large = torch.zeros(world * 70_000)
    dist.all_gather_into_tensor(large, numbers(rank, 70_000))
    return joined, whole, matrix, in_place, large


def all_gather_coalesced(rank, world):
    gathered = [[torch.zeros(5), torch.zeros(2, 3)] for _ in range(world)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(gathered, [numbers(rank), numbers(rank, 6).view(2, 3)])
    return gathered


def reduce_scatter(rank, world):
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op in (Op.SUM, Op.MAX, Op.AVG) if dtype.is_floating_point else (Op.SUM, Op.MIN, Op.BOR):
            output = torch.zeros(5, dtype=dtype)
            dist.reduce_scatter(output, [numbers(rank + peer, dtype=dtype) for peer in range(world)], op)
            results.append(output)
    unequal = torch.zeros(rank + 1)
    inputs = [numbers(rank, peer + 1) for peer in range(world)]
    if over_gloo():
        for peer in range(world):
            dist.reduce(inputs[peer], peer)
        unequal = inputs[rank]
    else:
        dist.reduce_scatter(unequal, inputs)
    return [*results, unequal]


def reduce_scatter_tensor(rank, world):
    output, largest, matrix = torch.zeros(5), torch.zeros(5), torch.zeros(2, 3)
    dist.reduce_scatter_tensor(output, numbers(rank, world * 5))
    dist.reduce_scatter_tensor(largest, numbers(rank, world * 5), Op.MAX)
    dist.reduce_scatter_tensor(matrix, numbers(rank, world * 6).view(world * 2, 3), Op.AVG)
    waited = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(waited, numbers(rank, world * 6).view(world * 2, 3), async_op=True).wait()
    source = numbers(rank, world * 5)
    dist.reduce_scatter_tensor(source[rank * 5 : rank * 5 + 5], source)  # into its own part of the input
    large = torch.zeros(70_000)
    dist.reduce_scatter_tensor(large, numbers(rank, world * 70_000))
    return output, largest, matrix, waited, source[rank * 5 : rank * 5 + 5], large


def all_to_all_single(rank, world):
    equal, complex_ones = torch.zeros(world * 2), torch.zeros(world, dtype=torch.complex64)
    dist.all_to_all_single(equal, numbers(rank, world * 2))
    dist.all_to_all_single(complex_ones, torch.complex(numbers(rank, world), numbers(rank, world)))
    sends = [(rank + peer) % 3 for peer in range(world)]  # the same both ways; some are nothing
    unequal = torch.zeros(sum(sends), 2)
    dist.all_to_all_single(unequal, numbers(rank, 2 * sum(sends)).view(-1, 2), sends, sends)
    later = torch.zeros(world, dtype=torch.int64)
    dist.all_to_all_single(later, numbers(rank, world, torch.int64), async_op=True).wait()
    return equal, complex_ones, unequal, later


def all_to_all(rank, world):
    inputs = [numbers(rank * world + peer, 3) for peer in range(world)]
    outputs = [torch.zeros(3) for _ in range(world)]
    dist.all_to_all(outputs, inputs)
    unequal_inputs = [numbers(rank * world + peer, rank + 2 * peer) for peer in range(world)]
    unequal = [torch.zeros(peer + 2 * rank) for peer in range(world)]
    if over_gloo():
        for dst in range(world):
            received = _collected(unequal_inputs[dst], lambda peer, dst=dst: peer + 2 * dst, rank, world, dst)
            unequal = received if rank == dst else unequal
    else:
        dist.all_to_all(unequal, unequal_inputs)
    return outputs, unequal


# -- barriers and objects ----------------------------------------------------------------------------


def barriers(rank, world):
    assert dist.barrier() is None
    dist.barrier(device_ids=[0])
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    return "all passed"


def checked_for_nan(rank, world):
    group, tensor = dist.new_group(), numbers(rank)
    hook = bindings.NanCheckHook.attach(group)
    dist.all_reduce(tensor, group=group)
    tensor[0], found = float("nan"), "nothing"
    try:
        dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        found = "NaN" if "NaN" in str(error) else str(error)
    hook.remove()
    dist.all_reduce(tensor, group=group)
    return found, tensor[1:], tensor[0].isnan()


def objects(rank, world):
    mine = {"rank": rank, "text": "x" * (100 * rank), "tensor": numbers(rank)}
    gathered, collected = [None] * world, [None] * world if rank == 1 else None
    dist.all_gather_object(gathered, mine)
    dist.gather_object(mine, collected, dst=1)
    announced = [("by", rank), rank, None]
    dist.broadcast_object_list(announced, src=world - 1, device=torch.device("cpu"))
    dealt = [None]
    dist.scatter_object_list(dealt, [f"part {peer}" for peer in range(world)] if rank == 0 else None, src=0)
    passed = [None, None]
    if rank == 0:
        dist.send_object_list(["to one", {"a": 1}], dst=1)
    elif rank == 1:
        dist.recv_object_list(passed, src=0)
    return gathered, collected, announced, dealt, passed


def objects_of_safe_types(rank, world):
    """With ``weights_only`` torch refuses other types on the ranks that would unpickle them."""
    gathered = [None] * world
    dist.all_gather_object(gathered, {"rank": rank, "tensor": numbers(rank)}, weights_only=True)
    announced = [Fraction(1, 2) if rank == 0 else None]
    try:
        dist.broadcast_object_list(announced, src=0, weights_only=True)
    except pickle.UnpicklingError as error:
        announced = ["refused", "fractions.Fraction" in str(error)]
    return gathered, announced if rank else "sent"
