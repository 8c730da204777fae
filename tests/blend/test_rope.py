"""Spec rows B9, B11: keys moved by rotation are the keys computed at the new position."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.blend.rope import PositionCorrector, RopeSpec

SPECS = [
    RopeSpec.default(base=100000.0, rotary_dim=64),
    RopeSpec.default(base=10000.0, rotary_dim=32),
    RopeSpec.default(base=10000.0, rotary_dim=64, interleaved=True),
]
HEAD_DIM = 64


def key_at(raw: torch.Tensor, position: int, spec: RopeSpec) -> torch.Tensor:
    """A key rotated to a position, pair by pair, as RoPE is defined."""
    out = raw.double().clone()
    half = spec.rotary_dim // 2
    for i in range(half):
        angle = position * spec.inv_freq[i]
        a, b = (2 * i, 2 * i + 1) if spec.interleaved else (i, i + half)
        x, y = raw[..., a].double(), raw[..., b].double()
        out[..., a] = x * math.cos(angle) - y * math.sin(angle)
        out[..., b] = x * math.sin(angle) + y * math.cos(angle)
    return out


@pytest.mark.parametrize("spec", SPECS)
@given(source=st.integers(0, 1_000_000), target=st.integers(0, 1_000_000), seed=st.integers(0, 99))
def test_a_moved_key_is_the_key_of_the_target(
    spec: RopeSpec, source: int, target: int, seed: int
) -> None:
    raw = torch.randn(2, 3, 2, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    kv = torch.stack([key_at(raw[0], source, spec).float(), raw[1]])
    moved = PositionCorrector(spec).correct_kv(
        kv, torch.full((3,), source), torch.full((3,), target)
    )
    torch.testing.assert_close(moved[0].double(), key_at(raw[0], target, spec), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_unrotated_dimensions_stay_bit_for_bit(dtype: torch.dtype) -> None:
    spec = RopeSpec.default(base=10000.0, rotary_dim=32)
    kv = torch.randn(4, 2, 5, 3, HEAD_DIM).to(dtype)
    moved = PositionCorrector(spec).correct_kv(kv, torch.arange(5), torch.arange(5) + 77)
    assert torch.equal(moved[:, 1], kv[:, 1])
    assert torch.equal(moved[:, 0, ..., 32:], kv[:, 0, ..., 32:])
    assert not torch.equal(moved[:, 0, ..., :32], kv[:, 0, ..., :32])
    assert moved.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_positions_are_bit_exact(dtype: torch.dtype) -> None:
    kv = torch.randn(2, 2, 6, 3, HEAD_DIM).to(dtype)
    where = torch.tensor([5, 9, 10, 400, 401, 8000])
    moved = PositionCorrector(SPECS[0]).correct_kv(kv, where, where)
    assert torch.equal(moved, kv)


def test_the_stored_original_is_not_touched() -> None:
    kv = torch.randn(2, 2, 6, 3, HEAD_DIM)
    before = kv.clone()
    PositionCorrector(SPECS[0]).correct_kv(kv, torch.arange(6), torch.arange(6) + 100)
    assert torch.equal(kv, before)


def test_every_token_moves_by_its_own_delta() -> None:
    spec = SPECS[0]
    corrector = PositionCorrector(spec)
    kv = torch.randn(2, 4, 3, HEAD_DIM)
    source, target = torch.tensor([0, 10, 20, 30]), torch.tensor([0, 13, 5, 4000])
    together = corrector.correct_kv(kv, source, target)
    for i in range(4):
        alone = corrector.correct_kv(kv[:, i : i + 1], source[i : i + 1], target[i : i + 1])
        torch.testing.assert_close(together[:, i : i + 1], alone, atol=1e-6, rtol=0)


def test_every_layer_moves_by_its_own_rotation() -> None:
    """B10: local and global RoPE, and layers without, in any order."""
    rotations = [SPECS[0], SPECS[0], None, SPECS[2], SPECS[1]]
    kv = torch.randn(len(rotations), 2, 3, 2, HEAD_DIM)
    where = torch.tensor([5, 6, 90])
    moved = PositionCorrector(rotations).correct_kv(kv, where, where + 1000)
    for layer, spec in enumerate(rotations):
        alone = kv[layer]
        if spec is not None:
            alone = PositionCorrector(spec).correct_kv(kv[layer], where, where + 1000)
        assert torch.equal(moved[layer], alone)


@pytest.mark.parametrize("spec", SPECS)
def test_half_turns_keep_their_precision(spec: RopeSpec) -> None:
    """Shears magnify rounding near half a turn, unless that is taken out first."""
    angles = [math.pi * (1 + error) for error in (0.0, 1e-7, -1e-7, 1e-4, -1e-4)]
    angles += [math.pi / 2, 3 * math.pi / 2, 7 * math.pi]
    near = RopeSpec(tuple(angles), spec.interleaved)
    raw = torch.randn(50, 3, HEAD_DIM)
    moved = raw.clone()
    PositionCorrector(near).rotate_(moved, 1)
    torch.testing.assert_close(moved.double(), key_at(raw, 1, near), atol=2e-6, rtol=0)


def test_bfloat16_error_is_rounding_only_at_a_million_positions() -> None:
    spec = SPECS[0]
    raw = torch.randn(64, 3, HEAD_DIM)
    stored = key_at(raw, 3, spec).to(torch.bfloat16)
    kv = torch.stack([stored, stored])
    moved = PositionCorrector(spec).correct_kv(
        kv, torch.full((64,), 3), torch.full((64,), 1_000_003)
    )
    exact = key_at(raw, 1_000_003, spec)
    error = (moved[0].double() - exact).norm() / exact.norm()
    assert error < 4e-3  # two bfloat16 roundings; float32 angles alone would add 3e-3 more
