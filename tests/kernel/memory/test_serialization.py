"""Serialization of objects: round trips, refusals, and damaged bytes, which raise ProtocolError only."""

import contextlib
import math
import pickle
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import datetime, timedelta
from decimal import Decimal
from enum import IntEnum

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.errors import ProtocolError, UsageError
from asyncdist.kernel.memory.buffers import DTYPES
from asyncdist.kernel.memory.serialization import Beside, pack, unpack
from asyncdist.testing.arithmetic import noise, same

pytestmark = pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental:UserWarning")


def there_and_back(value):
    return unpack(pack(value, allow_pickle=False), allow_pickle=False)


keys = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
hashable = st.recursive(keys, lambda inner: st.tuples(inner, inner), max_leaves=4)
plain = st.recursive(
    st.one_of(keys, st.complex_numbers(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(hashable, inner, max_size=4),
        st.sets(hashable, max_size=4),
    ),
    max_leaves=20,
)


def _typed(value):
    """Spell a value out with its types, so that True is not 1 and (1,) is not [1]."""
    if isinstance(value, (list, tuple)):
        return type(value), [_typed(item) for item in value]
    if isinstance(value, dict):
        return dict, [(_typed(key), _typed(item)) for key, item in value.items()]
    if isinstance(value, set):
        return set, sorted(map(repr, map(_typed, value)))
    if isinstance(value, float):
        return float, value, math.copysign(1, value)
    return type(value), value


@given(plain)
def test_plain_data_round_trip(value):
    """With ``weights_only=True``, plain data does not go through torch.save."""
    packed = pack(value, allow_pickle=False)
    assert pack(value, allow_pickle=False, weights_only=True) == packed
    for weights_only in (False, True):
        assert _typed(unpack(packed, allow_pickle=False, weights_only=weights_only)) == _typed(value)


def test_special_numbers_round_trip():
    assert math.isnan(there_and_back(float("nan")))
    assert there_and_back([2**64, -(2**63) - 1, {"deep": (10**40,)}]) == [2**64, -(2**63) - 1, {"deep": (10**40,)}]
    assert there_and_back({2**80: {2**90}}) == {2**80: {2**90}}


@pytest.mark.parametrize("name", [str(dtype).removeprefix("torch.") for dtype in DTYPES.values()])
def test_tensors_of_every_dtype_round_trip(name):
    dtype = getattr(torch, name)
    for shape in ((), (0,), (3, 0, 2), (1,), (2, 3)):
        tensor = noise(int(torch.Size(shape).numel()), dtype, seed=1).view(shape)
        assert same(there_and_back(tensor), tensor)


def test_tensors_of_every_layout_round_trip():
    base = torch.arange(24.0).view(4, 6)
    for tensor in (base.t(), base[1:3, ::2], base[2, 3], base[:, :0], base[:1].expand(3, 6)):
        assert same(there_and_back(tensor), tensor.contiguous())
    number = torch.tensor([1 + 2j])
    assert same(there_and_back(number.conj()), number.conj().resolve_conj())
    assert same(there_and_back(number.conj().imag), torch.tensor([-2.0]))
    with torch.inference_mode():
        assert there_and_back(torch.ones(2)).tolist() == [1, 1]


def test_requires_grad_is_kept():
    leaf = torch.ones(2, requires_grad=True)
    assert there_and_back(leaf).requires_grad
    assert there_and_back(leaf * 2).requires_grad
    assert not there_and_back(leaf.detach()).requires_grad
    assert there_and_back(torch.nn.Parameter(torch.zeros(1))).requires_grad


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.ones((2, 3), np.float16)), np.zeros((0, 2)),
        np.array(["ab", "ü"]), np.array([b"ab", b"c"]), np.array(["2020-01-02"], "M8[D]"), np.array([5], "m8[s]"),
        np.arange(4)[::-1], np.float32(1.5), np.bool_(True), np.uint64(2**64 - 1), np.complex64(1j), np.array(2.5),
        np.array("ab"), np.str_("ü"), np.str_(""), np.bytes_(b""), np.datetime64("2020-01-02"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)  # fmt: skip
def test_arrays_and_scalars_round_trip(array):
    got = there_and_back(array)
    assert type(got) is type(array)
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


def test_memory_maps_arrive_as_arrays(tmp_path):
    mapped = np.memmap(tmp_path / "mapped", np.int32, "w+", shape=(3,))
    mapped[:] = 7, 8, 9
    got = there_and_back(mapped)
    assert type(got) is np.ndarray
    assert got.tolist() == [7, 8, 9]


@pytest.mark.parametrize("requires_grad", [False, True])
def test_parameters_and_state_dicts_are_kept(requires_grad):
    """The state dict of a module has an attribute, which `load_state_dict` reads."""
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad)
    weights = torch.nn.BatchNorm1d(3).state_dict()
    assert vars(weights)
    got = there_and_back({"p": parameter, "w": weights, (1,): OrderedDict({"b": 1, "a": 2})})
    assert type(got["p"]) is torch.nn.Parameter
    assert got["p"].requires_grad is requires_grad
    assert type(got["w"]) is OrderedDict
    assert vars(got["w"]) == vars(weights)
    assert all(same(got["w"][name], weights[name]) for name in weights)
    assert list(got[1,]) == ["b", "a"]
    assert type(got[1,]) is OrderedDict


class Odd(list):
    """A subclass: sending it as a list would lose what it is."""


class Text(str):
    """A subclass of a type that msgpack knows."""


class Number(float):
    """A subclass of a type that msgpack knows."""


class Scalar(np.float64):
    """A subclass of a scalar of numpy."""


class Level(IntEnum):
    LOW = 1


class Unit(torch.Tensor):
    """A subclass that has the memory of a tensor."""


class Same:
    """It equals its copies."""

    def __repr__(self):
        return "Same()"


def function():
    pass


Pair = namedtuple("Pair", "a b")

MORE_THAN_THEIR_BASE = {
    "MaskedArray": np.ma.array([1, 2], mask=[0, 1]),
    "MaskedConstant": np.ma.masked,
    "matrix": np.ones((2, 2)).view(np.matrix),
    "chararray": np.char.array(["a "]),
    "recarray": np.rec.array([(1,)], dtype=[("x", "i4")]),
    "Scalar": Scalar(2),
    "Unit": torch.ones(2).as_subclass(Unit),
    "UninitializedParameter": torch.nn.UninitializedParameter(),
    "Text": Text("a"),
    "Number": Number(1),
    "Level": Level.LOW,
    "Pair": Pair(1, 2),
    "Size": torch.Size((1, 2)),
    "Counter": Counter("aab"),
    "defaultdict": defaultdict(list, {"k": [1]}),
    "datetime": datetime(2020, 1, 2),
    "timedelta": timedelta(1),
    "Decimal": Decimal("1.5"),
    "Same": Same(),
    "Odd": Odd(),
    "function": function,
    "frozenset": frozenset((1,)),
    "ndarray": np.array([Same()]),
    "numpy.ndarray": np.zeros(2, [("a", "i4")]),
    "range": range(3),
    "builtins.ValueError": ValueError("x"),
}


@pytest.mark.parametrize(("name", "value"), MORE_THAN_THEIR_BASE.items(), ids=MORE_THAN_THEIR_BASE)
@pytest.mark.parametrize("nested", [False, True])
def test_object_that_is_no_plain_data_is_refused_by_its_type_or_pickled(name, value, nested):
    with pytest.raises(UsageError, match=rf"{name} cannot be sent as plain data.*ASYNCDIST_ALLOW_PICKLE=1"):
        pack([{"k": (value,)}] if nested else value, allow_pickle=False)
    got = unpack(pack(value, allow_pickle=True), allow_pickle=True)
    # Scalars of numpy pickle themselves as their base.
    assert type(got) is type(value) or name == "Scalar"
    if name != "UninitializedParameter":
        assert repr(got) == repr(value)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_tensor_without_dense_memory_is_refused_with_what_to_call(allow_pickle):
    with pytest.raises(UsageError, match="to_dense"):
        pack(torch.eye(3).to_sparse(), allow_pickle=allow_pickle)


def test_buffers_arrive_as_bytes():
    assert there_and_back([bytearray(b"ab"), memoryview(b"cd")]) == [b"ab", b"cd"]
    assert there_and_back("\ud800") == "\ud800"


def test_pickle_is_read_where_it_is_allowed():
    data = pack([Odd([1, 2]), (frozenset((1,)),)], allow_pickle=True)
    got = unpack(data, allow_pickle=True)
    assert type(got[0]) is Odd
    assert got == [Odd([1, 2]), (frozenset((1,)),)]
    with pytest.raises(ProtocolError, match="ASYNCDIST_ALLOW_PICKLE is not set here"):
        unpack(data, allow_pickle=False)


# -- what torch.load(weights_only=True) reads ---------------------------------------------------------


def saved_and_loaded(value):
    return unpack(pack(value, allow_pickle=False, weights_only=True), allow_pickle=False, weights_only=True)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # torch 2.15, about its time
def test_weights_only_round_trip():
    weights = torch.nn.BatchNorm1d(3).state_dict()
    sparse = torch.eye(3).to_sparse()
    given = [
        weights,
        {"p": torch.nn.Parameter(torch.ones(2))},
        (Counter("aab"), torch.Size((2, 3))),
        torch.float16,
        sparse,
    ]
    got = saved_and_loaded(given)
    assert [type(part) for part in got] == [type(part) for part in given]
    assert list(got[0]) == list(weights)
    assert all(same(got[0][name], weights[name]) for name in weights)
    assert type(got[1]["p"]) is torch.nn.Parameter
    assert got[2:4] == given[2:4]
    assert torch.equal(got[4].to_dense(), torch.eye(3))
    np.testing.assert_array_equal(saved_and_loaded(np.arange(3)), np.arange(3))


class Executes:
    """What a pickle can be: reading it calls a function of the sender's choice."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was read",)


@pytest.mark.parametrize(
    "value", [Executes(), Odd(), function, frozenset((1,)), range(3)], ids=lambda value: type(value).__name__
)
def test_weights_only_refuses_code_on_both_sides(value, monkeypatch):
    for allow_pickle in (False, True):
        with pytest.raises(
            UsageError, match=r"cannot be sent with weights_only=True; send .* allow its type .*not an allowed global"
        ):
            pack([value], allow_pickle=allow_pickle, weights_only=True)
    pickled = pack([value], allow_pickle=True)
    with pytest.raises(ProtocolError, match="a peer sent a pickle, and weights_only=True was given here"):
        unpack(pickled, allow_pickle=True, weights_only=True)
    monkeypatch.setattr(
        "asyncdist.kernel.memory.serialization._load", lambda saved: None
    )  # a sender that does not look
    forged = pack([value], allow_pickle=False, weights_only=True)
    monkeypatch.undo()
    with pytest.raises(ProtocolError, match=r"weights_only=True refuses it: .*not an allowed global"):
        unpack(forged, allow_pickle=True, weights_only=True)


class Named:
    def __init__(self, number):
        self.number = number


def test_weights_only_takes_safe_globals():
    with torch.serialization.safe_globals([Named]):
        assert saved_and_loaded([Named(5)])[0].number == 5
    with pytest.raises(UsageError, match=r"test_serialization\.Named"):
        saved_and_loaded(Named(5))


def test_weights_only_data_needs_weights_only_to_read():
    packed = pack([torch.Size((1,))], allow_pickle=False, weights_only=True)
    with pytest.raises(ProtocolError, match="sent this with weights_only=True: pass that on every rank"):
        unpack(packed, allow_pickle=True)


def test_weights_only_error_of_an_object_that_cannot_be_saved():
    with pytest.raises(UsageError, match=r"type builtins\.generator cannot be sent with weights_only=True; .*pickle"):
        pack((part for part in ()), allow_pickle=False, weights_only=True)


@pytest.mark.parametrize(
    "saved", [b"", b"PK\3\4" + bytes(60), pickle.dumps(Odd()), b"\x80\x02."], ids=["nothing", "zip", "pickle", "end"]
)
def test_saved_bytes_that_torch_did_not_write_are_refused(saved):
    with pytest.raises(ProtocolError):
        unpack(msgpack.packb(msgpack.ExtType(8, saved)), allow_pickle=False, weights_only=True)


def test_too_deep_or_circular_data_is_refused():
    deep, nested, circle = [], (), []
    for _ in range(100_000):
        deep, nested = [deep], (nested,)
    circle.append(circle)
    for value in (deep, nested, circle):
        with pytest.raises(UsageError, match="too deeply"):
            pack(value, allow_pickle=False)


# -- what travels beside the packed bytes --------------------------------------------------------------


class Holder:
    def __init__(self, **parts):
        self.__dict__ = parts


LONG = 70_000
LONG_PARTS = {
    "tensor": torch.arange(LONG, dtype=torch.int16).view(-1, 2),
    "gradient": torch.ones(LONG, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(LONG)),
    "array": np.arange(LONG).reshape(2, -1),
    "bytes": bytes(range(250)) * 300,
    "state dict": OrderedDict(weight=torch.ones(LONG)),
}


def address(buffer):
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]


def addresses(part):
    if isinstance(part, dict):
        return addresses(next(iter(part.values())))
    return part.data_ptr() if isinstance(part, torch.Tensor) else address(part)


def holds(got, part):
    assert type(got) is type(part)
    if isinstance(part, dict):
        holds(next(iter(got.values())), next(iter(part.values())))
    elif isinstance(part, bytes):
        assert got == part
    else:
        assert got.dtype == part.dtype
        assert got.shape == part.shape
        assert (got == part).all()


@pytest.mark.parametrize(("name", "part"), LONG_PARTS.items(), ids=LONG_PARTS)
@pytest.mark.parametrize("weights_only", [False, True])
def test_long_content_is_neither_packed_nor_copied(name, part, weights_only):
    beside = Beside()
    data = pack([1, {"k": (part,)}], allow_pickle=False, weights_only=weights_only, beside=beside)
    assert len(data) < 1000
    assert [address(buffer) for buffer in beside.buffers] == [addresses(part)]
    arrived = [memoryview(bytearray(buffer)) for buffer in beside.buffers]
    got = unpack(data, allow_pickle=False, weights_only=weights_only, beside=arrived)[1]["k"][0]
    holds(got, part)
    if name != "bytes":
        assert addresses(got) == address(arrived[0])
    with pytest.raises(ProtocolError):
        unpack(data, allow_pickle=False, weights_only=weights_only)
    assert unpack(data, allow_pickle=False, weights_only=weights_only, beside=None)[0] == 1


@pytest.mark.parametrize("snapshot", [False, True])
def test_pickled_tensors_and_arrays_travel_beside_the_pickle(snapshot):
    parts = {name: part for name, part in LONG_PARTS.items() if name in ("tensor", "array", "parameter")}
    beside = Beside(snapshot=snapshot)
    data = pack(Holder(**parts), allow_pickle=True, beside=beside)
    assert len(data) < 2000
    own = {addresses(part) for part in parts.values()}
    sent = {address(buffer) for buffer in beside.buffers}
    assert not own & sent if snapshot else own == sent
    assert len(sent) == 3
    arrived = [memoryview(bytearray(buffer)) for buffer in beside.buffers]
    got = unpack(data, allow_pickle=True, beside=arrived)
    for name, part in parts.items():
        holds(getattr(got, name), part)


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray, bytes])
def test_content_of_more_than_4_gib_is_carried(kind):
    """The memory is not touched, so it takes none."""
    nbytes = (1 << 32) + 8
    whole = bytes(nbytes) if kind is bytes else torch.empty(nbytes, dtype=torch.uint8)
    beside = Beside()
    data = pack([whole.numpy() if kind is np.ndarray else whole], allow_pickle=False, beside=beside)
    assert [buffer.nbytes for buffer in beside.buffers] == [nbytes]
    if kind is not bytes:
        got = unpack(data, allow_pickle=False, beside=beside.buffers)[0]
        assert isinstance(got, kind)
        assert got.shape == (nbytes,)
        assert addresses(got) == whole.data_ptr()


def test_content_beyond_a_limit_is_refused_with_the_limit():
    with pytest.raises(UsageError, match=r"less than 4 GiB.*send it in parts"):
        pack({"k": bytes(1 << 32)}, allow_pickle=False)


# -- foreign bytes --------------------------------------------------------------------------------

_KINDS = range(13)
_extension = st.builds(msgpack.ExtType, st.sampled_from(_KINDS), st.binary(max_size=40))
_shapes = st.lists(st.integers(-2, 2**40), max_size=3)
_forged = st.one_of(
    st.builds(
        lambda number, shape, flags, raw: msgpack.ExtType(1, msgpack.packb((number, shape, flags, raw))),
        st.one_of(st.integers(-3, 70), st.text(max_size=3)), _shapes, st.one_of(st.integers(-1, 5), st.text(max_size=3)),
        st.one_of(st.binary(max_size=40), st.integers(-2, 3)),
    ),
    st.builds(
        lambda dtype, shape, is_array, raw: msgpack.ExtType(2, msgpack.packb((dtype, shape, is_array, raw))),
        st.sampled_from(["<f4", "O", "|O", "V8", "i4,O", "U3", "", "<M8[s]", "nonsense", ">c16", "|b1"]), _shapes,
        st.booleans(), st.one_of(st.binary(max_size=40), st.integers(-2, 3)),
    ),
    st.builds(lambda parts: msgpack.ExtType(5, msgpack.packb(parts)), st.lists(st.one_of(st.floats(), st.text()))),
    st.builds(lambda parts: msgpack.ExtType(10, msgpack.packb(parts)), st.lists(st.lists(st.text(max_size=3)), max_size=3)),
    _extension,
)  # fmt: skip


@given(st.one_of(st.binary(max_size=200), _forged.map(msgpack.packb), st.lists(_forged, max_size=3).map(msgpack.packb)))
def test_any_bytes_give_an_object_or_a_protocol_error(data):
    with contextlib.suppress(ProtocolError):
        unpack(data, allow_pickle=False)


WEIGHTS = [OrderedDict(weight=torch.nn.Parameter(torch.ones(3, 2).t())), torch.Size((1, 2))]


@pytest.mark.parametrize("weights_only", [False, True])
@given(plain, st.data())
def test_damaged_bytes_give_an_object_or_a_protocol_error(weights_only, value, data):
    given = WEIGHTS if weights_only else [value, torch.ones(3), np.ones(2), WEIGHTS[0]]
    packed = bytearray(pack(given, allow_pickle=False, weights_only=weights_only))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    for damaged in (packed, packed[: data.draw(st.integers(0, len(packed)))]):
        with contextlib.suppress(ProtocolError):
            unpack(damaged, allow_pickle=False, weights_only=weights_only)


def test_forged_depth_is_a_protocol_error():
    data = msgpack.packb(None)
    for _ in range(3000):
        data = msgpack.packb(msgpack.ExtType(3, msgpack.packb([msgpack.ExtType(3, data)])))
    for forged in (data, b"\x91" * 100_000 + b"\xc0"):
        with pytest.raises(ProtocolError):
            unpack(forged, allow_pickle=False)


def test_forged_sizes_allocate_nothing():
    """A length beyond the message's own is not believed."""
    forged = [head + b"\xff\xff\xff\xff" for head in (b"\xdd", b"\xc6", b"\xdf")] + [b"\xc9\xff\xff\xff\xff\x01"]
    for shape in ([2**40], [2**31, 2**31]):
        for code, body in ((1, (8, shape, 0, b"")), (2, ("<f8", shape, True, b"")), (2, ("<U0", shape, True, b""))):
            forged.append(msgpack.packb(msgpack.ExtType(code, msgpack.packb(body))))
    for data in forged:
        with pytest.raises(ProtocolError):
            unpack(data, allow_pickle=False)
