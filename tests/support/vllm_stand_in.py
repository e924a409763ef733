"""A stand-in for the parts of vLLM that exchange weights, written after its documentation (Weight Transfer, 0.32 and 0.33).

The versions differ in the sources of a trainer's weights. `install` puts the stand-in into ``sys.modules``. It has the base
classes of the engines, the two factories, and the two functions that prepare and finish the loading of a model's layers,
which only note their calls.
"""

import importlib
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

reloads: list[tuple[str, torch.nn.Module]] = []


@dataclass
class WeightTransferInitInfo:
    pass


@dataclass
class WeightTransferUpdateInfo:
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]

    rank: int = field(kw_only=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not getattr(cls, "backend", None):
            raise TypeError(f"{cls.__name__} names no back end")

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(ABC):
    init_info_cls: type
    update_info_cls: type

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def parse_init_info(self, fields: dict[str, Any]) -> Any:
        return self._parse(self.init_info_cls, fields)

    def parse_update_info(self, fields: dict[str, Any]) -> Any:
        return self._parse(self.update_info_cls, fields)

    @staticmethod
    def _parse(kind: type, fields: dict[str, Any]) -> Any:
        try:
            return kind(**fields)
        except TypeError as error:
            raise ValueError(f"wrong fields: {error}") from error

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class TrainerWeightTransferEngine(ABC):
    init_info_cls: type

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True) -> None:
        self.client, self.source, self.is_sender = client, source, is_sender

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...

    def shutdown(self) -> None:
        return None


class Registry:
    def __init__(self) -> None:
        self.places: dict[str, tuple[str, str]] = {}

    def register_engine(self, name: str, module: str, class_name: str) -> None:
        if name in self.places:
            raise ValueError(f"{name} is registered")
        self.places[name] = module, class_name

    def find(self, name: str) -> Any:
        module, class_name = self.places[name]
        return getattr(importlib.import_module(module), class_name)


class WorkerRegistry(Registry):
    def create_engine(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> Any:
        return self.find(config.backend)(config, vllm_config, device, model)


class TrainerRegistry(Registry):
    def trainer_init(self, init_info: Any, *, client: Any, source: Any = None) -> Any:
        return self.find(init_info.backend).trainer_init(init_info, client=client, source=source)


class ModuleSource:
    """Yields the parameters of a module, anew in each iteration."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.iterations = module, 0

    def __iter__(self) -> Any:
        self.iterations += 1
        yield from self.module.named_parameters()


@dataclass(frozen=True)
class ParamMeta:
    """The declaration of a tensor since 0.33, with the ranks that own it; None if all do."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None


class WeightSource:
    """The base of sources since 0.33, which cannot be iterated: a rank iterates the tensors that it owns."""

    metadata: list[ParamMeta]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not WeightSource.iter_full

    def iter_full(self) -> Any:
        raise NotImplementedError

    def iter_local(self) -> Any:
        raise NotImplementedError


class OwnedModuleSource(WeightSource):
    """The parameters of a module, anew in each iteration; some are owned by some ranks only."""

    def __init__(
        self, module: torch.nn.Module, owners: dict[str, tuple[int, ...]] | None = None, rank: int = 0
    ) -> None:
        self.module, self.iterations, self.owners, self.rank = module, 0, owners or {}, rank

    @cached_property
    def metadata(self) -> list[ParamMeta]:  # type: ignore[override]
        return [
            ParamMeta(name, each.dtype, tuple(each.shape), self.owners.get(name))
            for name, each in self.module.named_parameters()
        ]

    def iter_full(self) -> Any:
        self.iterations += 1
        for name, parameter in self.module.named_parameters():
            if self.rank in self.owners.get(name, (self.rank,)):
                yield name, parameter


class LocalSource(WeightSource):
    """A source of the parts that a rank has."""

    metadata: list[ParamMeta] = []  # noqa: RUF012

    def iter_local(self) -> Any:
        yield from ()


class ServedModel(torch.nn.Module):
    """A model of an inference worker with half of the rows of each published tensor."""

    def __init__(self, shapes: dict[str, torch.Size], half: int) -> None:
        super().__init__()
        self.half = half
        self.loaded = {name: torch.zeros(shape[0] // 2, *shape[1:]) for name, shape in shapes.items()}

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            rows = len(tensor) // 2
            self.loaded[name].copy_(tensor.detach()[self.half * rows : (self.half + 1) * rows])


class WeightSyncClient:
    """Reaches all workers, and waits for them."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines, self.versions = engines, []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.init_transfer_engine(engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        for engine in self.engines:
            engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        for engine in self.engines:
            engine.finish_weight_update()
        self.versions.append(weight_version)


def install() -> SimpleNamespace:
    """Put the stand-in into ``sys.modules``; return it with ``remove``."""
    reloads.clear()
    names = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {
            each.__name__: each
            for each in (
                TrainerInitInfo, TrainerWeightTransferEngine, WeightTransferEngine, WeightTransferInitInfo,
                WeightTransferUpdateInfo,
            )
        },
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": WorkerRegistry(),
            "WeightTransferTrainerFactory": TrainerRegistry(),
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: reloads.append(("initialize", model)),
            "finalize_layerwise_reload": lambda model, config: reloads.append(("finalize", model)),
        },
    }  # fmt: skip
    for name, content in names.items():
        module = sys.modules[name] = ModuleType(name)
        module.__dict__.update(content)
        if "." in name:
            parent, _, own = name.rpartition(".")
            setattr(sys.modules[parent], own, module)
    factories = names["vllm.distributed.weight_transfer.factory"]

    def remove() -> None:
        for name in [*names, "asyncdist.weights.adapters.vllm_engines"]:
            sys.modules.pop(name, None)

    return SimpleNamespace(
        workers=factories["WeightTransferEngineFactory"],
        trainers=factories["WeightTransferTrainerFactory"],
        remove=remove,
    )
