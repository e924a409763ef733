"""The codecs lose no more than they promise, and error feedback loses nothing over many calls."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.ddp.compression import ErrorFeedback, HalfCodec, IntegerCodec, codec_of
from asyncdist.errors import UsageError

CODECS = [HalfCodec(), IntegerCodec(8), IntegerCodec(4), IntegerCodec(8, 2), IntegerCodec(4, 6)]
by_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.name}-{codec.block}")

finite = st.floats(-(2.0**99), 2.0**99, width=32)


def worst_errors(codec, values):
    """Return the largest error that the codec's documentation allows, for each element."""
    if isinstance(codec, HalfCodec):
        # A bfloat16 below the smallest normal number loses up to half of the smallest positive one.
        return values.abs() * 2**-8 + 2**-133
    bounds = torch.empty_like(values)
    for start in range(0, len(values), codec.block):
        part = slice(start, start + codec.block)
        largest = values[part].abs().max()
        bounds[part] = largest / (254 if codec.bits == 8 else 14) * (1 + 1e-5) + 1e-30
    return bounds


@by_codec
@given(values=st.lists(finite, min_size=1, max_size=70))
def test_error_stays_within_the_documented_bound(codec, values):
    values = torch.tensor(values, dtype=torch.float32)
    code = codec.encode(values)
    assert code.dtype == torch.uint8
    assert code.shape == (codec.encoded_nbytes(len(values)),)
    decoded = codec.decode(code, len(values))
    assert decoded.dtype == torch.float32
    assert decoded.shape == values.shape
    assert ((decoded - values).abs() <= worst_errors(codec, values)).all()


@by_codec
@given(values=st.lists(finite, min_size=1, max_size=40), cut=st.integers(0, 40))
def test_parts_that_begin_at_blocks_have_the_codes_of_the_whole(codec, values, cut):
    values = torch.tensor(values, dtype=torch.float32)
    place = min(cut // codec.block * codec.block, len(values))
    whole = codec.decode(codec.encode(values), len(values))
    parts = [codec.decode(codec.encode(part), len(part)) for part in (values[:place], values[place:])]
    assert torch.equal(torch.cat(parts), whole)


@by_codec
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_of_other_precisions_are_encoded(codec, dtype):
    values = torch.linspace(-1, 1, 33).to(dtype)
    decoded = codec.decode(codec.encode(values), 33)
    assert ((decoded - values.float()).abs() <= worst_errors(codec, values.float())).all()


@by_codec
def test_code_may_lie_at_an_odd_address_be_overwritten_and_be_empty(codec):
    values = torch.linspace(-1, 1, 9).bfloat16()
    before, code = values.clone(), codec.encode(values)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), code])[1:]
    assert torch.equal(codec.decode(shifted, 9), codec.decode(code, 9))
    code.zero_()
    assert torch.equal(values, before)
    nothing = codec.encode(torch.empty(0))
    assert nothing.numel() == codec.decode(nothing, 0).numel() == 0


@by_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_value_that_is_not_finite_is_not_hidden(codec, bad):
    values = torch.ones(600)
    values[3] = bad
    decoded = codec.decode(codec.encode(values), 600)
    assert not decoded[3].isfinite()
    assert decoded[-1] == 1.0  # in another block


@pytest.mark.parametrize(("name", "share"), [("bf16", 0.5), ("int8", 0.254), ("int4", 0.141)])
def test_share_of_the_bytes_of_float32(name, share):
    codec = codec_of(name)
    assert codec is not None
    assert codec.name == name
    assert codec.encoded_nbytes(1_000_000) == pytest.approx(share * 4e6, rel=0.005)


@by_codec
@given(seed=st.integers(0, 1000), rounds=st.integers(1, 20))
def test_error_feedback_loses_nothing_over_many_calls(codec, seed, rounds):
    """What arrived in all calls together is what was sent, up to the loss of one call."""
    generator = torch.Generator().manual_seed(seed)
    feedback = ErrorFeedback()
    sent, arrived = torch.zeros(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    for _ in range(rounds):
        values = torch.randn(100, generator=generator)
        sent += values
        feedback.add_to(values)
        decoded = codec.decode(codec.encode(values), 100)
        arrived += decoded
        feedback.keep(values, decoded)
    assert feedback.residual is not None
    torch.testing.assert_close(arrived + feedback.residual, sent, rtol=0, atol=1e-4)
    assert ((arrived - sent).abs() <= worst_errors(codec, values) + 1e-4).all()


def test_failed_transfer_does_not_change_the_feedback():
    codec, feedback = IntegerCodec(4), ErrorFeedback()
    first = torch.linspace(0, 1, 10)
    feedback.keep(first, codec.decode(codec.encode(first), 10))
    attempts = []
    for _ in range(2):  # the first transfer fails
        values = torch.linspace(1, 2, 10)
        feedback.add_to(values)
        attempts.append(codec.encode(values))
    assert torch.equal(*attempts)


def test_overflow_does_not_spoil_later_vectors():
    codec, feedback = IntegerCodec(8), ErrorFeedback()
    values = torch.tensor([float("inf"), 1.0])
    feedback.keep(values, codec.decode(codec.encode(values), 2))
    feedback.add_to(values := torch.ones(2))
    assert values.isfinite().all()


def test_feedback_is_restored_from_a_checkpoint():
    codec, feedback, restored = IntegerCodec(4), ErrorFeedback(), ErrorFeedback()
    values = torch.linspace(0, 1, 10)
    restored.load_state_dict(feedback.state_dict())
    assert restored.residual is None
    feedback.keep(values, codec.decode(codec.encode(values), 10))
    restored.load_state_dict(feedback.state_dict())
    feedback.add_to(one := torch.ones(10))
    restored.add_to(other := torch.ones(10))
    assert torch.equal(one, other)


def test_feedback_refuses_a_vector_of_another_size():
    feedback = ErrorFeedback()
    feedback.keep(torch.ones(3), torch.zeros(3))
    with pytest.raises(UsageError, match="3 elements and got a vector of 4"):
        feedback.add_to(torch.ones(4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((lambda each=each: codec_of(each), "'bf16', 'int8', 'int4'") for each in ("int9", 8, object())),
        (lambda: IntegerCodec(3), "8 or 4 bits, not 3"),
        *((lambda block=block: IntegerCodec(8, block), "an even number of at least 2") for block in (0, 5)),
    ],
)
def test_unknown_or_impossible_codec_is_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()
