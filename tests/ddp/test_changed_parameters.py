"""Parameters that a program freezes, swaps or replaces after the model was wrapped: averaged, or refused by name."""

import pytest
import torch
from torch import nn

from asyncdist.ddp import DistributedDataParallel, hooks
from asyncdist.errors import GradientError, UsageError
from tests.support.pairs import each_pair
from tests.support.ranks import on_ranks

AVERAGE = 1.5
"""The gradient of `Layers` on two ranks."""


class Layers(nn.Module):
    """Layers of one weight each. Every gradient is the rank plus 1."""

    def __init__(self, count=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))
        self.wrap = lambda output: output

    def forward(self, x):
        return self.wrap(sum(layer(x) for layer in self.layers))


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


def step(model, group):
    model.zero_grad()
    output = model(torch.full((1, 1), group.rank() + 1.0, dtype=next(model.parameters()).dtype))
    (output.tensor if isinstance(output, Opaque) else output).sum().backward()
    return [None if each.grad is None else each.grad.item() for each in model.parameters()]


def swap(parameter, **how):
    torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros(1, 1), **how))


OPTIONS = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": False}]


@each_pair(options=OPTIONS, which=[[0], [0, 1, 2]], size=[2, 1], wrap=[lambda output: output, Opaque])
def test_swapped_parameters_are_averaged(together, options, which, size, wrap):
    def rank(group):
        module = Layers()
        module.wrap = wrap
        model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=1e-6, **options)
        found = [step(model, group)]
        for _ in range(2):
            for _ in range(3):
                for index in which:
                    swap(module.layers[index].weight)
            found += [step(model, group), step(model, group)]
        return found

    assert together(size, rank) == [[[(size + 1) / 2] * 3] * 5] * size


@on_ranks(2)
def test_tensor_that_got_the_former_content_of_a_parameter_is_not_averaged(group):
    model, other = DistributedDataParallel(Layers(), process_group=group), Layers()
    found = []
    for _ in range(2):
        torch.utils.swap_tensors(model.module.layers[0].weight, other.layers[0].weight)
        found += [step(model, group), step(other, group)]
    assert found == [[AVERAGE] * 3, [group.rank() + 1.0] * 3] * 2


@on_ranks(2)
def test_hook_of_the_user_stays_with_a_swapped_parameter(group):
    def double(parameter):
        parameter.grad.mul_(2)

    model = DistributedDataParallel(Layers(), process_group=group)
    model.module.layers[0].weight.register_post_accumulate_grad_hook(double)
    swap(model.module.layers[0].weight)
    assert step(model, group) == [2 * AVERAGE, AVERAGE, AVERAGE]


@pytest.fixture
def modules_swap():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("modules_swap")
@on_ranks(2)
def test_modules_that_swap_their_parameters_are_loaded_and_cast_after_wrapping(group):
    model = DistributedDataParallel(Layers(), process_group=group)
    found = [step(model, group)]
    model.load_state_dict({name: torch.ones(1, 1) for name in model.state_dict()})
    found.append(step(model, group))
    model.double()
    found.append(step(model, group))
    assert (found, next(model.parameters()).grad.dtype) == ([[AVERAGE] * 3] * 3, torch.float64)


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_generator_is_averaged_while_its_discriminator_is_frozen(group, options):
    generator, discriminator = (DistributedDataParallel(Layers(), process_group=group, **options) for _ in range(2))
    found = []
    for _ in range(3):
        discriminator.requires_grad_(False)
        generator.zero_grad()
        discriminator(generator(torch.full((1, 1), group.rank() + 1.0))).sum().backward()
        slope = sum(each.item() for each in discriminator.parameters())
        found += [each.grad.item() / slope for each in generator.parameters()]
        discriminator.requires_grad_(True)
        found += step(discriminator, group)
    assert found == pytest.approx([AVERAGE] * 18)


@on_ranks(2)
def test_hook_that_is_registered_while_the_model_is_frozen_runs_later(group):
    model = DistributedDataParallel(Layers(), process_group=group)
    model.requires_grad_(False)
    model.register_async_comm_hook(hooks.average)
    model.requires_grad_(True)
    assert [step(model, group), step(model, group)] == [[AVERAGE] * 3] * 2


@on_ranks(2)
def test_frozen_parameter_is_named_or_counts_as_unused(group):
    strict = DistributedDataParallel(Layers(), process_group=group)
    strict.module.layers[1].requires_grad_(False)
    with pytest.raises(GradientError, match=r"no gradient to 'layers\.1\.weight' on rank 0, 1"):
        step(strict, group)
    lenient = DistributedDataParallel(Layers(), process_group=group, find_unused_parameters=True)
    lenient.module.layers[1].requires_grad_(False)
    found = [step(lenient, group)]
    lenient.requires_grad_(True)
    assert [*found, step(lenient, group)] == [[AVERAGE, None, AVERAGE], [AVERAGE] * 3]


@on_ranks(2)
def test_gradients_that_are_taken_away_from_a_partly_frozen_model_are_named(group):
    model = DistributedDataParallel(Layers(), process_group=group)
    model.module.layers[1].requires_grad_(False)
    loss = model(torch.ones(1, 1)).sum()
    with pytest.raises(GradientError, match=r"computed gradients of 'layers\.0\.weight', which are this rank's own"):
        torch.autograd.grad(loss, [model.module.layers[0].weight])


def replace_in_dictionaries(module, which):
    for index in which:
        module.layers[index]._parameters["weight"] = nn.Parameter(torch.ones(1, 1))


def replace_layers_in_dictionaries(module, which):
    for index in which:
        module.layers._modules[str(index)] = nn.Linear(1, 1, bias=False)


@pytest.mark.parametrize(
    ("replace", "unused", "which"),
    [
        (replace_in_dictionaries, False, [0, 1, 2]),
        (replace_in_dictionaries, True, [0, 1, 2]),
        (replace_in_dictionaries, True, [1]),
        (replace_layers_in_dictionaries, False, [0, 1, 2]),
        (replace_layers_in_dictionaries, True, [0, 1, 2]),
    ],
)
@on_ranks(2)
def test_parameters_replaced_behind_the_back_of_torch_are_named(group, replace, unused, which):
    model = DistributedDataParallel(Layers(), process_group=group, find_unused_parameters=unused)
    step(model, group)
    replace(model.module, which)
    with pytest.raises(UsageError, match=rf"'layers\.{which[0]}\.weight' was added or replaced after"):
        step(model, group)


@on_ranks(2)
def test_parameters_whose_hooks_were_removed_are_named(group):
    model = DistributedDataParallel(Layers(), process_group=group)
    for parameter in model.parameters():
        parameter._post_accumulate_grad_hooks.clear()
    with pytest.raises(GradientError, match=r"hooks .* of 'layers\.0\.weight', 'layers\.1\.weight', .* been removed"):
        step(model, group)
