"""NCCL by way of cupy: unique ids, communicators, and the numbers of dtypes and operations.

No cupy module is imported before `load` is called. Tests use another implementation of `Bindings`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from asyncdist.base.ops import ReduceOp
from asyncdist.environment import NcclSettings
from asyncdist.errors import TransportUnavailableError
from asyncdist.kernel.transport.device_streams import cuda_missing

UNIQUE_ID_NBYTES = 128

# NCCL's numbers of types and operations are part of its binary interface, so they never change.
BYTES = 1
_TYPE_NAMES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16".split()
_TYPES = {getattr(torch, name): number for number, name in enumerate(_TYPE_NAMES)}
_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
SUM, AVERAGE = 0, 4
_OPERATIONS = {ReduceOp.SUM: SUM, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3, ReduceOp.AVG: AVERAGE}


class Numbers(NamedTuple):
    """How NCCL performs a reduction.

    Attributes:
        type: NCCL's number of the dtype.
        parts: How many values of that type make one element (2 for complex dtypes).
        operation: NCCL's number of the operation.
        divides: Whether NCCL only sums, and the caller must divide the sum.
    """

    type: int
    parts: int
    operation: int
    divides: bool


@lru_cache(maxsize=1024)
def numbers_of(op: ReduceOp, dtype: torch.dtype, size: int) -> Numbers | None:
    """Return how NCCL reduces elements of a dtype over ``size`` ranks, None if it cannot.

    Complex numbers are summed part by part. NCCL averages floats by multiplying with 1/size first, which is exact for
    powers of two. For other sizes the caller divides the sum, as the other backends do.
    """
    divides = op is ReduceOp.AVG and bool(size & (size - 1))
    operation = _OPERATIONS.get(ReduceOp.SUM if divides else op)
    parts = 2 if dtype.is_complex and operation in (SUM, AVERAGE) else 1
    kind = _TYPES.get(_PARTS[dtype] if parts == 2 else dtype)
    return None if kind is None or operation is None else Numbers(kind, parts, operation, divides)


# The first version of NCCL with ncclCommSplit.
_SPLITS_SINCE = 21800


class Bindings:
    """NCCL as ``cupy.cuda.nccl`` of cupy 13 or newer provides it.

    Attributes:
        errors: Exception types that its calls raise.
        splits: Whether communicators can be split; not with cupy 13.
    """

    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl
        # cupy does not know the status "in progress": the constructor of its NcclError raises KeyError.
        self.errors: tuple[type[Exception], ...] = (nccl.NcclError, KeyError)
        self.version = int(nccl.get_version())
        self.splits = self.version >= _SPLITS_SINCE and hasattr(nccl.NcclCommunicator, "commSplit")

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Run the calls in the context together."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def unique_id(self) -> bytes:
        """Return a new unique id for one communicator. NCCL then listens for the communicator's ranks in this process."""
        # cupy 13 returns signed numbers.
        return bytes(number & 0xFF for number in self._nccl.get_unique_id())

    def communicator(self, size: int, unique_id: bytes, rank: int) -> Any:
        """Return a communicator on the thread's current device. Blocks, without the GIL, until every rank has joined."""
        try:
            return self._create(size, unique_id, rank)
        # cupy 13 expects signed numbers.
        except TypeError:
            signed = tuple(number - 256 if number > 127 else number for number in unique_id)
            return self._create(size, signed, rank)

    def _create(self, *arguments: Any) -> Any:
        cls = self._nccl.NcclCommunicator
        raw = cls.__new__(cls)
        try:
            raw.__init__(*arguments)
        except BaseException:
            # Without the abort, cupy destroys the communicator when it is collected, which may wait for peers.
            raw.abort()
            raise
        return raw


@cache
def load() -> Bindings:
    """Return the bindings. Raises TransportUnavailableError with the reason if this process cannot use NCCL."""
    missing = cuda_missing()
    if missing is not None:
        raise TransportUnavailableError(missing)
    if not NcclSettings.from_environment().blocking:
        raise TransportUnavailableError("NCCL_COMM_BLOCKING=0 is set, which cupy does not support: unset it")
    try:
        with warnings.catch_warnings():
            # cupy warns of a missing library, which is checked below.
            warnings.simplefilter("ignore")
            # torch has been imported before, so both use torch's library.
            from cupy.cuda import nccl
    except ImportError as cause:
        raise TransportUnavailableError(
            f"cupy cannot be imported ({cause}): pip install cupy-cuda12x, or cupy-cuda13x for CUDA 13"
        ) from cause
    if not nccl.available:
        raise TransportUnavailableError("cupy finds no NCCL: pip install nvidia-nccl-cu12, or -cu13 for CUDA 13")
    return Bindings(nccl)


def version_text(version: int) -> str:
    """Return a version of NCCL, such as 22907, in dotted form."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
