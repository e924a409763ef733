"""Functions of torch that are replaced: once, with name and signature kept."""

import inspect

from torch.nn.parallel import DistributedDataParallel

from asyncdist.torch_backend import patches


def test_patched_function_keeps_name_and_signature_and_is_patched_once():
    replaced = DistributedDataParallel._register_builtin_comm_hook
    assert replaced.__name__ == "_register_builtin_comm_hook"
    assert [*inspect.signature(replaced).parameters] == ["self", "comm_hook_type"]
    patches.apply_patches()
    assert DistributedDataParallel._register_builtin_comm_hook is replaced
