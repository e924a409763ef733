"""Weight-transfer engines for vLLM, experimental: a trainer publishes, and the workers of inference engines read.

They follow the interface that vLLM 0.32 and 0.33 document (Weight Transfer, Base Classes and Custom Engines), and are
tested with stand-ins for both and with the CPU build of 0.32. vLLM finds them by its plug-ins::

    [project.entry-points."vllm.general_plugins"]           # of asyncdist
    asyncdist = "asyncdist.weights.adapters.vllm_engines:register_vllm_engines"

    vllm serve my-model --weight-transfer-config '{"backend": "asyncdist"}'

    engine = WeightTransferTrainerFactory.trainer_init(     # on every rank of the trainer
        init_info=AsyncdistTrainerInitInfo(job="asyncdist://10.0.0.1:29500/rl", rank=0),
        client=HTTPVLLMWeightSyncClient("http://10.0.0.2:8000"),
        source=ModuleSource(model),
    )
    engine.send_weights()

Unlike a broadcast, a version does not need the workers to be there at the same time: a worker that is late, or that starts
again, reads the newest version when its engine asks for it, and each host has one copy of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from asyncdist.errors import UsageError
from asyncdist.weights.blocking import BlockingPublisher, BlockingSubscriber

VLLM_BACKEND = "asyncdist"
"""The name of the back end."""
_READ_TIMEOUT = 300.0


@dataclass
class AsyncdistInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a worker needs to read: the job at a store daemon, and the name of the weights in it."""

    job: str
    name: str = "weights"


@dataclass
class AsyncdistUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The least number of the version that a worker loads. A worker that finds a newer one loads that."""

    version: int


class AsyncdistWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The engine of an inference worker: reads a version and loads it into the worker's model."""

    init_info_cls = AsyncdistInitInfo
    update_info_cls = AsyncdistUpdateInfo
    _subscriber: BlockingSubscriber | None = None

    def init_transfer_engine(self, init_info: AsyncdistInitInfo) -> None:
        """Enter the job. A second call enters another one."""
        self.shutdown()
        self._subscriber = BlockingSubscriber(job=init_info.job, name=init_info.name)
        self._subscriber.__enter__()

    def start_weight_update(self) -> None:
        """Prepare the layers of the model to be loaded again, as vLLM's engines for whole checkpoints do."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: AsyncdistUpdateInfo) -> None:
        """Read the version and load it.

        The model copies what it needs of each tensor. The tensors are those of the host's copy of the version.
        """
        subscriber = self._subscriber
        if subscriber is None:
            raise UsageError("receive_weights before init_transfer_engine: this worker knows no job")
        current = subscriber.current
        if current is None or current.number < update_info.version:
            while (version := subscriber.next(_READ_TIMEOUT)).number < update_info.version:
                pass
            with subscriber.swap(version):
                pass
        with subscriber.reading() as (tensors, _):
            self.model.load_weights(iter(tensors.items()))

    def finish_weight_update(self) -> None:
        """Let vLLM process the loaded layers."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        subscriber, self._subscriber = self._subscriber, None
        # vLLM also calls this while the process exits, when asyncdist has left the job already.
        with contextlib.suppress(UsageError):
            if subscriber is not None:
                subscriber.__exit__()


@dataclass
class AsyncdistTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The settings with which the ranks of a trainer publish; workers can read ``keep`` versions."""

    backend: ClassVar[str] = VLLM_BACKEND

    job: str
    name: str = "weights"
    keep: int = 2


class AsyncdistTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The engine of a trainer: rank 0 publishes the tensors of its source, and tells the workers to load the version."""

    init_info_cls = AsyncdistTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool = True) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._tensors: dict[str, torch.Tensor] = {}
        self._publisher: BlockingPublisher | None = None
        self._step = 0

    @classmethod
    def trainer_init(cls, init_info: AsyncdistTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Return an engine. On rank 0 it enters the job, and lets the workers enter it."""
        if source is None:
            raise UsageError("the back end asyncdist publishes whole versions: pass source=ModuleSource(model)")
        _check_source(source)
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            job, name = init_info.job, init_info.name
            publisher = BlockingPublisher(engine._tensors, job=job, name=name, keep=init_info.keep)
            engine._publisher = publisher.__enter__()
            try:
                client.init_weight_transfer_engine({"job": job, "name": name})
            except BaseException:
                engine.shutdown()
                raise
        return engine

    def send_weights(self) -> None:
        """Publish the present tensors, and let every worker load them. All ranks of the trainer call it."""
        if self._publisher is None:
            if self.is_sender:
                raise UsageError("send_weights after shutdown: make a new engine")
            # Making a tensor whole may be a collective of the trainer's ranks.
            for _ in _whole_tensors(self.source):
                pass
            return
        self._tensors.clear()
        self._tensors.update(_whole_tensors(self.source))
        self._step += 1
        version = self._publisher.publish(self._step)
        self._tensors.clear()
        self.client.start_weight_update()
        self.client.update_weights({"version": version.number})
        self.client.finish_weight_update(weight_version=str(version.number))

    def shutdown(self) -> None:
        """Leave the job. Workers that have the newest version give it to those that start."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.__exit__()


def _whole_tensors(source: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the names and whole tensors that this rank owns. A source of vLLM 0.32 is such an iterable itself."""
    pairs: Iterable[tuple[str, torch.Tensor]] = source.iter_full() if hasattr(source, "iter_full") else source
    return pairs


def _check_source(source: Any) -> None:
    """Raise UsageError on every rank if rank 0 would not get every tensor as a whole. Sources of vLLM 0.32 give it all."""
    if not hasattr(source, "iter_full"):
        return
    if not source.implements_iter_full():
        raise UsageError(
            f"{type(source).__name__} yields parts of tensors only, and the back end asyncdist publishes whole ones: "
            "implement iter_full()"
        )
    for tensor in source.metadata:
        if tensor.owners is not None and 0 not in tensor.owners:
            raise UsageError(
                f"{tensor.name} is owned by ranks {', '.join(map(str, tensor.owners))} of the trainer, and rank 0 "
                "publishes all tensors: gather it in the source, so that rank 0 is one of its owners"
            )


@functools.cache
def register_vllm_engines() -> None:
    """Make the back end ``"asyncdist"`` known to vLLM. Idempotent.

    vLLM calls it in each of its processes, and a trainer outside of these calls it itself.
    """
    WeightTransferEngineFactory.register_engine(VLLM_BACKEND, __name__, AsyncdistWeightTransferEngine.__name__)
    WeightTransferTrainerFactory.register_engine(VLLM_BACKEND, __name__, AsyncdistTrainerEngine.__name__)
