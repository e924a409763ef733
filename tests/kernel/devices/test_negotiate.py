"""Negotiation of the device backend, and the registry of backends."""

import asyncio
import logging

import pytest
import torch

from asyncdist.errors import OperationTimeoutError, TransportUnavailableError
from asyncdist.kernel.transport import registry
from tests.support.devices import PretendStaged, devices_of

made = []


class Fancy(PretendStaged):
    """A backend that behaves on each rank as the rank's ``plan`` says."""

    name = "fancy"
    plans: tuple[str, ...] = ()

    def __init__(self, context):
        super().__init__(context)
        self.plan = self.plans[context.rank]
        self.closed = 0
        made.append(self)
        if self.plan == "cannot be made":
            raise RuntimeError("no driver")

    def capabilities(self):
        if self.plan == "has no capabilities":
            raise ValueError("no handle")
        return {"generation": 2 if self.plan == "is newer" else 1}

    def refusal(self, all_capabilities):
        odd = [rank for rank, capabilities in enumerate(all_capabilities) if capabilities["generation"] != 1]
        return f"rank {odd[0]} is newer" if odd else None

    def start(self, all_capabilities):
        if self.plan == "does not open":
            raise TransportUnavailableError("no peer access")
        if self.plan == "fails to open":
            raise RuntimeError("no peer access")

    def close(self):
        self.closed += 1


@pytest.fixture(autouse=True)
def _made_anew():
    made.clear()
    yield
    made.clear()


@pytest.mark.parametrize(
    ("plans", "way", "words"),
    [
        (("", "", ""), "fancy", ""),
        (("", "cannot be made", ""), "staged", "not fancy: rank 1: RuntimeError: no driver"),
        (("", "", "has no capabilities"), "staged", "not fancy: rank 2: ValueError: no handle"),
        (("is newer", "", ""), "staged", "not fancy: rank 0 is newer"),
        (("", "does not open", ""), "staged", "not fancy: rank 1: no peer access"),
        (("", "fails to open", ""), "staged", "not fancy: rank 1: no peer access"),
        (("does not open", "has no capabilities", "is newer"), "staged", "not fancy: rank 1: ValueError: no handle"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
async def test_all_ranks_choose_the_same_backend(plans, way, words, caplog, eventually):
    caplog.set_level(logging.INFO, "asyncdist")
    kind = type("Planned", (Fancy,), {"plans": plans})
    async with devices_of(3, [kind]) as groups:
        tensors = [torch.ones(4) for _ in groups]
        await asyncio.gather(*(group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)))
        assert all(torch.equal(tensor, torch.full((4,), 3.0)) for tensor in tensors)
        assert [group.backend for group in groups] == [way] * 3
        told = [record.message for record in caplog.records if "tensors by" in record.message]
        assert len(told) == 3
        assert all(words in each for each in told)
        # A backend that is not chosen is closed on every rank that created it.
        left = [each for each in made if each.plan != "cannot be made"]
        assert {each.closed for each in left} == {0 if way == "fancy" else 1}
    await eventually(lambda: all(each.closed for each in left))  # perhaps by executors' threads
    assert {each.closed for each in left} == {1}


async def test_backend_whose_probe_fails_is_not_created(monkeypatch):
    monkeypatch.setattr(Fancy, "probe", classmethod(lambda kind: "no cupy"))
    async with devices_of(2, [Fancy]) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        assert [group.backend for group in groups] == ["staged"] * 2
    assert not made


async def test_first_backend_that_all_ranks_can_start_is_chosen():
    first = type("First", (Fancy,), {"plans": ("", "does not open"), "name": "first"})
    second = type("Second", (Fancy,), {"plans": ("", ""), "name": "second"})
    third = type("Third", (Fancy,), {"plans": ("", ""), "name": "third"})
    async with devices_of(2, [first, second, third]) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        assert [group.backend for group in groups] == ["second"] * 2
        assert sorted((each.name, each.closed) for each in made) == [
            ("first", 1), ("first", 1), ("second", 0), ("second", 0), ("third", 1), ("third", 1),
        ]  # fmt: skip


async def test_failed_negotiation_closes_the_created_backends(eventually):
    kind = type("Planned", (Fancy,), {"plans": ("", "")})
    async with devices_of(2, [kind]) as groups:
        meeting = groups[0].barrier()
        await eventually(lambda: made)
        late = groups[0].barrier(timeout=0.05)  # the other rank never calls it
        for outcome in await asyncio.gather(meeting, late, return_exceptions=True):
            assert isinstance(outcome, OperationTimeoutError)
    await eventually(lambda: all(each.closed for each in made))  # perhaps by an executor's thread
    assert [each.closed for each in made] == [1]


@pytest.fixture
def checkout(monkeypatch):
    """Pretend that the package is not installed: no package has metadata."""
    caches = registry._registered, registry.load_class
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(registry, "_packages_with", lambda group: ())
    yield
    for cached in caches:
        cached.cache_clear()


def test_checkout_has_the_entry_points_of_its_pyproject(checkout):
    assert registry.names() == ["inproc", "shm", "tcp"]
    assert registry.names(registry.DEVICE_BACKENDS) == ["cuda_ipc", "nccl", "staged"]
    assert [kind.name for kind in registry.selected("tcp")] == ["tcp"]


def test_without_checkout_and_metadata_no_transport_is_found(checkout, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "_CHECKOUT", tmp_path)
    assert registry.names() == []
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    assert registry.names(registry.DEVICE_BACKENDS) == []


def test_device_backends_by_name():
    def of(backend):
        return [kind.name for kind in registry.device_backends(backend, "cuda")]

    assert of("cpu:tcp,cuda:staged") == ["staged"]
    assert of("cpu:tcp,cuda:cuda_ipc") == ["cuda_ipc", "staged"]
    assert of(None) == of("cpu:tcp") == ["cuda_ipc", "nccl", "staged"]
    with pytest.raises(
        TransportUnavailableError, match="there is no back end 'pigeon' for cuda tensors; there are cuda_ipc"
    ):
        registry.device_backends("cuda:pigeon", "cuda")


def test_backend_that_cannot_be_loaded_raises_only_if_named(monkeypatch):
    def load(name, group, load=registry.load_class):
        if name == "staged":
            return load(name, group)
        raise TransportUnavailableError(f"no {name}")

    monkeypatch.setattr(registry, "load_class", load)
    assert [kind.name for kind in registry.device_backends("auto", "cuda")] == ["staged"]
    with pytest.raises(TransportUnavailableError, match="no cuda_ipc"):
        registry.device_backends("cuda:cuda_ipc", "cuda")
