"""Spec row S13: 8-bit KV is off by no more than is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvloom.blend.int8 import DTYPES, Int8Form

SHAPE = (2, 2, 3, 2, 4)
small = st.sampled_from([0.0, 1e-37, -3e-38, 1.2e-38]).map(np.float32)
numbers = st.floats(-60_000, 60_000, width=32, allow_subnormal=False) | small


def decoded(form: Int8Form, stored: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, 7)
    form.decode(stored, out)
    return out


def through(payload: torch.Tensor) -> torch.Tensor:
    form = Int8Form(payload.shape)
    stored = torch.full(form.stored_shape, 255, dtype=torch.uint8)
    assert form.encode(payload, stored)
    return decoded(form, stored, payload)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=50, deadline=None)
@given(array=arrays.arrays(np.float32, SHAPE, elements=numbers))
def test_no_number_is_off_by_more_than_half_a_step_and_its_own_rounding(
    dtype: torch.dtype, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
) -> None:
    payload = torch.from_numpy(array).to(dtype)
    back = through(payload)
    largest = payload.double().abs().amax(-1, keepdim=True)
    info = torch.finfo(dtype)
    step = (largest / 127).clamp_min(torch.finfo(torch.float32).tiny)
    rounding = largest * info.eps + info.smallest_normal * info.eps
    assert (back.double() - payload.double()).abs().le(step * (0.5 + 1e-5) + rounding).all()


def test_a_group_is_one_head_of_one_token() -> None:
    """A huge number costs its own head precision and no other."""
    payload = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    before = through(payload)
    payload[1, 0, 2, 1, 3] = 1e6
    after = through(payload)
    changed = (before != after).any(-1).nonzero()
    assert changed.tolist() == [[1, 0, 2, 1]]


def test_parts_are_layers() -> None:
    payload = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    whole, one = Int8Form(SHAPE), Int8Form((1, *SHAPE[1:]))
    stored = torch.empty(whole.stored_shape, dtype=torch.uint8)
    assert whole.encode(payload, stored)
    assert stored.shape[1] == whole.part_size == 2 * 3 * 2 * (4 + 4)
    layer = decoded(one, stored[1:], payload[1:])
    assert torch.equal(layer, decoded(whole, stored, payload)[1:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_what_has_no_such_form_is_refused(bad: float) -> None:
    payload = torch.zeros(SHAPE)
    payload[0, 1, 1, 0, 2] = bad
    form = Int8Form(SHAPE)
    assert not form.encode(payload, torch.empty(form.stored_shape, dtype=torch.uint8))
