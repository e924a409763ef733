"""Training across workers without distributed autograd: torch's names `RemoteModule` and `DistributedOptimizer`.

A `RemoteModule` puts the module of a worker into the autograd graph of the process that calls it. So ``loss.backward()``
takes the place of ``dist_autograd.backward(context, [loss])``, and no context is needed: gradients belong to the trainer
(see `asyncdist.rpc.training`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from asyncdist.base.background_loop import background_loop
from asyncdist.base.callables import AnyFunction
from asyncdist.errors import UnsupportedError, UsageError
from asyncdist.rpc.blocking.agent import UNSET_TIMEOUT, WorkerInfo, current_agent
from asyncdist.rpc.blocking.calls import Referred, Referring, RRef, call, counted, started
from asyncdist.rpc.training import RemoteModule, RemoteOptimizer, ServedModule, Tensors


class BlockingRemoteModule(Referring, nn.Module, kind=ServedModule.__qualname__):
    """A module in a worker, which this process calls and trains like one of its own. Exported as `RemoteModule`.

    The module is made on the worker. It may be an argument of a function, so that several workers train it; each has its
    own gradients. Its parameters are not those of a module around it: `DistributedOptimizer` takes the module itself.

    Args:
        remote_device: The worker, as ``"ps"`` or ``"rank:3"``, and the device there, as ``"ps/cuda:0"``; else the CPU.
        module_cls: The class of the module, which the worker can import.
        args: The arguments of the class.
        kwargs: Its keyword arguments.

    Example:
        >>> embedding = rpc.RemoteModule("ps", nn.EmbeddingBag, args=(100, 16), kwargs={"mode": "sum"})
        >>> optimizer = rpc.DistributedOptimizer(torch.optim.SGD, [embedding, *head.parameters()], lr=0.05)
        >>> criterion(head(embedding(indices, offsets)), target).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        remote_device: str,
        module_cls: AnyFunction,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        name, _, device = str(remote_device).partition("/")
        rank = name.removeprefix("rank:")
        info = current_agent().info(int(rank) if rank != name else name)
        made = [module_cls, list(args or ()), dict(kwargs or {}), device or "cpu"]
        self._info = info
        self._reference = background_loop().submit(call(info, "serve_module", made, UNSET_TIMEOUT))
        self._attaching: asyncio.Future[RemoteModule] | None = None
        # The constructor raises what that of the module raises.
        self._reference.result()

    @classmethod
    def standing_for(cls, info: WorkerInfo, reference: Referred) -> BlockingRemoteModule:
        """Make the module of another process that has arrived here."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._info, made._reference, made._attaching = info, reference, None
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its worker. The output is part of the autograd graph of this process."""
        return background_loop().run(self._forward(args, kwargs, torch.is_grad_enabled()))

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Run the module on its worker, and return a future of the output."""
        return started(self._forward(args, kwargs, torch.is_grad_enabled()))

    async def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], is_training: bool) -> Any:
        module, limit = await self.attached(), current_agent().limit(UNSET_TIMEOUT)
        return await counted(module.forward(args, kwargs, is_training=is_training, timeout=limit))

    async def attached(self) -> RemoteModule:
        """Return the awaited module, on the background loop."""
        attaching = self._attaching
        # A call after one that failed, for example because its time was up, tries again.
        if attaching is None or (attaching.done() and (attaching.cancelled() or attaching.exception() is not None)):
            attaching = self._attaching = asyncio.ensure_future(RemoteModule.attach(self._reference.result()))
        return await asyncio.shield(attaching)

    def train(self, mode: bool = True) -> BlockingRemoteModule:
        """Set the mode of the module, for all trainers."""
        self._call("train", mode)
        self.training = mode
        return self

    def gradients(self) -> Tensors:
        """Return the gradients of this process, by the names of the parameters; `DistributedOptimizer.step` clears them."""
        return cast(Tensors, self._call("gradients"))

    def remote_state_dict(self) -> Tensors:
        """Return a copy of the parameters and buffers."""
        return cast(Tensors, self._call("state_dict"))

    def load_remote_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load parameters and buffers into the module, for all trainers."""
        self._call("load_state_dict", state)

    def _call(self, method: str, *args: Any) -> Any:
        async def call() -> Any:
            return await counted(getattr(await self.attached(), method)(*args))

        return background_loop().run(call())

    def get_module_rref(self) -> Any:
        """Raise UnsupportedError: the RemoteModule stands for the module."""
        raise UnsupportedError("a RemoteModule has no RRef: call it, or pass it to the function of a worker")

    def remote_parameters(self, recurse: bool = True) -> Any:
        """Raise UnsupportedError: `DistributedOptimizer` takes the module."""
        raise UnsupportedError("a RemoteModule has no RRefs of parameters: pass the module to rpc.DistributedOptimizer")

    def parameters(self, recurse: bool = True) -> Any:
        """Raise UnsupportedError: the parameters stay at the worker."""
        raise UnsupportedError("the parameters stay at the worker: pass the RemoteModule to rpc.DistributedOptimizer")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UnsupportedError: `remote_state_dict` copies the state from the worker."""
        raise UnsupportedError(
            "the state is at the worker: remote_state_dict() copies it, load_remote_state_dict() loads it"
        )

    def __repr__(self) -> str:
        return f"<RemoteModule at {self._info.name}>"


class DistributedOptimizer:
    """An optimizer for modules of workers and parameters of this process, with torch's name.

    It makes one optimizer at the worker of each module, and one here. A step applies the gradients of this process, and
    clears them.

    Args:
        optimizer_class: An optimizer of `torch.optim`.
        params: Each `RemoteModule`, and each parameter of this process, as a tensor or an `RRef` of this process.
        settings: Arguments of the optimizer, such as ``lr``.

    Raises:
        UnsupportedError: An `RRef` is one of another process.
        UsageError: The optimizer is not one of `torch.optim`.
        RemoteError: The optimizer does not take these settings.
    """

    def __init__(self, optimizer_class: type[torch.optim.Optimizer], params: Sequence[Any], **settings: Any) -> None:
        modules: list[BlockingRemoteModule] = []
        local: list[torch.Tensor] = []
        for each in params:
            if isinstance(each, BlockingRemoteModule):
                modules.append(each)
            else:
                local.append(_parameter_of(each))

        async def create() -> RemoteOptimizer:
            attached = await asyncio.gather(*[module.attached() for module in modules])
            return await RemoteOptimizer.create(optimizer_class, attached, **settings)

        make: Any = optimizer_class
        self._local: torch.optim.Optimizer | None = make(local, **settings) if local else None
        self._remote = background_loop().run(counted(create()))

    def step(self, context_id: Any = None) -> None:
        """Update all parameters by the gradients of this process, and clear these. There is no ``context_id``."""
        if context_id is not None:
            raise UnsupportedError("distributed autograd has no context here: call loss.backward(), then step()")
        stepping = background_loop().submit(counted(self._remote.step()))
        if self._local is not None:
            self._local.step()
            self._local.zero_grad()
        stepping.result()


def _parameter_of(each: Any) -> torch.Tensor:
    value = each.local_value() if isinstance(each, RRef) and each.is_owner() else each
    if isinstance(value, RRef):
        raise UnsupportedError(
            f"a parameter at {value.owner_name()} is not optimized through an RRef: make its module with "
            "rpc.RemoteModule(worker, class), and pass that"
        )
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"DistributedOptimizer takes RemoteModules and parameters, not {type(value).__name__}")
    return value
