"""Blending tried on the engine's very model before the first request (spec row B27).

Nothing about the model is assumed that can be measured: random tokens are computed in blocks that
no request uses yet, as one prefill, as scattered groups, and as a lone chunk elsewhere. What does
not hold becomes the reason why this engine blends nothing; exact prefixes need none of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger

from kvloom.blend.rope import PositionCorrector, RopeSpec, Rotations
from kvloom.vllm.compat import EngineMismatchError
from kvloom.vllm.paged_cache import PagedCache
from kvloom.vllm.ranks import Ranks
from kvloom.vllm.recompute import RecomputeEngine

logger = init_logger(__name__)

_TOKENS = 32
_GROUP = 5
_FARTHEST = 4096


class SelfCheck:
    """Checks of one engine; its cache must be empty, and is left as it was.

    Raises:
        EngineMismatchError: by each check, with what does not hold.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine: RecomputeEngine, cache: PagedCache, ranks: Ranks
    ) -> None:
        model = vllm_config.model_config
        self._engine = engine
        self._cache = cache
        self._ranks = ranks
        # The engine's block 0 is the one that stands for "no block".
        count = min(_TOKENS, (cache.num_blocks - 1) * cache.block_size, model.max_model_len // 2)
        self._blocks = list(range(1, 1 + -(-count // cache.block_size)))
        self._positions = np.arange(count)
        self._slots = cache.slots(self._blocks, torch.arange(count))
        random = np.random.default_rng(0)
        self._tokens = random.integers(0, model.get_vocab_size(), count, dtype=np.int32)
        self._far = min(model.max_model_len - count, _FARTHEST)
        self._tolerance = max(1e-4, 8 * torch.finfo(cache.dtype).eps)

    def recompute(self) -> None:
        """Scattered groups of tokens, computed in one pass over the KV of the others, are what full
        prefill makes of them."""
        with self._trying("recompute"):
            whole = self._whole
            self._cache.scatter(whole.to(self._cache.dtype), self._slots)
            scattered = self._positions[self._positions % (2 * _GROUP) >= _GROUP]
            self._overwrite(scattered)
            self._compute(scattered)
            worst = float(self._difference(self._read(), whole).max())
        if not worst <= self._tolerance:
            raise EngineMismatchError(
                f"self-check: tokens computed over a cache differ from full prefill by {worst:.1%}"
            )

    def rotations(self, assumed: Rotations) -> list[RopeSpec | None]:
        """Each layer's rotation as measured: the assumed one, or none at all.

        A chunk that is computed alone, elsewhere, must have the same values, and keys that are
        moved by the layer's rotation or by nothing.
        """
        with self._trying("rotation"):
            here = self._whole
            there = self._prefill(self._far)
        kept = self._difference(here[:, 0], there[:, 0])
        moved = here[:, 0].clone()
        PositionCorrector(assumed).rotate_(moved, self._far)
        rotated = self._difference(moved, there[:, 0])
        values = self._difference(here[:, 1], there[:, 1])
        # The model's own angles are float32, off by up to a 2^24th of the position, and all that
        # is computed from them.
        tolerance = self._tolerance + self._far * 2**-21
        measured: list[RopeSpec | None] = []
        for layer, spec in enumerate(assumed):
            name = self._cache.layers[layer].name
            if not float(values[layer]) <= tolerance:
                raise EngineMismatchError(
                    f"self-check: {name} computes other values elsewhere ({values[layer]:.1%} off):"
                    " the model knows positions by more than its keys' rotation"
                )
            if float(rotated[layer]) <= tolerance:
                measured.append(spec)
            elif float(kept[layer]) <= tolerance:
                measured.append(None)
            else:
                raise EngineMismatchError(
                    f"self-check: keys of {name}, moved, differ from those computed in place by "
                    f"{rotated[layer]:.1%}"
                )
        return measured

    @contextmanager
    def _trying(self, what: str) -> Iterator[None]:
        """Run a check on scratch blocks, which hold afterwards what they held before."""
        began = time.perf_counter()
        before = [layer.cache[self._blocks].clone() for layer in self._cache.layers]
        try:
            yield
        except Exception as error:
            raise EngineMismatchError(f"self-check: the model can't be run: {error!r}") from error
        finally:
            for layer, content in zip(self._cache.layers, before, strict=True):
                layer.cache[self._blocks] = content
        logger.debug("kvloom: self-check of %s in %.2f s", what, time.perf_counter() - began)

    @cached_property
    def _whole(self) -> Tensor:
        return self._prefill()

    def _prefill(self, shift: int = 0) -> Tensor:
        self._compute(self._positions, shift)
        return self._read()

    def _compute(self, positions: npt.NDArray[np.int64], shift: int = 0) -> None:
        self._engine.compute(self._blocks, self._tokens[positions], positions, shift)

    def _difference(self, found: Tensor, expected: Tensor) -> Tensor:
        """Relative difference of each layer, the largest of all ranks: one that alone gave up would
        leave the others waiting for it in the next forward."""
        relative = _relative(found, expected)
        return self._ranks.max(relative.nan_to_num(torch.inf))

    def _read(self) -> Tensor:
        """KV of all tokens, float32 [layers, 2, tokens, heads, head_dim]."""
        shape = self._cache.payload_shape(len(self._positions))
        kv = torch.empty(shape, dtype=self._cache.dtype, device=self._cache.device)
        self._cache.gather(self._slots, kv)
        return kv.float()

    def _overwrite(self, positions: npt.NDArray[np.int64]) -> None:
        """What is not computed anew must be seen to be wrong."""
        noise = torch.full(
            self._cache.payload_shape(len(positions)),
            7.0,
            dtype=self._cache.dtype,
            device=self._cache.device,
        )
        self._cache.scatter(noise, self._slots[torch.from_numpy(positions)])


def _relative(found: Tensor, expected: Tensor) -> Tensor:
    """Norm of the difference by that of what is expected, for each layer."""
    difference = torch.linalg.vector_norm((found - expected).flatten(1), dim=1)
    scale = torch.linalg.vector_norm(expected.flatten(1), dim=1)
    relative: Tensor = difference / scale.clamp_min(1e-30)
    return relative
