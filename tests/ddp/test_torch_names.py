"""Arguments, methods and attributes of torch's class beyond training steps."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from asyncdist.ddp import DistributedDataParallel
from asyncdist.errors import UsageError
from tests.support.ranks import on_ranks


def wrapped(group, **arguments):
    """Wrap a module of four parameters and three buffers."""
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), process_group=group, **arguments)


@on_ranks(1)
def test_names_that_only_torchs_class_has_say_what_to_use_instead(group):
    model = wrapped(group)
    with pytest.raises(AttributeError, match="no 'reducer': the averages of the last step are described by last_step"):
        _ = model.reducer
    with pytest.raises(AttributeError, match="no '_match_all_reduce_for_bwd_pass', only torch's has"):
        model._match_all_reduce_for_bwd_pass()
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = model.nonsense
    assert not hasattr(model, "logger")


@on_ranks(1)
def test_public_names_of_torchs_class_exist_or_are_explained(group):
    model = wrapped(group)
    names = [name for name in dir(TorchDDP) if not name.startswith("_")]
    names += ["device", "device_ids", "device_type", "dim", "find_unused_parameters", "forward_sync_buffers", "logger",
              "gradient_as_bucket_view", "is_multi_device_module", "mixed_precision", "modules_buffers", "reducer",
              "named_module_buffers", "output_device", "parameters_to_ignore", "process_group", "static_graph",
              "require_backward_grad_sync", "require_forward_param_sync", "skip_all_reduce_unused_params",
              "bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default", "broadcast_bucket_size",
              "batched_grad_copy", "broadcast_buffers", "use_side_stream_for_tensor_copies"]  # fmt: skip
    with pytest.raises(UsageError, match=r"torch's Join needs .*with model.join\(\)"):
        _ = model.join_process_group
    lacking = {name for name in names if name != "join_process_group" and not hasattr(model, name)}
    for name in lacking:
        with pytest.raises(AttributeError, match=f"asyncdist's DistributedDataParallel has no '{name}': "):
            getattr(model, name)
    assert lacking == {"logger", "reducer"}


@on_ranks(1)
def test_attributes_of_torchs_class_describe_the_model(group):
    model = wrapped(group)
    assert model.bucket_bytes_cap == model.bucket_bytes_cap_list[-1] == 25 << 20
    assert model.bucket_bytes_cap_default
    assert not model.use_side_stream_for_tensor_copies
    assert not model.is_multi_device_module
    other = wrapped(group, bucket_cap_mb=2)
    assert other.bucket_bytes_cap_list == [1 << 20, 2 << 20]
    assert not other.bucket_bytes_cap_default


@on_ranks(2)
def test_default_size_of_buckets_follows_the_link(group):
    group.context = replace(group.context, model=replace(group.context.model, beta=8e-9))
    made = [DistributedDataParallel(nn.Linear(2, 2), process_group=group, bucket_cap_mb=cap) for cap in (None, 25)]
    assert [(model.bucket_bytes_cap_list, model.bucket_bytes_cap_default) for model in made] == [
        ([1 << 20, 2 << 20], True),
        ([1 << 20, 25 << 20], False),
    ]


def test_constructor_takes_the_arguments_of_torch_in_torchs_order():
    ours = list(inspect.signature(DistributedDataParallel.__init__).parameters)
    torchs = list(inspect.signature(TorchDDP.__init__).parameters)  # of what a decorator wraps
    assert ours[: len(torchs)] == torchs


@on_ranks(1)
def test_buffers_are_described_and_their_hook_replaces_the_broadcast(group):
    calls = []

    def hook(state, buffers):
        calls.append((state, sorted(buffers)))
        future = torch.futures.Future()
        future.set_result(None)
        return [future]

    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), process_group=group)
    assert model.will_sync_module_buffers()
    assert sorted(model.named_module_buffers) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert len(model.modules_buffers) == 3
    with pytest.raises(UsageError, match="comm_hook_location is"):
        model._register_buffer_comm_hook(None, hook, "SOMETIMES")
    model._register_buffer_comm_hook("state", hook)
    for _ in range(2):
        model(torch.randn(4, 2)).sum().backward()
    with torch.no_grad():
        model(torch.randn(4, 2))
    assert not model.will_sync_module_buffers()
    assert calls == [("state", ["1.num_batches_tracked", "1.running_mean", "1.running_var"])] * 3


@on_ranks(1)
def test_logging_data_describes_model_and_steps(group):
    model = wrapped(group)
    data = model._get_ddp_logging_data
    before = data()
    assert before["module_name"] == "Sequential"
    assert before["world_size"] == 1
    assert before["num_parameter_tensors"] == 4
    assert "backward_comm_time" not in before
    model(torch.randn(4, 2)).sum().backward()
    model._check_reducer_finalized()
    after = data()
    assert after["backward_comm_time"] > 0
    assert after["has_rebuilt_buckets"] == 1


@on_ranks(2)
def test_group_may_be_replaced_between_steps(group):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    model(torch.full((1, 1), group.rank() + 1.0)).sum().backward()
    model._update_process_group(group._sibling("another"))
    model.zero_grad()
    model(torch.full((1, 1), group.rank() + 1.0)).sum().backward()
    found = model.module.weight.grad.item()
    model._remove_autograd_hooks()
    model.zero_grad()
    model(torch.full((1, 1), group.rank() + 1.0)).sum().backward()
    assert (found, model.module.weight.grad.item()) == [(1.5, 1.0), (1.5, 2.0)][group.rank()]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("attached", ["before wrapping", "before the first forward", "between forwards"])
@on_ranks(2)
def test_optimizer_in_backward_steps_with_the_averages(group, attached, as_view):
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1)

    def attach():
        _apply_optimizer_in_backward(torch.optim.SGD, module[1].parameters(), {"lr": 0.25})

    if attached == "before wrapping":
        attach()
    model = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=as_view)
    if attached == "before the first forward":
        attach()
    x = torch.full((1, 1), group.rank() + 1.0)
    if attached == "between forwards":
        model(x).sum().backward()
        model.zero_grad()
        attach()
    with model.no_sync():
        model(x).sum().backward()
    assert module[1].weight.item() == 1
    model(x).sum().backward()
    assert (module[0].weight.grad.item(), module[1].weight.grad, module[1].weight.item()) == (3.0, None, 0.25)
