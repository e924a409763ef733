"""Copies of a subscriber's model show what is published, whatever kind of module it is, or are refused."""

import warnings

import pytest
import torch
from torch import nn

from asyncdist.errors import UsageError
from asyncdist.weights import Publisher, Subscriber

LIMIT = 60.0


def layer(value=0.0):
    made = nn.Linear(2, 1, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def scripted(value=0.0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(layer(value))


class Holding(nn.Module):
    """A module with a layer, and buffers of which one is not in the state dict."""

    def __init__(self, inner, table=1.0):
        super().__init__()
        self.inner = inner
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("table", torch.full((1,), table), persistent=False)

    def forward(self, x):
        return self.inner(x) * self.table + self.kept


class CopyingItself(Holding):
    def __deepcopy__(self, memo):
        return CopyingItself(layer(), self.table.item())


class Uncopied(Holding):
    def __deepcopy__(self, memo):
        return self


class Known(Holding):
    copied = None

    def __deepcopy__(self, memo):
        Known.copied = Known.copied or Known(layer())
        return Known.copied


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (layer, 10.0),
        (scripted, 10.0),
        (lambda value=0.0: Holding(scripted(value)), 10.0),
        (lambda value=0.0: CopyingItself(layer(value)), 10.0),
        (lambda value=0.0: Holding(layer(value)), 10.0),
    ],
    ids=["plain", "TorchScript", "holds TorchScript", "deepcopy of its own", "with buffers"],
)
async def test_copies_of_any_kind_of_module_show_the_published_values(job, make, expected):
    source, like = make(), make()
    async with Publisher(source, job=job) as publisher, Subscriber(like=like, job=job) as subscriber:
        for factor in (1, 2, 3):
            with torch.no_grad():
                next(source.parameters()).fill_(5.0 * factor)
            await publisher.publish()
            async with subscriber.swap(await subscriber.next(LIMIT)):
                pass
            with subscriber.reading() as (model, _), torch.no_grad():
                assert model(torch.ones(1, 2)).item() == expected * factor
        assert next(like.parameters()).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Uncopied(layer()), r"does not copy (kept|inner\.weight): change the __deepcopy__"),
        (lambda: Known(layer()), "copies of the model share tensors"),
        (
            lambda: nn.Sequential(Holding(layer())).to("meta"),
            r"0\.table is on the meta device and not in the state dict .*on the CPU",
        ),
    ],
)
async def test_model_whose_copies_cannot_show_a_version_is_refused(job, make, words):
    with pytest.raises(UsageError, match=words):
        Subscriber(like=make(), job=job)


async def test_model_on_the_meta_device_keeps_the_values_that_do_not_travel(job):
    like = Holding(layer()).to("meta")
    like.table = torch.full((1,), 3.0)
    source = Holding(layer(5.0), table=7.0)
    async with Publisher(source, job=job) as publisher, Subscriber(like=like, job=job) as subscriber:
        await publisher.publish()
        async with subscriber.swap(await subscriber.next(LIMIT)) as model:
            assert model(torch.ones(1, 2)).item() == 30.0


def replace_parameter(model):
    model.inner.weight = nn.Parameter(torch.ones(1, 2))


def assign_state(model):
    model.load_state_dict({name: torch.ones_like(each) for name, each in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    ("replace", "name"), [(replace_parameter, "inner.weight"), (assign_state, r"(inner\.weight|kept)")]
)
async def test_tensor_of_a_copy_that_the_program_replaces_is_named(job, replace, name):
    source = Holding(layer(5.0))
    async with Publisher(source, job=job) as publisher, Subscriber(like=Holding(layer()), job=job) as subscriber:
        await publisher.publish()
        async with subscriber.swap(await subscriber.next(LIMIT)) as first:
            replace(first)
        await publisher.publish()
        async with subscriber.swap(await subscriber.next(LIMIT)):
            pass
        await publisher.publish()
        version = await subscriber.next(LIMIT)
        with pytest.raises(UsageError, match=f"replaced {name} of a copy"):
            async with subscriber.swap(version):
                pass
