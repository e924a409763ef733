"""Collectives of ordinary tensors inside modes and transforms of the user, and the refusal of tensors without memory."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncdist.errors import UnsupportedError
from asyncdist.testing.collective_cases import collective_cases

SIZE = 2
# torch's forward-mode AD uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


class SeesOperations(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **kwargs or {})


def inside(kind, seen, run):
    """Call a function inside a mode or transform, from which it takes no tensor."""
    if kind in ("grad", "vmap"):
        transform, point = (torch.func.grad, torch.ones(3)) if kind == "grad" else (torch.func.vmap, torch.ones(2, 3))
        transform(lambda x: (run(), x.sum())[1])(point)
        return
    modes = {
        "fake": lambda: FakeTensorMode(allow_non_fake_inputs=True),
        "dispatch": lambda: SeesOperations(seen),
        "device": lambda: torch.device("meta"),
        "dual": contextlib.nullcontext,
    }
    with modes[kind]():
        run()


KINDS = ["fake", "dispatch", "device", "grad", "vmap", "dual"]
TRANSPORTS = ["shm", "tcp", "inproc"]


@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        # `make test` runs each kind with one of the transports.
        pytest.param(kind, transport, marks=() if KINDS.index(kind) % 3 == number else pytest.mark.exhaustive)
        for kind in KINDS
        for number, transport in enumerate(TRANSPORTS)
    ],
)
def test_collectives_run_outside_of_modes_and_transforms(together, transport, kind):
    """Nor does the default device of new tensors matter, which is a mode of torch. The second call is a prepared one."""
    dtypes = (torch.float32, torch.bfloat16) if kind == "device" else (torch.float32,)
    sizes = [(count, dtype) for dtype in dtypes for count in (8, 8, 100_000)]
    cases = [case for count, dtype in sizes for case in collective_cases(SIZE, count, dtype)]
    seen = []

    def rank(group):
        def run():
            for case in cases:
                for work in case.start(group):
                    work.wait()

        inside(kind, seen, run)

    # The level of forward-mode AD is one of the process.
    with forward_ad.dual_level() if kind == "dual" else contextlib.nullcontext():
        together(SIZE, rank, transport=transport)
    for case in cases:
        case.check()


def test_dispatch_mode_sees_no_operation_of_a_collective(together, transport):
    seen = []
    given = [torch.ones(4, 2), torch.ones(4, 2)]

    def rank(group):
        own = given[group.rank()]
        for tensor in (own, own.t()):
            with SeesOperations(seen):
                group.all_reduce(tensor, background=False)
                group.all_reduce(tensor).wait()
                group.all_gather_object([None, None], own, background=False)
        if group.rank() == 0:
            group.send(own.t(), 1).wait()
        else:
            into = own.t()
            with SeesOperations(seen):
                group.recv(into, 0).wait()

    together(SIZE, rank, transport=transport)
    assert seen == []
    assert torch.equal(given[1], torch.full((4, 2), 16.0))


def test_wait_inside_a_mode_completes_operations_that_were_started_before(together, transport):
    given = [torch.ones(200_000), torch.ones(200_000)]

    def rank(group):
        if group.rank() == 0:
            before = group.all_reduce(given[0])
            with FakeTensorMode(allow_non_fake_inputs=True):
                received = group.all_gather_object([None, None], "a")
                received.wait()
                before.wait()
        else:
            group.all_reduce(given[1]).wait()
            received = group.all_gather_object([None, None], torch.ones(2))
            received.wait()
        text, tensor = received.result()
        assert (text, type(tensor)) == ("a", torch.Tensor)
        return tensor

    assert [each.tolist() for each in together(SIZE, rank, transport=transport)] == [[1.0, 1.0]] * 2
    assert all(torch.equal(each, torch.full((200_000,), 2.0)) for each in given)


# -- refusals -----------------------------------------------------------------------------------------


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def dual(call):
    with forward_ad.dual_level():
        call(forward_ad.make_dual(torch.ones(4), torch.ones(4)))


UNSUITABLE = {
    "grad": (lambda call: torch.func.grad(lambda x: (call(x), x.sum())[1])(torch.ones(4)), "inside a transform of"),
    "vmap": (lambda call: torch.func.vmap(lambda x: (call(x), x)[1])(torch.ones(2, 4)), "inside a transform of"),
    "jvp": (
        lambda call: torch.func.jvp(lambda x: (call(x), x)[1], (torch.ones(4),), (torch.ones(4),)),
        "inside a transform of",
    ),
    "dual": (dual, "a dual tensor of forward-mode AD"),
    "zero": (lambda call: call(torch._efficientzerotensor((4,))), r"pass torch.zeros_like\(tensor\)"),
    "freed": (lambda call: call(freed()), "has been freed or resized to 0 bytes"),
    "fake": (lambda call: call(FakeTensorMode().from_tensor(torch.ones(4))), "a FakeTensor has no memory"),
}
CALLS = {
    "all_reduce": lambda group, tensor: group.all_reduce(tensor),
    "all_gather": lambda group, tensor: group.all_gather([torch.ones(4), torch.ones(4)], tensor),
    "broadcast": lambda group, tensor: group.broadcast(tensor, 0),
    "send": lambda group, tensor: group.send(tensor, 1 - group.rank()),
    "recv": lambda group, tensor: group.recv(tensor, 1 - group.rank()),
    "all_gather_object": lambda group, tensor: group.all_gather_object([None, None], tensor),
}


@pytest.mark.parametrize("name", UNSUITABLE)
def test_tensor_without_memory_is_refused_before_anything_is_sent(together, name):
    use, reason = UNSUITABLE[name]

    def rank(group):
        # One rank at a time: forward-mode AD has one level in the process.
        for each in range(SIZE):
            for call in CALLS.values() if each == group.rank() else ():
                with pytest.raises(UnsupportedError, match=reason):
                    use(lambda tensor, call=call: call(group, tensor))
            group.barrier().wait()
        tensor = torch.ones(4)
        group.all_reduce(tensor).wait()
        return tensor.tolist()

    assert together(SIZE, rank, transport="shm") == [[2.0] * 4] * SIZE
