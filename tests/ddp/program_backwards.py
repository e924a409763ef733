"""Run by test_backwards.py: which backwards average, in torch's DDP over gloo and over asyncdist, and in asyncdist's."""

import inspect
from datetime import timedelta
from functools import partial

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import asyncdist.torch_backend  # noqa: F401 - registers the back end
from asyncdist.ddp import DistributedDataParallel, direct_gradients


class Layers(nn.Module):
    """Two layers of one weight each, both 1: every gradient is the input, here the rank plus 1."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        self.reentrant = False
        self.wrap = lambda output: output
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x):
        hidden = self.layers[0](x)
        hidden = checkpoint(self.layers[1], hidden, use_reentrant=True) if self.reentrant else self.layers[1](hidden)
        return self.wrap(hidden)


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class Case:
    """A wrapped model and the gradients that its backwards leave."""

    def __init__(self, rank, kind, **arguments):
        self.rank = rank
        self.x = torch.full((2, 1), (rank + 1) / 2)
        self.module = Layers()
        self.wrapped = partial(kind, **arguments)
        self.model = self.wrapped(self.module)
        self.seen = []

    def see(self, loss, **how):
        """Clear the gradients, run a backward and record the new gradients."""
        self.module.zero_grad()
        self.more(loss, **how)

    def more(self, loss, **how):
        loss.backward(**how)
        self.seen.append([parameter.grad.item() for parameter in self.module.parameters()])

    def step(self):
        self.see(self.model(self.x).sum())

    def bypass(self):
        self.see(self.module(self.x).sum())


def bypasses_after_steps(case):
    for _ in range(2):
        case.step()
        case.bypass()


def bypass_before_the_first_forward(case):
    case.bypass()
    case.step()


def bypass_on_one_rank(case):
    for _ in range(2):
        case.step()
        if case.rank == 0:
            case.see(100 * case.module(case.x).sum())
    case.step()


def bypass_of_one_layer(case):
    case.step()
    case.module.zero_grad()
    case.module.layers[1](case.x).sum().backward()
    case.seen.append(case.module.layers[1].weight.grad.item())
    case.step()


def bypass_on_top_of_averages(case):
    case.step()
    case.more(case.module(case.x).sum())
    case.more(case.model(case.x).sum())


def bypass_after_evaluation(case):
    case.step()
    with torch.no_grad():
        case.model.eval()(case.x)
    case.bypass()


def bypass_after_an_output_thrown_away(case):
    case.step()
    case.model(case.x)
    case.bypass()
    case.bypass()


def bypass_after_an_output_without_gradients(case):
    case.step()
    case.module.wrap = torch.Tensor.detach
    case.model(case.x)
    case.module.wrap = lambda output: output
    case.bypass()


def evaluation_between_forward_and_backward(case):
    loss = case.model(case.x).sum()
    with torch.no_grad():
        case.model(case.x)
    case.see(loss)
    case.bypass()


def outputs_that_hide_their_tensors(case):
    case.module.wrap = Opaque
    for _ in range(2):
        case.see(case.model(case.x).tensor.sum())
        case.see(case.module(case.x).tensor.sum())


def outputs_that_nest_or_hide_some_tensors(case):
    for wrap in (lambda output: {"logits": [output]}, lambda output: {"logits": [output], "hidden": Opaque(output)}):
        case.module.wrap = wrap
        case.see(case.model(case.x)["logits"][0].sum())
        case.see(case.module(case.x)["logits"][0].sum())


def two_forwards_one_backward(case):
    for _ in range(2):
        case.see(case.model(case.x).sum() + case.model(case.x).sum())
        case.bypass()


def wrapped_and_bypassing_in_one_backward(case):
    for _ in range(2):
        case.see(case.model(case.x).sum() + case.module(case.x).sum())
        case.bypass()


def reentrant_checkpoints(case):
    case.module.reentrant = True
    for _ in range(2):
        case.step()
        case.bypass()


def accumulation(case):
    for _ in range(2):
        with case.model.no_sync():
            case.step()
            case.more(case.model(case.x).sum())
            case.more(case.module(case.x).sum())
        case.more(case.model(case.x).sum())
        case.bypass()


def backward_inside_no_sync_of_a_forward_outside(case):
    loss = case.model(case.x).sum()
    with case.model.no_sync():
        case.see(loss)
    case.bypass()


def forwards_outside_and_inside_no_sync_in_one_backward(case):
    loss = case.model(case.x).sum()
    with case.model.no_sync():
        inside = case.model(case.x).sum()
    case.see(loss + inside)
    case.bypass()


def gradients_taken_away(case):
    for _ in range(2):
        loss = case.model(case.x).sum()
        taken = torch.autograd.grad(loss, list(case.module.parameters()), retain_graph=True)
        case.seen.append([each.item() for each in taken])
        case.see(loss)
        case.bypass()


def hooks_of_gradients(case):
    for parameter in case.module.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    for _ in range(2):
        case.step()
        case.bypass()


def frozen_for_the_step_of_another_model(case):
    """The steps of a generator, whose discriminator is frozen for them, and of the discriminator."""
    discriminator = case.wrapped(Layers())
    for _ in range(2):
        discriminator.requires_grad_(False)
        case.see(discriminator(case.model(case.x)).sum())
        discriminator.requires_grad_(True)
        discriminator.zero_grad()
        discriminator(case.x).sum().backward()
        case.seen.append([parameter.grad.item() for parameter in discriminator.parameters()])


def frozen_while_its_inputs_are_trained(case):
    case.step()
    case.model.requires_grad_(False)
    attack = case.x.clone().requires_grad_()
    case.model(attack).sum().backward()
    case.seen.append(attack.grad.flatten().tolist())
    case.model.requires_grad_(True)
    case.step()
    case.bypass()


def join(case):
    with case.model.join():
        for _ in range(case.rank + 1):
            case.step()
            case.bypass()
    case.bypass()
    case.step()


def a_backward_that_raises_before_its_first_gradient(case):
    case.step()
    output = case.model(case.x)
    output.register_hook(fail)
    try:
        output.sum().backward()
    except ArithmeticError:
        case.bypass()
        case.bypass()
        case.step()


def fail(_):
    raise ArithmeticError


def checkpoints_of_the_whole(case):
    """torch's DDP warns that it supports only one such checkpoint at a time, so it does not run this case."""
    if isinstance(case.model, DistributedDataParallel):
        for _ in range(2):
            losses = [checkpoint(case.model, case.x, use_reentrant=False).sum() for _ in range(2)]
            for loss in losses:
                case.see(loss)
            case.bypass()


def two_backwards_of_one_forward(case):
    loss = case.model(case.x).sum()
    case.see(loss, retain_graph=True)
    case.see(loss)
    case.bypass()


def two_forwards_two_backwards(case):
    losses = [case.model(case.x).sum() for _ in range(2)]
    for loss in losses:
        case.see(loss)
    case.bypass()


def no_sync_after_an_output_thrown_away(case):
    case.model(case.x)
    with case.model.no_sync():
        case.step()


CASES = [
    name
    for name, value in list(globals().items())
    if inspect.isfunction(value) and [*inspect.signature(value).parameters] == ["case"]
]


def compare(test, rank, world_size, where):
    """Send the gradients that all three recorded in each case."""
    torch.set_num_threads(1)
    direct_gradients.LEAST_NBYTES = 0
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
    group = torch.distributed.new_group(backend="asyncdist", timeout=timedelta(seconds=60))
    for name in test.recv():
        over_gloo = Case(rank, TorchDDP, gradient_as_bucket_view=True)
        over_asyncdist = Case(rank, TorchDDP, gradient_as_bucket_view=True, process_group=group)
        ours = Case(rank, DistributedDataParallel, process_group=group)
        for case in (over_gloo, over_asyncdist, ours):
            globals()[name](case)
        test.send((over_gloo.seen, over_asyncdist.seen, ours.seen))
    torch.distributed.destroy_process_group()
