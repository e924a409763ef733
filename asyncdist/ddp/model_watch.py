"""Notices parameters that a model gets later, which would be trained by each rank alone.

`module` and `low_communication` use it.

torch calls a function for each parameter, buffer and submodule that any module of the process registers. It only marks the
wrapped models that contain the module, so a step of a model with many modules does not search them.
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from asyncdist.base.lifecycle import WeakRegistry
from asyncdist.errors import UsageError

_watches: weakref.WeakKeyDictionary[nn.Module, WeakRegistry[ModelWatch]] = weakref.WeakKeyDictionary()


class ModelWatch:
    """The parameters that a model had when it was wrapped, but for those that are ``ignored``.

    Errors say ``since`` when these parameters are fixed, and which ``remedy`` there is for another one.
    """

    def __init__(
        self,
        module: nn.Module,
        ignored: frozenset[str] = frozenset(),
        *,
        since: str = "the model was wrapped",
        remedy: str = "wrap the model after all changes",
    ) -> None:
        _install()
        self._ignored, self._since, self._remedy = ignored, since, remedy
        # References, so that no later parameter gets the address of one of these.
        self._known = set(module.parameters())
        self._frozen = [
            item for item in module.named_parameters() if not item[1].requires_grad and item[0] not in ignored
        ]
        self._first_buffers = {name for name, _ in module.named_buffers()}
        self._buffers: list[tuple[str, nn.Module, str]] | None = None
        """The name of each buffer in the model, its module, and its name there; None if they may have changed."""
        self._watch(module)
        self._may_have_changed = False

    def _watch(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        for each in module.modules():
            _watches.setdefault(each, WeakRegistry()).add(self)
        self.note()

    def note(self) -> None:
        """Record that a module of the model has registered a parameter or a submodule."""
        self._may_have_changed = True
        self._buffers = None

    def note_buffer(self) -> None:
        """Record that a module of the model has registered a buffer that it did not have."""
        self._buffers = None

    def buffers(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return the present buffers of ``module`` that are not ignored: a forward or a cast may have replaced them."""
        if self._buffers is None:
            found = [
                (name, *name.rpartition(".")[::2]) for name, _ in module.named_buffers() if name not in self._ignored
            ]
            self._buffers = [(name, module.get_submodule(owner), own) for name, owner, own in found]
        present = [(name, owner._buffers.get(own)) for name, owner, own in self._buffers]
        return [(name, buffer) for name, buffer in present if buffer is not None]

    def added_buffers(self) -> list[str]:
        """Return the names of the buffers that the model did not have when it was wrapped."""
        return [name for name, _, _ in self._buffers or () if name not in self._first_buffers]

    def check_again(self) -> None:
        """Do the same as `check` also if no module has registered a parameter: programs may change a module's dicts."""
        self._may_have_changed = True
        module = self._module()
        if module is not None:
            self.check(module)

    def check(self, module: nn.Module) -> None:
        """Raise UsageError, naming the parameter, if ``module`` trains parameters that are not averaged."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name!r} required no gradient when {self._since}, so ranks do not average it: "
                    f"{self._remedy}"
                )
        if module is not self._module():
            self._watch(module)
        if not self._may_have_changed:
            return
        for name, parameter in module.named_parameters():
            if parameter not in self._known and parameter.requires_grad and name not in self._ignored:
                raise UsageError(
                    f"parameter {name!r} was added or replaced after {self._since}, so ranks do not average it: "
                    f"{self._remedy}"
                )
        self._may_have_changed = False


def _of(module: nn.Module) -> list[ModelWatch]:
    watches = _watches.get(module)
    return [] if watches is None else watches.living()


@functools.cache
def _install() -> None:
    def note(module: nn.Module, _name: str, _registered: object) -> None:
        for watch in _of(module):
            watch.note()

    def note_buffer(module: nn.Module, name: str, _registered: object) -> None:
        if name not in module._buffers:
            for watch in _of(module):
                watch.note_buffer()

    torch_modules.register_module_parameter_registration_hook(note)
    torch_modules.register_module_module_registration_hook(note)
    torch_modules.register_module_buffer_registration_hook(note_buffer)
