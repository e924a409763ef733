"""Calls between two sessions of this process: values, errors, deadlines, cancellation, order, credits."""

import asyncio
import builtins
import functools
import gc
import re
import threading
import weakref
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch

from asyncdist import rpc
from asyncdist.errors import UsageError
from asyncdist.rpc import conversation
from asyncdist.rpc.values import Carrier
from tests.rpc.conftest import assert_equal_and_writable, caller_of, num_open, read_into

both_ways = pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])


class Echo:
    """Returns what it gets, and remembers what happens."""

    def __init__(self):
        self.log = []
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def echo(self, *args, **kwargs):
        return [list(args), kwargs] if kwargs or len(args) != 1 else args[0]

    def plain(self, value):
        return value

    async def wait(self, number=0):
        self.log.append(number)
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        return number

    async def note(self, number):
        self.log.append(number)

    def note_in_thread(self, number):
        self.log.append(number)

    async def fail(self, error_name, text):
        raise (vars(builtins) | {"Odd": Odd})[error_name](text)

    async def fail_in_stream(self, error_name, text):
        yield await self.fail(error_name, text)

    async def result(self):
        return object()

    async def length(self, value):
        return len(value)

    def length_in_thread(self, value):
        return len(value)

    def __call__(self, number):
        return number + 1

    async def _private(self):
        return "secret"

    value = 3

    @property
    def count(self):
        return len(self.log)

    def numbers(self):
        yield 1


class Odd(Exception):
    """An exception whose message cannot be made."""

    def __str__(self):
        raise RuntimeError("no text")


# -- values ---------------------------------------------------------------------------------------------

VALUES = [
    None, True, -1, 1 << 63, 1 << 200, 2.5, "text", "\ud800", b"bytes", [1, [2]], {"a": 1, 2: "b"}, (1, (2, "x")), {1, 2},
    1 + 2j, {"nested": (1, [torch.arange(3)])}, list(range(20_000)), "x" * 100_000,
]  # fmt: skip


@pytest.mark.each_loop
async def test_plain_values_arrive_as_they_are(serving):
    async with serving(Echo()) as it:
        for value in VALUES:
            assert repr(await it.echo(value)) == repr(await it.plain(value)) == repr(value)
        assert await it.echo(1, [2], a=(3,)) == [[1, [2]], {"a": (3,)}]
        assert await it.echo() == [[], {}]


def tensors():
    yield torch.arange(7)
    yield torch.tensor(3.5)
    yield torch.empty(0, 3)
    yield torch.ones(300, 400).t()
    yield torch.randn(3, 5, dtype=torch.bfloat16)
    yield torch.ones(2, dtype=torch.complex64).conj()
    yield torch.nn.Parameter(torch.ones(4))
    yield torch.randn(2_000_000)
    yield torch.randn(3, 70_000)[:, ::2]
    yield torch.ones(3, requires_grad=True)


@both_ways
async def test_tensors_of_all_sizes_and_layouts_arrive_equal_and_writable(serving, local):
    async with serving(Echo(), local=local) as it:
        for tensor in tensors():
            for found in (await it.echo(tensor), await it.plain(tensor)):
                assert_equal_and_writable(found, tensor)
            assert torch.count_nonzero(tensor) or not tensor.numel()


async def test_objects_arrive_as_what_they_are(serving):
    weights = torch.nn.BatchNorm1d(3).state_dict()
    async with serving(Echo()) as it:
        found = await it.echo(torch.nn.Parameter(torch.ones(3), requires_grad=False), np.array(2.5), weights)
        parameter, array, state = found[0]
        assert type(parameter) is torch.nn.Parameter
        assert not parameter.requires_grad
        assert type(array) is np.ndarray
        assert array == 2.5
        assert type(state) is OrderedDict
        assert vars(state) == vars(weights)
        for value in (np.ma.array([1, 2] * 1000, mask=[0, 1] * 1000), np.ones((90, 90)).view(np.matrix)):
            with pytest.raises(UsageError, match=f"numpy.*{type(value).__name__} cannot be sent as plain data"):
                await it.echo(value)


@both_ways
async def test_long_bytes_and_long_plain_values_arrive_equal(serving, local):
    values = [bytes(range(251)) * 4_000, [(number, "x") for number in range(20_000)]]
    values.append({"deep": [values[0], torch.ones(100_000)], "short": b"ab"})
    async with serving(Echo(), local=local) as it:
        for value in values:
            assert repr(await it.echo(value)) == repr(await it.plain(value)) == repr(value)


def test_long_bytes_are_not_copied_into_the_message():
    content = bytes(100_000)
    carrier = Carrier(allow_pickle=False, references=None, place=lambda tensor, kind: tensor)
    for value in (content, [[content], {}], [[], {"a": {"b": content}}]):
        packed = carrier.pack(value, snapshot=True)
        assert len(packed.data) < 100
        assert [buffer.obj for buffer in packed.buffers] == [content]


class Results:
    """Returns what it keeps, or what nothing else refers to."""

    def __init__(self):
        self.kept = torch.ones(100_000)
        self.row = ["before"]
        self.array = np.ones(100_000)

    async def fresh_tensor(self):
        return torch.ones(100_000)

    async def fresh_rows(self):
        return [(number, ("a", number)) for number in range(10_000)]

    async def rows(self):
        return tuple((number, ("a", number)) for number in range(10_000))

    async def shared(self, how):
        match how:
            case "attribute":
                return self.kept
            case "view":
                return self.kept[:]
            case "array":
                return torch.from_numpy(self.array)
            case "storage":
                fresh = torch.ones(100_000)
                self.storage = fresh.untyped_storage()
                return fresh
            case "graph":
                self.output = torch.ones(100_000, requires_grad=True).exp()
                return self.output.detach()
            case "rows":
                return [(number, self.row) for number in range(10_000)]
            case "list":
                self.list = [(number,) for number in range(10_000)]
                return self.list


@pytest.fixture
def copies(monkeypatch):
    """The types of the results that the loop copies."""
    copied, pack = [], Carrier.pack

    def noting(carrier, value, *, snapshot=False, lender=None):
        copied.append(type(value))
        return pack(carrier, value, snapshot=snapshot, lender=lender)

    monkeypatch.setattr(Carrier, "pack", noting)
    return copied


@pytest.mark.each_loop
async def test_result_that_nothing_can_change_is_not_copied_on_the_loop(serving, copies):
    async with serving(Results()) as it:
        assert torch.equal(await it.fresh_tensor(), torch.ones(100_000))
        rows = [(number, ("a", number)) for number in range(10_000)]
        assert await it.fresh_rows() == rows
        assert await it.rows() == tuple(rows)
        assert not copies


@pytest.mark.each_loop
@pytest.mark.parametrize("how", ["attribute", "view", "array", "storage", "graph", "rows", "list"])
async def test_result_that_may_change_is_copied_when_the_method_returns(serving, copies, how):
    async with serving(Results()) as it:
        await it.shared(how)
        assert copies


LONG = [(number,) for number in range(40_000)]


class Echoing:
    """Sends and takes long values, and short ones between them."""

    async def send(self):
        return LONG

    async def count(self, value):
        return len(value)

    async def short(self):
        return 3


@pytest.fixture
def held_back(monkeypatch):
    """Let each value that a thread packs or reads wait until the test continues: return the events of both."""
    go_on = threading.Event()

    def held_back(name):
        begun, function = threading.Event(), getattr(Carrier, name)

        def slowly(*args):
            begun.set()
            assert go_on.wait(60)
            return function(*args)

        monkeypatch.setattr(Carrier, name, slowly)
        return begun, go_on

    yield held_back
    go_on.set()


@pytest.mark.parametrize("way", ["arguments", "result"])
async def test_long_value_is_read_while_the_loop_goes_on(serving, held_back, eventually, way):
    reading, go_on = held_back("unpack_aside")
    async with serving(Echoing()) as it:
        long = it.send() if way == "result" else it.count(LONG)
        await eventually(reading.is_set)
        other = it.short()
        if way == "result":
            assert await other == 3
        assert not long.done()
        go_on.set()
        assert await long == (LONG if way == "result" else 40_000)
        assert await other == 3


async def test_later_items_of_a_stream_wait_for_one_that_is_being_read(serving, held_back, eventually):
    class Source(Echoing):
        async def items(self):
            for value in (1, LONG, 2, [*LONG, 3], 4):
                yield value
            raise ValueError("the end")

    reading, go_on = held_back("unpack_aside")
    async with serving(Source()) as it:
        found = []
        task = asyncio.ensure_future(read_into(found, it.items()))
        await eventually(reading.is_set)
        assert await it.short() == 3
        assert await it.short() == 3
        assert found == [1]
        go_on.set()
        with pytest.raises(rpc.RemoteError, match="the end"):
            await task
        assert found == [1, LONG, 2, [*LONG, 3], 4]
        assert num_open(it) == 0


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_value_that_is_being_read_when_its_call_ends_is_dropped(serving, held_back, eventually, end):
    reading, go_on = held_back("unpack_aside")
    async with serving(Echoing()) as it:
        call = it.send()
        await eventually(reading.is_set)
        if end == "cancel":
            call.cancel()
            go_on.set()
            assert await it.short() == 3
            assert num_open(it) == 0
    if end == "close":
        with pytest.raises(rpc.CalleeLostError):
            await call
        go_on.set()


class Log:
    """Remembers what it gets."""

    def __init__(self):
        self.log = []

    def note_in_thread(self, *values):
        self.log += [len(value) if isinstance(value, list) else value for value in values]

    async def note(self, *values):
        self.note_in_thread(*values)


@pytest.mark.each_loop
async def test_later_calls_wait_for_long_arguments_that_are_being_packed_while_the_loop_goes_on(
    serving, held_back, eventually
):
    packing, go_on = held_back("pack_aside")
    served = Log()
    async with serving(served) as it:
        await it.note(0)
        calls = [it.note(LONG), it.note(1), it.note_in_thread([*LONG, 2]), it.note_in_thread(3), it.note(4)]
        await eventually(packing.is_set)
        for _ in range(100):
            await asyncio.sleep(0)
        assert served.log == [0]
        assert not any(call.done() for call in calls)
        go_on.set()
        await asyncio.gather(*calls)
        assert served.log == [0, 40_000, 1, 40_001, 3, 4]
        assert num_open(it) == 0


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_call_that_ends_while_its_arguments_are_being_packed_does_not_run(
    serving, held_back, eventually, overdue, end
):
    packing, go_on = held_back("pack_aside")
    served, later = Log(), []
    async with serving(served) as it:

        def note(limit=None):
            call = it.note(LONG, timeout=limit)
            later.append(it.note(1))
            return call

        if end == "deadline":
            await overdue(note, packing.is_set)
        else:
            call = note()
            await eventually(packing.is_set)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await asyncio.gather(*later)
        go_on.set()
        await it.note([*LONG, 2])
        assert served.log == [1] * len(later) + [40_001]
        assert num_open(it) == 0


async def test_session_that_closes_ends_calls_whose_arguments_are_being_packed(serving, held_back, eventually):
    packing, go_on = held_back("pack_aside")
    served = Log()
    async with serving(served) as it:
        calls = [it.note(LONG) for _ in range(4)]
        await eventually(packing.is_set)
    for call in calls:
        with pytest.raises(rpc.CalleeLostError) as caught:
            await call
        assert not caught.value.may_have_run
    go_on.set()
    assert served.log == []


@pytest.mark.parametrize("allow_pickle", [False, True])
async def test_object_deep_in_long_arguments_is_pickled_by_the_loop_or_refused(serving, allow_pickle):
    served = Log()
    async with serving(served, settings={"allow_pickle": allow_pickle}) as it:
        calls = [it.note([*LONG, Fraction(1, 2)]), it.note([*LONG, lambda: 1]), it.note(1)]
        if allow_pickle:
            await calls[0]
        else:
            with pytest.raises(UsageError, match=r"it.note\(\) at process \d+.*Fraction cannot be sent as plain data"):
                await calls[0]
        with pytest.raises(UsageError, match=r"it.note\(\) at process \d+.*function cannot be"):
            await calls[1]
        await calls[2]
        assert served.log == ([40_001, 1] if allow_pickle else [1])
        assert num_open(it) == 0


async def test_long_arguments_with_a_reference_and_a_tensor_arrive(serving):
    served = Log()
    async with serving(served) as it:
        found, values = Echo(), torch.arange(100_000)
        reference = rpc.refer(found)
        await it.note(LONG, values, reference)
        number, tensor, other = served.log
        assert number == 40_000
        assert torch.equal(tensor, values)
        await other.call("note", 3)
        assert found.log == [3]


async def test_long_value_with_a_reference_arrives(serving):
    class Owner(Echoing):
        async def send(self):
            return [LONG, rpc.refer(self)]

    async with serving(Owner()) as it:
        found, reference = await it.send()
        assert found == LONG
        assert await reference.call("short") == 3


async def test_many_tensors_and_arrays_in_one_call(serving):
    state = {f"layer{number}": torch.full((number * 100,), float(number)) for number in range(100)}
    arrays = [np.arange(12.0).reshape(3, 4), np.ones(9000, dtype=np.int16), np.float32(2)]
    async with serving(Echo()) as it:
        found = await it.echo(state, arrays=arrays)
        assert all(torch.equal(found[0][0][name], tensor) for name, tensor in state.items())
        for array, expected in zip(found[1]["arrays"], arrays, strict=True):
            assert array.dtype == expected.dtype
            assert np.array_equal(array, expected)


async def test_result_is_as_it_was_when_the_method_returned(serving):
    class Owner:
        def __init__(self):
            self.weights = torch.zeros(4_000_000)

        async def get(self):
            asyncio.get_running_loop().call_soon(self.weights.fill_, 1)
            return self.weights

    async with serving(Owner()) as it:
        assert not torch.count_nonzero(await it.get())
        assert torch.all(await it.get() == 1)


async def test_pickles_pass_only_where_they_are_allowed(serving):
    value = Fraction(1, 2)
    async with serving(Echo()) as it:
        with pytest.raises(
            UsageError, match=r"it.echo\(\) at process \d+.*Fraction cannot be sent as plain data"
        ) as raised:
            await it.echo(value)
        assert "weights_only" not in str(raised.value)
    async with serving(Echo(), settings={"allow_pickle": True}) as it:
        assert await it.echo(value) == value
        assert type(await it.echo(value)) is Fraction


async def test_functions_and_callable_objects_are_called_themselves(serving):
    async def double(number):
        return 2 * number

    for served, expected in ((double, 6), (functools.partial(double, 4), 8), (Echo(), 4), (torch.nn.Identity(), 3)):
        async with serving(served) as it:
            arguments = () if expected == 8 else (3,)
            assert await it(*arguments) == expected


# -- failures -------------------------------------------------------------------------------------------


async def test_exception_of_the_method_arrives_with_its_name_message_and_traceback(serving):
    async with serving(Echo()) as it:
        with pytest.raises(rpc.RemoteError, match=r"it.fail\(\) at process .* it raised ValueError: wrong") as caught:
            await it.fail("ValueError", "wrong")
        error = caught.value
        assert isinstance(error, ValueError)
        assert (error.type_name, error.remote_message) == ("ValueError", "wrong")
        assert (error.target, error.method, error.peer) == ("it", "fail", it.peer)
        assert "async def fail" not in error.remote_traceback
        assert "in fail" in error.remote_traceback
        assert "asyncdist/rpc" not in error.remote_traceback
        with pytest.raises(rpc.RemoteError, match="it raised OSError: no file") as caught:
            await it.fail("OSError", "no file")
        assert not isinstance(caught.value, OSError)
        with pytest.raises(rpc.RemoteError, match="its message raised RuntimeError"):
            await it.fail("Odd", "")
        for name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
            with pytest.raises(rpc.RemoteError, match=f"it raised {name}: 3"):
                await it.fail(name, "3")
            with pytest.raises(rpc.RemoteError, match=f"it raised {name}: 3"):
                [each async for each in it.fail_in_stream(name, "3")]
        with pytest.raises(rpc.RemoteError) as caught:
            await it.fail("ValueError", "long " * 10_000)
        assert "characters …" in caught.value.remote_message


CANNOT_RUN = [
    ("ehco", (), "has no method 'ehco'; did you mean 'echo'"),
    ("value", (), "'value' is an attribute of an object of type Echo, not a method"),
    ("count", (), "'count' is an attribute of an object of type Echo, not a method"),
    ("_private", (), "'_private' is private"),
    ("plain", (), "the arguments do not fit: "),
    ("note", (1, 2), "the arguments do not fit: "),
]


@pytest.mark.parametrize(
    ("error", "method", "arguments", "reason"),
    [
        *((rpc.CallRefusedError, *row) for row in CANNOT_RUN),
        (rpc.ResultError, "numbers", (), "it is a generator: write the method as `async def` with `yield`"),
        (rpc.ResultError, "result", (), r"builtins\.object cannot be sent"),
        # An error of the method, not of its arguments.
        (rpc.RemoteError, "length", (3,), "it raised TypeError: object of type 'int' has no len"),
        (rpc.RemoteError, "length_in_thread", (3,), "it raised TypeError: object of type 'int' has no len"),
    ],
)
async def test_call_that_fails_tells_the_reason(serving, error, method, arguments, reason):
    async with serving(Echo()) as it:
        with pytest.raises(error, match=rf"it.{method}.. at {it.peer}.*{reason}"):
            await it.call(method, arguments)
        assert await it.echo(1) == 1
        with pytest.raises(AttributeError, match="private"):
            it._private()


async def test_callable_attribute_is_called_as_it_is_now(serving):
    class Model:
        def __init__(self, value):
            self.value = value

        def __call__(self):
            return self.value

    class Owner:
        def __init__(self):
            self.model = Model(1)
            self.function = lambda: "plain"

        async def replace(self):
            async def function():
                return "coroutine"

            self.model, self.function = Model(2), function

        @property
        def broken(self):
            raise ValueError("no such model")

    owner = Owner()
    old = weakref.ref(owner.model)
    async with serving(owner) as it:
        assert (await it.model(), await it.function()) == (1, "plain")
        await it.replace()
        assert (await it.model(), await it.function()) == (2, "coroutine")
        gc.collect()
        assert old() is None
        with pytest.raises(rpc.CallRefusedError, match=r"'broken' of an object of type .* ValueError: no such model"):
            await it.broken()
        assert await it.model() == 2


async def test_value_that_cannot_be_pickled_is_named_where_pickles_are_allowed(serving):
    class Maker:
        async def make(self):
            return lambda: 1

        def make_in_thread(self):
            return [lambda: 1]

    async with serving(Maker(), settings={"allow_pickle": True}) as it:
        for method in ("make", "make_in_thread"):
            with pytest.raises(rpc.ResultError, match=rf"it.{method}.* of type builtins.function cannot be pickled"):
                await it.call(method)
        with pytest.raises(UsageError, match=r"it.make\(\) at process .* of type builtins.function cannot be pickled"):
            it.make(lambda: 1)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(function(args[0].inner, *args[1:], **(kwargs or {})))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("wrapper", r"a Wrapper has no memory of its own: .*to_local\(\) and full_tensor\(\) of a DTensor"),
        ("meta", "no transport here carries tensors on meta"),
        ("sparse", r"torch\.sparse_coo tensor cannot be communicated: call \.to_dense\(\)"),
        ("nested", "a nested tensor cannot be communicated"),
    ],
)
async def test_tensor_without_dense_memory_is_refused(serving, kind, reason, allow_pickle):
    class Maker:
        async def make(self, kind):
            return tensor_of_kind(kind)

    async with serving(Maker(), settings={"allow_pickle": allow_pickle}) as it:
        with pytest.raises(UsageError, match=rf"it.make\(\) at process .*{reason}"):
            it.make(tensor_of_kind(kind))
        with pytest.raises(rpc.ResultError, match=reason):
            await it.make(kind)


def tensor_of_kind(kind):
    if kind == "wrapper":
        return Wrapper(torch.ones(3))
    if kind == "nested":
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return torch.ones(3, device="meta") if kind == "meta" else torch.eye(3).to_sparse()


async def test_pickle_that_only_the_caller_allows_is_refused(job):
    from asyncdist.config import Config

    async with rpc.serve({"it": Echo()}, job, config=Config()), rpc.connect(job, config=Config(allow_pickle=True)):
        it = await rpc.find("it")
        with pytest.raises(rpc.CallRefusedError, match="its arguments cannot be read: a peer sent a pickle"):
            await it.echo(Fraction(1, 2))
        assert await it.echo(1) == 1


# -- deadlines and cancellation -------------------------------------------------------------------------


async def test_deadline_passes_at_the_caller_and_cancels_the_method(serving, overdue):
    echo = Echo()
    async with serving(echo) as it:
        error = await overdue(lambda limit: it.wait(timeout=limit), echo.begun.is_set)
        assert re.search(rf"it.wait\(\) at .*: no result within {error.timeout:g} s", str(error))
        await it.echo(0)
        assert echo.log == [0, "cancelled"]


async def test_deadline_travels_through_methods_that_call(job, eventually, overdue):
    class Middle:
        async def relay(self):
            inner = await rpc.find("inner")
            await inner.wait()

        def relay_in_thread(self):
            from asyncdist.rpc.caller import current_deadline

            return current_deadline.get() < float("inf")

    echo = Echo()
    async with rpc.serve({"inner": echo, "middle": Middle()}, job), rpc.connect(job):
        middle = await rpc.find("middle")
        await overdue(lambda limit: middle.relay(timeout=limit), echo.begun.is_set)
        # The innermost method is cancelled by a deadline that only the first caller has given.
        await eventually(lambda: echo.log == [0, "cancelled"])
        assert await middle.relay_in_thread(timeout=60)


async def test_cancelled_caller_cancels_the_method(serving):
    echo = Echo()
    async with serving(echo) as it:
        task = asyncio.ensure_future(asyncio.wait_for(it.wait(), 60))
        await echo.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await it.echo(0)
        assert echo.log == [0, "cancelled"]


async def test_cancelled_call_that_still_waits_never_runs(serving):
    class Slow:
        def __init__(self):
            self.log = []
            self.go_on = threading.Event()

        def block(self):
            self.go_on.wait(60)

        def note(self, number):
            self.log.append(number)

    slow = Slow()
    async with serving(slow) as it:
        blocking = it.block()
        dropped = it.note(1)
        kept = it.note(2)
        dropped.cancel()
        await asyncio.sleep(0.01)
        slow.go_on.set()
        await asyncio.gather(blocking, kept)
        assert slow.log == [2]


async def test_cancelled_calls_leave_nothing(serving):
    echo = Echo()
    async with serving(echo) as it:
        data = torch.ones(4_000_000)
        for step in range(20):
            call = it.echo(data)
            for _ in range(step):
                await asyncio.sleep(0)
            call.cancel()
        assert torch.equal(await it.echo(data), data)
        assert num_open(it) == 0


# -- order ----------------------------------------------------------------------------------------------


async def test_calls_of_one_caller_to_one_object_begin_in_their_order(serving):
    echo = Echo()
    async with serving(echo) as it:
        calls = []
        for number in range(600):
            payload = [torch.ones(100_000)] if number % 50 == 0 else []
            method = it.note_in_thread if number % 7 == 0 else it.note
            calls.append(it.echo(*payload) if payload else method(number))
        await asyncio.gather(*calls)
        expected = [number for number in range(600) if number % 50]
        assert echo.log == expected


# -- credits --------------------------------------------------------------------------------------------


async def test_calls_beyond_the_credits_wait_at_the_caller(serving, monkeypatch):
    monkeypatch.setattr("asyncdist.rpc.session.CREDITS", 4)
    monkeypatch.setattr(conversation, "CREDITS", 4)
    echo = Echo()
    async with serving(echo) as it:
        calls = [it.wait(number) for number in range(10)]
        await echo.begun.wait()
        await asyncio.sleep(0.01)
        assert echo.log == [0, 1, 2, 3]
        calls[4].cancel()
        echo.go_on.set()
        assert await asyncio.gather(*calls[:4], *calls[5:]) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


async def test_server_with_too_many_calls_says_so(serving):
    echo = Echo()
    async with serving(echo, max_calls=3) as it:
        calls = [it.wait(number) for number in range(3)]
        await echo.begun.wait()
        with pytest.raises(rpc.OverloadedError, match="3 calls of all callers are open"):
            await it.echo(1)
        echo.go_on.set()
        await asyncio.gather(*calls)
        assert await it.echo(1) == 1


async def test_long_arguments_are_sent_within_the_window(serving, monkeypatch):
    monkeypatch.setattr("asyncdist.rpc.session.WINDOW_NBYTES", 5_000_000)
    echo = Echo()
    async with serving(echo) as it:
        tensors = [torch.full((1_000_000,), float(number)) for number in range(8)]
        found = await asyncio.gather(*[it.echo(tensor) for tensor in tensors])
        assert all(torch.equal(*pair) for pair in zip(tensors, found, strict=True))
        waiting = [it.echo(tensor) for tensor in tensors]
        assert caller_of(it)._num_sent == 1
        await asyncio.gather(*waiting)


async def test_call_behind_a_cancelled_one_that_did_not_fit_is_sent(serving, monkeypatch):
    monkeypatch.setattr("asyncdist.rpc.session.WINDOW_NBYTES", 5_000_000)
    echo = Echo()
    async with serving(echo) as it:
        running = it.wait(torch.ones(1_000_000))
        await echo.begun.wait()
        large, small = it.echo(torch.ones(1_000_000)), it.echo("small", timeout=20.0)
        await asyncio.sleep(0)
        large.cancel()
        assert await small == "small"
        assert not running.done()
        echo.go_on.set()
        await running


async def test_damaged_call_ends_the_channel_of_its_caller_only(serving, job):
    async with serving(Echo()) as it, rpc.connect(job) as other:
        friend = await other.find("it")
        channel = caller_of(it)._channel
        channel.send(b"\x97\x00no call")
        with pytest.raises(rpc.CalleeLostError):
            await it.echo(1)
        assert await friend.echo(1) == 1


async def test_argument_that_cannot_be_carried_is_refused_before_anything_is_sent(serving):
    echo = Echo()
    async with serving(echo) as it:
        with pytest.raises(UsageError, match=r"it.note\(\) at process"):
            it.note(object())
        await it.note(1)
        assert echo.log == [1]


async def test_coroutines_of_one_object_run_concurrently(serving, eventually):
    echo = Echo()
    async with serving(echo) as it:
        calls = [it.wait(number) for number in range(10)]
        await eventually(lambda: len(echo.log) == 10)
        echo.go_on.set()
        assert await asyncio.gather(*calls) == list(range(10))
