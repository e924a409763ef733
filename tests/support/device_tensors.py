"""Tensors of host memory that say that they are on a CUDA device, and sessions for remote calls that take them for such."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncdist.kernel.devices.lending import DeviceLending
from asyncdist.kernel.memory.serialization import PLAIN_TENSORS
from asyncdist.kernel.transport.device_collectives import DeviceCollectives
from tests.support.cuda import PretendDriver, cuda_ipc_over
from tests.support.devices import PretendStaged, PretendStreams

CUDA = torch.device("cuda", 0)


class OnDevice(torch.Tensor):
    """A tensor that is on a pretended device. What is computed from it is on the device too."""

    def __init_subclass__(cls) -> None:
        PLAIN_TENSORS.add(cls)

    num_to_host = 0
    """The tensors that were copied to host memory."""

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def is_cuda(self) -> bool:
        return True

    def cpu(self) -> torch.Tensor:
        OnDevice.num_to_host += 1
        return self.as_subclass(torch.Tensor).clone()


# It stands for a tensor of torch's own type.
PLAIN_TENSORS.add(OnDevice)


def on_device(tensor: torch.Tensor) -> OnDevice:
    """Return a tensor, whose memory is now that of a pretended device."""
    return tensor.as_subclass(OnDevice)


class PretendLending(DeviceLending):
    """The pretended device of one session.

    Attributes:
        all: Those of all sessions of a test.
        driver_options: What `PretendDriver` gets.
        drivers: The drivers that were made.
        num_from_host: The tensors that came in host memory.
        stream: The streams of the device.
    """

    all: list[PretendLending] = []  # noqa: RUF012
    driver_options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, transport: str | None) -> None:
        super().__init__(transport)
        self.drivers: list[PretendDriver] = []
        self.num_from_host = 0
        self.stream = PretendStreams()
        self.kinds: Sequence[type[DeviceCollectives]] = (
            [PretendStaged] if "cuda:staged" in str(transport) else [cuda_ipc_over(self.drivers, **self.driver_options)]
        )
        self.all.append(self)

    def current_device(self, kind: str) -> torch.device:
        assert kind == "cuda"
        return CUDA

    def streams_of(self, device: torch.device) -> PretendStreams:
        assert device == CUDA
        return self.stream

    def backends(self, kind: str) -> Sequence[type[DeviceCollectives]]:
        return self.kinds

    def place(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        self.num_from_host += 1
        return on_device(tensor.clone())

    async def read(
        self, owner: str, kind: str, lent: Sequence[tuple[int, bytes]], is_wanted: Callable[[], bool]
    ) -> list[torch.Tensor] | None:
        found = await super().read(owner, kind, lent, is_wanted)
        return None if found is None else [on_device(tensor) for tensor in found]
