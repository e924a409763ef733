"""Training across calls: modules whose forward and backward run in the process that has them, and their optimizers.

A process serves a `ServedModule`. Others attach to it and call it like a module, awaited. The output is part of the
caller's autograd graph: a backward through it sends the gradients of the output to the owner, which computes those of the
parameters, keeps them there, and returns those of the inputs. Gradients belong to the caller whose backward made them, so
the gradients of several trainers stay apart.

The graph of a forward is kept at the owner until the caller drops the output, or dies.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from asyncdist.base.background_loop import result_on
from asyncdist.base.daemon_threads import start_daemon_thread
from asyncdist.base.deadline import Timeout
from asyncdist.base.lifecycle import ProcessBound
from asyncdist.errors import LoopThreadError, UsageError
from asyncdist.kernel.torch_private import pytree as tree
from asyncdist.rpc.references import RemoteReference
from asyncdist.rpc.remote import RemoteObject
from asyncdist.rpc.session import current_session

Tensors = dict[str, torch.Tensor]


# -- at the owner -----------------------------------------------------------------------------------


class ServedModule:
    """A module that other processes train: ``rpc.serve({"embedding": ServedModule(module, optimizer)}, job)``.

    Its methods run in threads. A lock keeps the updates of the parameters apart; a forward may read parameters while
    another trainer updates them, as usual with asynchronous SGD, and a backward uses them as they are then.

    Args:
        module: The module.
        optimizer: Called with the parameters to make an optimizer that all trainers share, such as
            ``lambda parameters: torch.optim.SGD(parameters, lr=0.1)``; None if each trainer makes its own.
    """

    def __init__(
        self, module: nn.Module, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    ) -> None:
        self.module = module
        self.updated = {name: nn.Parameter(each.data, each.requires_grad) for name, each in module.named_parameters()}
        """The parameters, as optimizers have them: they share memory with those of the module, and have versions of their
        own, because autograd refuses a backward after an update of the parameters that the forward has used."""
        self.optimizer = None if optimizer is None else optimizer(list(self.updated.values()))
        # A hook of the optimizer may copy the state.
        self.lock = threading.RLock()
        """Held while parameters change."""

    def attach(self) -> RemoteReference:
        """Return a reference to a `ModuleUse` for the caller."""
        return current_session().refer(ModuleUse(self))

    def state_dict(self) -> Tensors:
        """Return a copy of the parameters and buffers."""
        with self.lock:
            return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load parameters and buffers."""
        with self.lock:
            self.module.load_state_dict(state)


@dataclass(eq=False)
class ForwardGraph:
    """The graph of one forward, which waits for its backward: the inputs and outputs with gradients."""

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


class ModuleUse:
    """The work of one trainer with a `ServedModule`, and its gradients. `RemoteModule` calls its methods."""

    def __init__(self, served: ServedModule) -> None:
        self._served = served
        self._gradients: Tensors = {}
        self._optimizer = served.optimizer
        self.state_dict, self.load_state_dict = served.state_dict, served.load_state_dict

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], is_training: bool) -> list[Any]:
        """Run the module; return its output, the positions of the tensors with gradients, and a reference to the graph."""
        inputs = [leaf for leaf in tree.tree_leaves([args, kwargs]) if _needs_gradient(leaf)]
        with torch.set_grad_enabled(is_training):
            output = self._served.module(*args, **kwargs)
        leaves, structure = tree.tree_flatten(output)
        positions = [place for place, leaf in enumerate(leaves) if _needs_gradient(leaf)]
        outputs = [leaves[place] for place in positions]
        graph = current_session().refer(ForwardGraph(inputs, outputs)) if outputs else None
        plain = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return [tree.tree_unflatten(plain, structure), positions, graph]

    def backward(self, graph: RemoteReference, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Add to the gradients of the parameters, and return those of the inputs."""
        kept: ForwardGraph = graph.local_value()
        pairs = [pair for pair in zip(kept.outputs, gradients, strict=True) if pair[1] is not None]
        outputs, given = zip(*pairs, strict=True) if pairs else ((), ())
        named = {name: each for name, each in self._served.module.named_parameters() if each.requires_grad}
        wanted = [*kept.inputs, *named.values()]
        found = torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)
        count = len(kept.inputs)
        for name, gradient in zip(named, found[count:], strict=True):
            if gradient is not None:
                known = self._gradients.get(name)
                self._gradients[name] = gradient if known is None else known + gradient
        return list(found[:count])

    def make_optimizer(self, name: str, settings: Mapping[str, Any]) -> None:
        """Make an optimizer of `torch.optim` for this trainer."""
        kind = getattr(torch.optim, name, None)
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            raise ValueError(f"torch.optim has no optimizer {name!r}")
        self._optimizer = kind(list(self._served.updated.values()), **settings)

    def step(self) -> None:
        """Update the parameters by the gradients of this trainer, and clear these."""
        if self._optimizer is None:
            raise ValueError("the module has no optimizer: serve it with one, or make one with RemoteOptimizer.create")
        with self._served.lock:
            for name, parameter in self._served.module.named_parameters():
                # The program may have given the parameter other memory.
                self._served.updated[name].data = parameter.data
                self._served.updated[name].grad = self._gradients.get(name)
            self._optimizer.step()
            for parameter in self._served.updated.values():
                parameter.grad = None
        self._gradients = {}

    def zero_grad(self) -> None:
        self._gradients = {}

    def gradients(self) -> Tensors:
        """Return the gradients of this trainer by the names of the parameters."""
        return dict(self._gradients)

    def train(self, mode: bool) -> None:
        self._served.module.train(mode)


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


# -- at the trainer ---------------------------------------------------------------------------------


class RemoteModule(ProcessBound):
    """A module in another process, which this process trains: ``output = await module(inputs)``.

    Make it with `attach`. The output has gradients if the module or an input has; await `asyncdist.rpc.backward` for the
    loss, or call ``loss.backward()`` in a thread that runs no event loop.

    Example:
        >>> embedding = await rpc.RemoteModule.attach(await rpc.find("embedding"))
        >>> optimizer = await rpc.RemoteOptimizer.create(torch.optim.SGD, [embedding], lr=0.1)
        >>> loss = criterion(head(await embedding(words)), labels)
        >>> await rpc.backward(loss)
        >>> await optimizer.step()
    """

    _elsewhere = "the other process attaches to the module: send its name instead"

    def __init__(self, use: RemoteReference) -> None:
        self._use = use
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def attach(cls, served: RemoteObject | RemoteReference, *, timeout: Timeout = None) -> RemoteModule:
        """Begin to use a `ServedModule`.

        Args:
            served: What `asyncdist.rpc.find` has returned, or a reference to a `ServedModule`.
            timeout: Seconds.
        """
        return cls(await served.call("attach", timeout=timeout))

    async def __call__(self, *args: Any, timeout: Timeout = None, **kwargs: Any) -> Any:
        """Run the module on its owner. Without gradients (`torch.no_grad`) the owner keeps no graph."""
        return await self.forward(args, kwargs, timeout=timeout)

    async def forward(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        is_training: bool | None = None,
        timeout: Timeout = None,
    ) -> Any:
        """Run the module on its owner.

        ``is_training`` says whether the output has gradients; None if the calling thread computes any.
        """
        is_training = torch.is_grad_enabled() if is_training is None else is_training
        output, positions, graph = await self._use.call(
            "forward", list(args), dict(kwargs), is_training, timeout=timeout
        )
        if graph is None:
            return output
        inputs = [leaf for leaf in tree.tree_leaves([list(args), kwargs]) if _needs_gradient(leaf)]
        leaves, structure = tree.tree_flatten(output)
        owner, outputs = (self._use, graph, self._loop), [leaves[place] for place in positions]
        # The parameters have gradients even if no input has.
        anchor = torch.empty(0, requires_grad=True)
        joined = _RemoteBackward.apply(owner, outputs, anchor, *inputs)  # type: ignore[no-untyped-call]
        for place, tensor in zip(positions, joined, strict=True):
            leaves[place] = tensor
        return tree.tree_unflatten(leaves, structure)

    async def train(self, mode: bool = True, *, timeout: Timeout = None) -> None:
        """Set the mode of the module, as `torch.nn.Module.train` does, for all trainers."""
        await self._use.call("train", mode, timeout=timeout)

    async def step(self, *, timeout: Timeout = None) -> None:
        """Update the parameters by the gradients of this process, with the optimizer of the owner."""
        await self._use.call("step", timeout=timeout)

    async def zero_grad(self, *, timeout: Timeout = None) -> None:
        """Clear the gradients of this process at the owner."""
        await self._use.call("zero_grad", timeout=timeout)

    async def gradients(self, *, timeout: Timeout = None) -> Tensors:
        """Return the gradients of this process, by the names of the parameters."""
        return cast(Tensors, await self._use.call("gradients", timeout=timeout))

    async def state_dict(self, *, timeout: Timeout = None) -> Tensors:
        """Return a copy of the parameters and buffers."""
        return cast(Tensors, await self._use.call("state_dict", timeout=timeout))

    async def load_state_dict(self, state: Mapping[str, torch.Tensor], *, timeout: Timeout = None) -> None:
        """Load parameters and buffers into the module, for all trainers."""
        await self._use.call("load_state_dict", dict(state), timeout=timeout)


class RemoteOptimizer(ProcessBound):
    """An optimizer for the modules of other processes, which runs there. Make it with `create`."""

    _elsewhere = "the other process makes one of its own with RemoteOptimizer.create()"

    def __init__(self, modules: Sequence[RemoteModule]) -> None:
        self._modules = list(modules)

    @classmethod
    async def create(
        cls, optimizer: type[torch.optim.Optimizer] | str, modules: Sequence[RemoteModule], **settings: Any
    ) -> RemoteOptimizer:
        """Make an optimizer at the owner of each module.

        Args:
            optimizer: An optimizer of `torch.optim`, or its name.
            modules: The modules.
            settings: Arguments of the optimizer, such as ``lr``.

        Raises:
            RemoteError: There is no such optimizer, or it does not take these settings.
            UsageError: It is not one of `torch.optim`.
        """
        name = optimizer if isinstance(optimizer, str) else optimizer.__name__
        if not isinstance(optimizer, str) and getattr(torch.optim, name, None) is not optimizer:
            raise UsageError(f"the owner of a module makes optimizers of torch.optim, and {name} is none")
        await asyncio.gather(*[module._use.call("make_optimizer", name, settings) for module in modules])
        return cls(modules)

    async def step(self, *, timeout: Timeout = None) -> None:
        """Update the parameters of all modules by the gradients of this process, and clear these."""
        await asyncio.gather(*[module.step(timeout=timeout) for module in self._modules])

    async def zero_grad(self, *, timeout: Timeout = None) -> None:
        """Clear the gradients of this process at all owners."""
        await asyncio.gather(*[module.zero_grad(timeout=timeout) for module in self._modules])


async def backward(loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """Compute gradients, as ``loss.backward(gradient)`` does, through modules of other processes too.

    It runs in a thread, because autograd waits there for the owners of the modules. A caller that is cancelled does not end
    it.

    Args:
        loss: The tensor to differentiate.
        gradient: The gradient of ``loss``; None for a scalar.

    Raises:
        CallError: The backward of a remote module failed.
    """
    future = start_daemon_thread(lambda: loss.backward(gradient), "asyncdist-backward")
    await asyncio.wrap_future(future)


class _RemoteBackward(torch.autograd.Function):
    """Puts the output of a remote module into the graph of the trainer; ``owner`` has the rest of that graph."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: tuple[RemoteReference, RemoteReference, asyncio.AbstractEventLoop],
        outputs: list[torch.Tensor],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.owner = owner
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        use, graph, loop = ctx.owner
        if asyncio._get_running_loop() is loop:
            raise LoopThreadError("backward through a remote module (await rpc.backward(loss) instead)")
        found: list[torch.Tensor | None] = result_on(loop, use.call("backward", graph, list(gradients)))
        return None, None, None, *found
