"""The private names of torch.distributed that this package uses. See `torch_private` for all others, and for the rules.

Names are looked up on first use: a build of torch may lack torch.distributed, and some of its modules take long to import.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

NAMES: dict[str, str] = {
    # The module of torch's functions and of the state that they share.
    "distributed_c10d": "torch.distributed.distributed_c10d",
    # The store of the default group, through which a second world meets.
    "get_default_store": "torch.distributed.distributed_c10d:_get_default_store",
    # A group by the name by which compiled programs know it.
    "resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    # Where ``init_method="asyncdist://"`` is added; `register_rendezvous_handler` refuses to do it twice.
    "rendezvous_handlers": "torch.distributed.rendezvous:_rendezvous_handlers",
    # The bindings of C++ classes that torch.distributed does not export, or only in part.
    "bindings": "torch._C._distributed_c10d",
    "Backend": "torch._C._distributed_c10d:Backend",
    "BuiltinCommHookType": "torch._C._distributed_c10d:BuiltinCommHookType",
    "ErrorType": "torch._C._distributed_c10d:ErrorType",
    "OpType": "torch._C._distributed_c10d:OpType",
    "Reducer": "torch._C._distributed_c10d:Reducer",
    # Registers a hook of Python with DDP's reducer.
    "register_comm_hook": "torch._C._distributed_c10d:_register_comm_hook",
    # Lets ``wait_tensor`` find the Work of a tensor.
    "register_work": "torch._C._distributed_c10d:_register_work",
    # Functions of torch's debug server.
    "get_handler_names": "torch._C._distributed_c10d:_get_handler_names",
    "register_handler": "torch._C._distributed_c10d:_register_handler",
    # Importing it defines the operators ``_c10d_functional``.
    "functional_collectives": "torch.distributed._functional_collectives",
    # What torch's context `Join` reads of a participant before it was entered.
    "JoinConfig": "torch.distributed.algorithms.join:_JoinConfig",
    # What a tab of the debug server derives from, and is made of.
    "default_handlers": "torch.distributed.debug._debug_handlers:default_handlers",
    "DebugHandler": "torch.distributed.debug._frontend:DebugHandler",
    "NavLink": "torch.distributed.debug._frontend:NavLink",
    "Route": "torch.distributed.debug._frontend:Route",
    "fetch_all": "torch.distributed.debug._frontend:fetch_all",
}
"""Names of this module, with torch's module and the name there; they are in torch 2.13 to 2.15."""

OPTIONAL_NAMES: dict[str, str] = {
    # From torch 2.14 on: hooks that see the operations of a group.
    "FlightRecorderHook": "torch._C._distributed_c10d:FlightRecorderHook",
    "NanCheckHook": "torch._C._distributed_c10d:NanCheckHook",
    # From torch 2.15 on: writes torch's flight recorder into a file.
    "dump_fr_trace_file": "torch._C._distributed_c10d:_dump_fr_trace_file",
    # The name of operations in profiles, which `record_comm` sets for a block; some builds lack torch.distributed.
    "get_comm_profiling_name": "torch._C._distributed_c10d:_get_comm_profiling_name",
    # From torch 2.15 on: what a one-sided transport derives from.
    "Transport": "torch.distributed._transport:Transport",
    # An interface of torch that only some builds have.
    "dist2": "torch.distributed._dist2",
}
"""Names that some of these releases lack; there they are None."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "torch.distributed.Backend": ("_plugins",),
    "torch.distributed.ProcessGroup": (
        "_device_types", "_end_coalescing", "_get_backend", "_get_sequence_number_for_group", "_register_backend",
        "_register_on_completion_hook", "_set_default_backend", "_set_group_desc",
        "_set_group_name", "_start_coalescing",
    ),
    "torch.distributed.Work": ("_source_rank",),
    "torch.distributed.Logger": ("_set_comm_hook_name",),
    "torch.distributed.device_mesh.DeviceMesh": ("_get_root_mesh",),
    "torch.distributed.rpc": ("_is_current_rpc_agent_set",),
    "torch.distributed.autograd": ("_current_context",),
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler": (
        "_bootstrap_store_info", "_shared_tcp_store_server",
    ),
    "torch.distributed.algorithms.join.Join": ("_join_config",),
    "torch.nn.parallel.DistributedDataParallel": ("_ddp_params_and_buffers_to_ignore", "_ddp_ignored"),
}  # fmt: skip
"""As `torch_private.ATTRIBUTES`."""

OPTIONAL_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    # The first one from torch 2.14 on, the second one before torch 2.15.
    "torch.distributed.distributed_c10d": ("_FR_SELF_RECORDING_BACKENDS", "_set_default_timeout"),
    "torch.distributed._dist2": ("_BACKENDS",),
}
"""Those that some of these releases lack."""


def __getattr__(name: str) -> Any:
    if name in OPTIONAL_NAMES:
        try:
            value = _look_up(OPTIONAL_NAMES[name])
        except (ImportError, AttributeError):
            value = None
    elif name in NAMES:
        value = _look_up(NAMES[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _look_up(place: str) -> Any:
    module, _, name = place.partition(":")
    # The module of the bindings cannot be imported before torch.distributed.
    found = sys.modules.get(module) or importlib.import_module(module)
    return getattr(found, name) if name else found


def is_in_distributed_autograd() -> bool:
    """Return whether the thread is inside a context of `torch.distributed.autograd`."""
    rpc = sys.modules.get("torch.distributed.rpc")
    # Without remote calls of torch there is no context.
    if rpc is None or not rpc.is_available() or not rpc._is_current_rpc_agent_set():
        return False
    # torch raises RuntimeError outside a context.
    try:
        sys.modules["torch.distributed.autograd"]._current_context()
    except RuntimeError:
        return False
    return True
