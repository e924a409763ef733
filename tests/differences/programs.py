"""Random programs of collectives, stores and data-parallel steps: plain values for every contender and the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

WORLD = 3
GROUPS = {"all": (0, 1, 2), "first two": (0, 1), "ends": (0, 2), "last": (2,)}

# -- tensors --------------------------------------------------------------------------------------------

INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *EIGHT_BITS, *COMPLEX)
LAYOUTS = (
    "contiguous",
    "offset",
    "strided",
    "transposed",
    "columns",
    "reversed axes",
    "expanded",
    "negated",
    "conjugated",
)
STOOD_STILL = "the version counter stood still"
OUTSIDE = 1
"""What the memory around a tensor holds before a program."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of one rank. ``palette`` and ``seed`` give its values, together with the rank."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = "contiguous"
    palette: str = "small"
    seed: int = 0
    grad: str = "none"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def values(self, rank: int) -> torch.Tensor:
        """Return the values that a rank contributes, contiguous."""
        choices = palette_of(self.torch_dtype, self.palette)
        random = np.random.default_rng([self.seed, rank])
        chosen = random.integers(0, len(choices), size=int(np.prod(self.shape)))
        return choices[torch.from_numpy(chosen)].reshape(self.shape)


def palette_of(dtype: torch.dtype, palette: str) -> torch.Tensor:
    """Return the values from which tensors are drawn: small ones, the largest ones, or the special ones of a dtype."""
    if dtype is torch.bool:
        return torch.tensor([True, False] if palette != "large" else [True])
    if not dtype.is_floating_point and not dtype.is_complex:
        limits = torch.iinfo(dtype)
        small = range(-3 if limits.min else 0, 5)
        return torch.tensor([limits.min, limits.max, 1, 0] if palette != "small" else list(small), dtype=dtype)
    if dtype.is_complex:
        parts = palette_of(torch.float64, palette if palette != "large" else "small")
        return torch.complex(parts, parts.flip(0)).to(dtype)
    largest = torch.finfo(dtype).max
    numbers = {
        "small": [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0],
        "large": [largest, largest / 2],
        "special": [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.0],
    }[palette]
    return torch.tensor(numbers, dtype=torch.float64).to(torch.float32 if dtype.itemsize == 1 else dtype).to(dtype)


def laid_out(tensor: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor of a layout and the memory around it, both filled with `OUTSIDE`."""
    shape, dtype, layout = tensor.shape, tensor.torch_dtype, tensor.layout
    if layout == "strided" and shape:
        around = _filled((*shape[:-1], shape[-1] * 2), dtype)
        return around[..., ::2], around
    if layout == "transposed":
        around = _filled(tuple(reversed(shape)), dtype)
        return around.permute(tuple(reversed(range(len(shape))))), around
    if layout == "columns" and shape:
        around = _filled((*shape[:-1], shape[-1] + 2), dtype)
        return around[..., 1:-1], around
    if layout == "reversed axes" and len(shape) > 1:
        around = _filled((shape[1], shape[0], *shape[2:]), dtype)
        return around.transpose(0, 1), around
    if layout == "expanded" and is_expanded(tensor):
        around = _filled((1, *shape[1:]), dtype)
        return around.expand(shape), around
    if layout == "negated" and tensor.dtype in ("float32", "float64"):
        around = _filled(shape, torch.complex64 if tensor.dtype == "float32" else torch.complex128)
        return around.conj().imag, around
    if layout == "conjugated" and dtype.is_complex:
        around = _filled(shape, dtype)
        return around.conj(), around
    if layout == "offset":
        around = _filled((int(np.prod(shape)) + 4,), dtype)
        return around[3:-1].view(shape), around
    around = _filled(shape, dtype)
    return around, around


def is_expanded(tensor: Tensor) -> bool:
    """Return whether all rows of a tensor are one row of memory."""
    return tensor.layout == "expanded" and bool(tensor.shape) and 0 not in tensor.shape


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, OUTSIDE, dtype=torch.float32).to(dtype)


# -- collectives ----------------------------------------------------------------------------------------

REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MOVING = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "ring",
)
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


@dataclass(frozen=True)
class Step:
    """One collective. ``root`` counts in the group; ``output`` is the layout of the tensors that it only writes."""

    call: str
    tensor: Tensor
    op: str = "SUM"
    root: int = 0
    output: str = "contiguous"


@dataclass(frozen=True)
class Collectives:
    """Collectives of a group, one after the other or all at once, by one of the faces of asyncdist."""

    face: str
    group: str
    at_once: bool
    steps: tuple[Step, ...]


def splits(step: Step, size: int) -> np.ndarray:
    """Return how many rows each rank of an all_to_all_single (first index) sends to each."""
    return np.random.default_rng(step.tensor.seed).integers(0, 3, size=(size, size))


def given(step: Step, size: int, place: int, rank: int) -> list[tuple[Tensor, torch.Tensor]]:
    """Return the tensors that the rank at a place of the group gives to a step: their plans, and their values."""
    plan = step.tensor
    if step.call in ("reduce_scatter", "scatter", "all_to_all", "reduce_scatter_tensor"):
        parts = [plan.values(rank * 10 + to) for to in range(size)]
        if step.call != "reduce_scatter_tensor":
            return [(plan, part) for part in parts]
        return [(replace(plan, shape=(plan.shape[0] * size, *plan.shape[1:])), torch.cat(parts))]
    if step.call == "all_to_all_single":
        plan = replace(plan, shape=(int(splits(step, size)[place].sum()), *plan.shape[1:]))
    return [(plan, plan.values(rank))]


def objects(step: Step, rank: int) -> list[object]:
    """Return the objects of a rank, as many as the world has ranks."""
    seed = step.tensor.seed
    kinds = (rank, f"text {rank}", {"of": rank, "list": [seed, None]}, (seed, 1.5, b"bytes"), None)
    return [kinds[(seed + place) % len(kinds)] for place in range(WORLD)]


def shares_memory(program: object) -> bool:
    """Return whether a program has a tensor of which several elements share memory. Gloo must not get one: it takes the
    memory of as many elements as the tensor has."""
    return isinstance(program, Collectives) and any(
        "expanded" in (step.tensor.layout, step.output) and "object" not in step.call for step in program.steps
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw a collective that is valid in the same way on all ranks."""
    call = draw(st.sampled_from((*REDUCING, *REDUCING, *MOVING, *OBJECTS, "barrier")))
    shapes = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)
    shape = draw(st.one_of(shapes, st.sampled_from([(1,), (3000,), (70_000,), (150, 301)])))
    if call in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        shape = shape or (1,)
    tensor = Tensor(
        dtype=draw(st.sampled_from(DTYPES)),
        shape=shape,
        layout=draw(st.sampled_from(LAYOUTS)),
        palette=draw(st.sampled_from(("small", "small", "large", "special"))),
        seed=draw(st.integers(0, 99)),
        grad=draw(st.sampled_from(("none", "none", "none", "leaf", "computed"))),
    )
    op = draw(st.sampled_from(REDUCTIONS)) if call in REDUCING else "SUM"
    output = draw(st.sampled_from(LAYOUTS))
    if call in ("broadcast", "reduce", "gather", "scatter", "all_to_all_single", "ring"):
        # Some layouts are refused where they are read or written: at the root alone, or where there is more than a row.
        tensor, output = (replace(tensor, layout=_anywhere(tensor.layout)), _anywhere(output))
    return Step(call, tensor, op, draw(st.integers(0, WORLD - 1)), output)


def _anywhere(layout: str) -> str:
    return "contiguous" if layout in ("expanded", "conjugated") else layout


collectives = st.builds(
    Collectives,
    face=st.sampled_from(("torch", "blocking", "awaited")),
    group=st.sampled_from(tuple(GROUPS)),
    at_once=st.booleans(),
    steps=st.lists(steps(), min_size=1, max_size=4).map(tuple),
)

# -- data-parallel steps --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A linear layer of the model; ``shared`` is the index of an earlier layer whose weight it uses."""

    dtype: str = "float32"
    frozen: bool = False
    shared: int | None = None
    buffer: bool = False


@dataclass(frozen=True)
class Training:
    """Steps of a data-parallel model. Each forward uses some layers; ``uses`` has one mask for each forward and rank."""

    face: str
    layers: tuple[Layer, ...]
    uses: tuple[tuple[int, ...], ...]
    finds_unused: bool
    bucket_view: bool
    bucket_kib: int
    schedule: str
    first_local: bool


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    """Draw a model and its steps."""
    layers: list[Layer] = []
    for place in range(draw(st.integers(1, 4))):
        shared = draw(st.none() | st.integers(0, place - 1)) if place else None
        dtype = draw(st.sampled_from(("float32", "float32", "float64")))
        layers.append(Layer(dtype, draw(st.sampled_from((False, False, True))), shared, draw(st.booleans())))
    if all(layer.frozen for layer in layers):
        layers[0] = Layer()
    everything = (1 << len(layers)) - 1
    trained = draw(st.sampled_from([place for place, layer in enumerate(layers) if not layer.frozen]))
    finds_unused = draw(st.booleans())
    # Every rank computes gradients in every backward.
    masks = st.integers(1, everything).map(lambda mask: mask | 1 << trained) if finds_unused else st.just(everything)
    uses = draw(st.lists(st.lists(masks, min_size=WORLD, max_size=WORLD).map(tuple), min_size=2, max_size=3).map(tuple))
    # Torch's own class averages only the first of two backwards, over any back end.
    face = draw(st.sampled_from(("torch", "blocking")))
    schedule = draw(st.sampled_from(("in turn", "in turn", "forwards first"))) if face == "blocking" else "in turn"
    return Training(
        face=face,
        layers=tuple(layers),
        uses=uses,
        finds_unused=finds_unused,
        bucket_view=draw(st.booleans()),
        bucket_kib=draw(st.sampled_from((1, 25_000))),
        schedule=schedule,
        first_local=schedule == "in turn" and draw(st.booleans()),
    )


# -- stores ---------------------------------------------------------------------------------------------

KEYS = ("a", "b", "key/with/slashes", "", "ü", "*300")
VALUES = ("", "1", "-7", "text", "\x00\x01", "*70000")


def spelled(text: str) -> str:
    """Return a key or value as it is sent: "*300" stands for a text of that length."""
    return "v" * int(text[1:]) if text.startswith("*") else text


@dataclass(frozen=True)
class StoreCall:
    """A call of a store; ``prefix`` is that of the store through which it goes."""

    name: str
    arguments: tuple[object, ...]
    prefix: str = ""


@dataclass(frozen=True)
class StoreProgram:
    """Calls of one client."""

    calls: tuple[StoreCall, ...]


_keys, _values = st.sampled_from(KEYS), st.sampled_from(VALUES)
_some_keys = st.lists(_keys, min_size=0, max_size=3).map(tuple)
_calls = st.one_of(
    st.tuples(st.just("set"), st.tuples(_keys, _values)),
    st.tuples(st.just("set"), st.tuples(_keys, _values)),
    st.tuples(st.just("get"), st.tuples(_keys)),
    st.tuples(st.just("add"), st.tuples(_keys, st.integers(-(2**40), 2**40))),
    st.tuples(st.just("compare_set"), st.tuples(_keys, _values, _values)),
    st.tuples(st.just("delete_key"), st.tuples(_keys)),
    st.tuples(st.just("check"), st.tuples(_some_keys)),
    st.tuples(st.just("num_keys"), st.just(())),
    st.tuples(st.just("append"), st.tuples(_keys, _values)),
    st.tuples(st.just("multi_set"), st.lists(st.tuples(_keys, _values), max_size=3).map(lambda pairs: (tuple(pairs),))),
    st.tuples(st.just("multi_get"), st.tuples(_some_keys)),
    st.tuples(st.just("queue_push"), st.tuples(_keys, _values)),
    st.tuples(st.just("queue_pop"), st.tuples(_keys)),
    st.tuples(st.just("queue_len"), st.tuples(_keys)),
)
stores = st.builds(
    StoreProgram,
    calls=st.lists(
        st.builds(lambda call, prefix: StoreCall(*call, prefix), _calls, st.sampled_from(("", "", "p"))),
        min_size=1,
        max_size=12,
    ).map(tuple),
)
