"""Versions that arrive as differences from the version before: bit by bit the same, or whole where that fails."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.errors import ProtocolError
from asyncdist.weights import Publisher, Subscriber
from asyncdist.weights.content.difference import difference, restore
from asyncdist.weights.content.digest import digest
from asyncdist.weights.transfer.held_version import HeldVersion
from asyncdist.weights.transfer.transfer_messages import Question

LIMIT = 60.0
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64, torch.complex128, torch.bool)


def blocks(itemsize, count, changed, seed):
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, count * itemsize, dtype=np.uint8)
    new = old.copy()
    elements = random.random(count) < changed
    new.reshape(count, itemsize)[elements] = random.integers(0, 256, (int(elements.sum()), itemsize), dtype=np.uint8)
    return old, new


@given(
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 3000) | st.just(200_000),
    st.sampled_from([0, 1e-3, 0.02, 0.2]),
    st.integers(0, 99),
)
def test_difference_restores_every_bit(itemsize, count, changed, seed):
    old, new = blocks(itemsize, count, changed, seed)
    changes = difference(old, new, itemsize)
    if changes is not None:
        assert len(changes) < len(new)
        restored = np.empty_like(new)
        assert restore(old, changes, itemsize, restored) == digest(new)
        assert np.array_equal(restored, new)


def test_difference_of_two_percent_of_bfloat16_values_is_a_thirtieth_of_the_block():
    old, new = blocks(2, 1 << 19, 0.02, 1)
    changes = difference(old, new, 2)
    assert changes is not None
    assert len(changes) < len(new) / 30
    assert difference(old, blocks(2, 1 << 19, 0.5, 1)[1], 2) is None


@given(st.integers(0, 1 << 20), st.integers(1, 255), st.booleans())
def test_damaged_difference_is_refused_or_leads_to_other_bytes(at, flip, is_torn):
    old, new = blocks(2, 2000, 0.05, 3)
    changes = bytearray(difference(old, new, 2))
    at %= len(changes)
    changes[at] ^= flip
    restored = np.empty_like(new)
    try:
        restore(old, changes[:at] if is_torn and at else changes, 2, restored)
    except ProtocolError:
        return
    assert restored.nbytes == new.nbytes


def state_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (300_000, 16), dtype=torch.uint8, generator=generator)
    state = {str(dtype): bits.view(dtype) if dtype is not torch.bool else bits > 100 for dtype in DTYPES}
    return {name: tensor.clone() for name, tensor in state.items()} | {"still": torch.ones(5)}


def change(state):
    """Change the bits of one element in a hundred."""
    for name, tensor in state.items():
        if name != "still":
            tensor.view(torch.uint8).view(-1)[:: 100 * tensor.itemsize] ^= 1


async def take(subscriber, state):
    async with subscriber.swap(await subscriber.next(LIMIT)) as read:
        for name, tensor in state.items():
            assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture
def arrived(monkeypatch):
    """The numbers of blocks that arrived as differences, and of those that did not, of each version that was read."""
    numbers = []
    end_base = HeldVersion.end_base

    def count(self):
        end_base(self)
        numbers.append((len(self.differences), len(self.blocks) - len(self.differences)))

    monkeypatch.setattr(HeldVersion, "end_base", count)
    return numbers


async def test_reader_of_the_version_before_gets_differences_and_one_behind_all(exchange, arrived):
    state = state_of()
    async with exchange(state, "server") as (publisher, subscriber):
        await publisher.publish()
        await take(subscriber, state)
        for _ in range(2):
            change(state)
            await publisher.publish()
            await take(subscriber, state)
        for _ in range(2):
            change(state)
            await publisher.publish()
        await take(subscriber, state)
    first, second, third, behind = arrived
    assert first[0] == 0
    assert second[1] == third[1] == 0
    assert behind[0] == 0


async def test_reader_of_a_part_gets_differences(exchange, arrived):
    state = {"a": torch.randn(4000, 1000).bfloat16()}
    part = (slice(None), slice(250, 500))
    async with exchange(
        state, "server", like={"a": torch.empty(4000, 250, dtype=torch.bfloat16)}, slices={"a": part}
    ) as (
        publisher,
        subscriber,
    ):
        for _ in range(2):
            await publisher.publish()
            await take(subscriber, {"a": state["a"][part].contiguous()})
            change(state)
    assert arrived[1][1] == 0


async def test_readers_pass_differences_on_after_the_publisher_has_gone(job, on_host, arrived):
    state = state_of()
    async with on_host("a", Subscriber, job=job) as relay, on_host("b", Subscriber, job=job) as late:
        async with on_host("trainer", Publisher, state, job=job) as publisher:
            await publisher.publish()
            await take(relay, state)
            await take(late, state)
            change(state)
            await publisher.publish()
            await take(relay, state)
        await take(late, state)
    assert [whole for _, whole in arrived[2:]] == [0, 0]


async def test_altered_base_is_noticed_and_the_version_is_read_whole(exchange, caplog):
    state = {"a": torch.randn(1_000_000).bfloat16()}
    async with exchange(state, "server") as (publisher, subscriber):
        await publisher.publish()
        await take(subscriber, state)
        with subscriber.reading() as (model, _):
            model["a"][7] = 5.0
        change(state)
        await publisher.publish()
        with caplog.at_level(logging.WARNING):
            await take(subscriber, state)
    assert "so it is read whole" in caplog.text


def torn(changes):
    return changes[: len(changes) // 2]


def altered(changes):
    return changes[:-1] + bytes([changes[-1] ^ 1])


@pytest.mark.parametrize("damage", [torn, altered])
async def test_damaged_difference_is_noticed_and_the_version_is_read_whole(exchange, caplog, monkeypatch, damage):
    state, of_a_block = state_of(), HeldVersion.difference
    async with exchange(state, "server") as (publisher, subscriber):
        await publisher.publish()
        await take(subscriber, state)
        monkeypatch.setattr(HeldVersion, "difference", lambda *args: damage(of_a_block(*args) or b"\1\0\0\0"))
        change(state)
        await publisher.publish()
        with caplog.at_level(logging.WARNING):
            await take(subscriber, state)
    assert "so it is read whole" in caplog.text


async def test_difference_from_a_version_that_the_reader_does_not_have_is_refused(exchange, monkeypatch):
    state, decode = state_of(), Question.decode
    async with exchange(state, "server") as (publisher, subscriber):
        first = await publisher.publish()
        change(state)
        await publisher.publish()
        with monkeypatch.context() as patched:
            patched.setattr(Question, "decode", lambda *args: replace(decode(*args), base=first.key))
            with pytest.raises(TimeoutError, match=r"the last try: .* has sent blocks 0 to \d+ .* not expected"):
                await subscriber.next(1.0)
            assert subscriber.current is None
        await publisher.publish()
        await take(subscriber, state)


async def test_source_that_knows_no_differences_sends_all(exchange, arrived, monkeypatch):
    decode = Question.decode
    monkeypatch.setattr(Question, "decode", lambda fields, buffers: decode(fields, buffers[:1]))
    state = state_of()
    async with exchange(state, "server") as (publisher, subscriber):
        for _ in range(2):
            await publisher.publish()
            await take(subscriber, state)
            change(state)
    assert arrived[1][0] == 0
