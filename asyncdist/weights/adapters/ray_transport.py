"""A tensor transport for Ray: tensors that an actor returns go to another actor through shared memory or over TCP.

    import ray
    from asyncdist.weights.adapters.ray_transport import register_ray_transport

    register_ray_transport()                        # in the process that creates the actors, before their classes

    @ray.remote
    class Learner:
        @ray.method(tensor_transport="asyncdist")
        def weights(self):
            return self.model.state_dict()

    @ray.remote(enable_tensor_transport=True)
    class Actor:
        def load(self, weights):
            self.model.load_state_dict(weights)

    ray.get(actor.load.remote(learner.weights.remote()))

An actor copies the tensors that it returns into memory that the processes of its host share, so it may change them at
once. An actor of the same host maps that memory, and one of another host copies it over TCP, verified by digest. The
memory is used again when the last received tensor has gone.

Nothing is configured: the metadata that Ray carries have the address and a random token of the source.
ASYNCDIST_SOCKET_IFNAME chooses the interface, and the ASYNCDIST_TLS_* settings secure connections between hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from ray import experimental
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata

from asyncdist.base.background_loop import background_loop
from asyncdist.config import Config
from asyncdist.errors import UsageError
from asyncdist.net import ChannelAddress
from asyncdist.rendezvous import outward
from asyncdist.weights.content.layout import Manifest
from asyncdist.weights.content.selection import whole_selection
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.transfer_port import TransferPort
from asyncdist.weights.transfer.version_table import Version

RAY_TRANSPORT = "ASYNCDIST"
"""The name of the transport; Ray ignores upper and lower case."""


@dataclass
class AsyncdistTensors(TensorTransportMetadata):  # type: ignore[misc]
    """What a receiver needs to get the tensors of an object.

    Attributes:
        address: Where the source answers.
        token: The token of the source.
        key: The name of the object at the source.
        manifest: The shapes, dtypes and digests.
    """

    address: list[Any] = field(default_factory=list)
    token: str = ""
    key: str = ""
    manifest: bytes = b""


class AsyncdistTensorTransport(TensorTransportManager):  # type: ignore[misc]
    """The transport. Ray makes one per process and calls its methods in threads of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._port: TransferPort | None = None
        self._token = ""
        self._held: dict[str, HeldVersion] = {}
        self._receiving: dict[str, Future[list[torch.Tensor]]] = {}

    def tensor_transport_backend(self) -> str:
        return RAY_TRANSPORT

    @staticmethod
    def is_one_sided() -> bool:
        """Return True: only the receiver acts."""
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Return True: a transfer ends when it is aborted, and when the source dies or stalls."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        """Return True: an actor needs only this package."""
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> AsyncdistTensors:
        """Copy the tensors of an object into shared memory, and return where they are."""
        tensors = {str(number): tensor for number, tensor in enumerate(rdt_object)}
        devices = {tensor.device.type for tensor in rdt_object}
        if devices - {"cpu"}:
            raise UsageError(f"the transport {RAY_TRANSPORT} carries tensors of the CPU, not of {', '.join(devices)}")
        manifest = background_loop().run(self._hold(obj_id, tensors))
        assert self._port is not None
        return AsyncdistTensors(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device="cpu",
            address=self._port.address.encode(),
            token=self._token,
            key=obj_id,
            manifest=manifest,
        )

    async def _hold(self, obj_id: str, tensors: dict[str, torch.Tensor]) -> bytes:
        port = self._opened()
        held, manifest = await port.copy(tensors, _version(obj_id))
        port.offer(held, held.version.key)
        self._held[obj_id] = held
        return manifest.encode()

    def _opened(self) -> TransferPort:
        """Return the port of this process; called on the background loop."""
        if self._port is None:
            config = Config.from_environment()
            self._token = secrets.token_hex(16)
            self._port = TransferPort(
                host=outward(config), service="ray", job="", token=self._token, config=config, label="ray"
            )
        return self._port

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        """Free the copy of an object that no process refers to. Receivers that have mapped it keep the memory."""

        def drop() -> None:
            held = self._held.pop(obj_id, None)
            if held is not None:
                self._opened().drop(held)

        background_loop().call(drop)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        """Return metadata without content: the tensors' own metadata have all."""
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: Any,
        target_buffers: list[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Return the tensors of an object: mapped, or copied, or in the ``target_buffers``."""
        receiving = background_loop().submit(self._receive(tensor_transport_metadata))
        with self._lock:
            self._receiving[obj_id] = receiving
        try:
            tensors = receiving.result()
        finally:
            with self._lock:
                del self._receiving[obj_id]
        if not target_buffers:
            return tensors
        for target, tensor in zip(target_buffers, tensors, strict=True):
            target.copy_(tensor)
        return target_buffers

    async def _receive(self, source: AsyncdistTensors) -> list[torch.Tensor]:
        port = self._opened()
        manifest = Manifest.decode(source.manifest)
        held = port.new_held(_version(source.key), whole_selection(manifest.layout), manifest)
        try:
            await port.get(held, manifest, held.version.key, ChannelAddress.decode(source.address), token=source.token)
        except BaseException:
            port.drop(held)
            raise
        return _tensors_of(held, port)

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        """Do nothing: Ray does not call it, because only the receiver acts."""

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        """End a transfer of an object to this process, if there is one."""
        with self._lock:
            receiving = self._receiving.get(obj_id)
        if receiving is not None:
            receiving.cancel()


def _tensors_of(held: HeldVersion, port: TransferPort) -> list[torch.Tensor]:
    """Return the tensors of a version, which is dropped with the last of them."""
    loop = background_loop().loop
    assert held.memory is not None
    memory = held.memory.bytes
    # An object of Python to which the tensors refer, and which nothing else keeps.
    buffer = (ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())

    def drop() -> None:
        # The loop may have ended with the process.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(port.drop, held)

    weakref.finalize(buffer, drop).atexit = False
    tensors = []
    for place in held.selection.layout.places.values():
        if place.count:
            flat = torch.frombuffer(buffer, dtype=torch.uint8, offset=place.offset, count=place.nbytes)
            tensors.append(flat.view(place.dtype).view(place.shape))
        else:
            tensors.append(torch.empty(place.shape, dtype=place.dtype, device="cpu"))
    return tensors


def _version(key: str) -> Version:
    return Version(1, None, 0, 0, 0.0, key)


def register_ray_transport() -> None:
    """Make the transport ``"asyncdist"`` known to Ray. Call it once, before the classes of the actors are defined.

    Example:
        >>> register_ray_transport()
        >>> learner = ray.remote(Learner).remote()  # its methods may have tensor_transport="asyncdist"
    """
    experimental.register_tensor_transport(RAY_TRANSPORT, ["cpu"], AsyncdistTensorTransport, torch.Tensor)
