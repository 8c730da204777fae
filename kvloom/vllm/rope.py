"""How the engine's model rotates its keys, read from its own modules (spec row B10).

The angles are those of vLLM's rotary embedding: not derived a second time from the model's
configuration, and tried on the module itself before they are used. Whether a layer applies its
module at all, and what else it does to its keys, is measured by ``self_check``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import (
    LinearScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import (
    Phi3LongRoPEScaledRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import (
    YaRNScalingRotaryEmbedding,
)

from kvloom.blend.rope import PositionCorrector, RopeSpec
from kvloom.vllm.compat import EngineMismatchError

_INV_FREQ: dict[type, Callable[[Any], Tensor]] = {
    RotaryEmbedding: lambda rope: rope._compute_inv_freq(rope.base),
    Llama3RotaryEmbedding: lambda rope: rope._compute_inv_freq(rope.base),
    LinearScalingRotaryEmbedding: lambda rope: (
        rope._compute_inv_freq(rope.base) / rope.scaling_factors[0]
    ),
    YaRNScalingRotaryEmbedding: lambda rope: rope._compute_inv_freq(rope.scaling_factor),
    # One of the two sets for the engine's whole life; ``namespace`` keeps their stores apart.
    Phi3LongRoPEScaledRotaryEmbedding: lambda rope: rope._compute_inv_freq(
        rope.long_factor if rope.use_long_rope else rope.short_factor
    ),
}
"""Angles per position by kind, float32 as the module has them. Kinds that are not here are refused:
dynamic NTK and dual chunks, whose angles may depend on more than the position; M-RoPE, whose
positions are three."""

_TRANSFORMERS_KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds whose ``inv_freq`` stays as it is while a model of the transformers library runs."""


def layer_rotations(
    model: nn.Module, layer_names: Sequence[str], head_dim: int, max_position: int
) -> list[RopeSpec]:
    """The rotation of each attention layer.

    Args:
        max_position: highest position that the engine serves.

    Raises:
        EngineMismatchError: a layer without rotary embedding, or one that must not be rotated by
            delta; names the layer and the kind.
    """
    modules = dict(model.named_modules())
    shared = _of_transformers(modules.values())
    known: dict[nn.Module, RopeSpec] = {}
    rotations = []
    for name in layer_names:
        rope = getattr(modules.get(name.rpartition(".")[0]), "rotary_emb", None) or shared
        if rope is None:
            raise EngineMismatchError(f"{name} has no rotary embedding: its keys can't be moved")
        if rope not in known:
            spec = _of_shared(rope) if rope is shared else _of_vllm(rope, name, max_position)
            if spec.rotary_dim > head_dim:
                raise EngineMismatchError(
                    f"{name}: {spec.rotary_dim} rotated dimensions in heads of {head_dim}"
                )
            known[rope] = spec
        rotations.append(known[rope])
    return rotations


def _of_vllm(rope: Any, name: str, max_position: int) -> RopeSpec:
    kind = type(rope).__name__
    if type(rope) not in _INV_FREQ:
        raise EngineMismatchError(f"{name}: keys rotated by {kind} can't be moved")
    inv_freq = _INV_FREQ[type(rope)](rope).double()
    spec = RopeSpec(tuple(inv_freq.tolist()), not getattr(rope, "is_neox_style", True))
    if not _moves_as_it_rotates(rope, spec, max_position):
        raise EngineMismatchError(f"{name}: moving a key does not give what {kind} gives there")
    return spec


def _moves_as_it_rotates(rope: Any, spec: RopeSpec, max_position: int) -> bool:
    """Whether keys rotated at the first positions and moved are those rotated at the last ones."""
    near = torch.arange(4)
    far = near + max_position - 3
    device = next(rope.buffers()).device
    dtype = next(rope.buffers()).dtype
    keys = torch.randn(4, rope.head_size, generator=torch.Generator().manual_seed(0)).to(dtype)

    def rotated(positions: Tensor) -> Tensor:
        copies = keys.clone().to(device), keys.clone().to(device)  # some kernels work in place
        result: Tensor = rope(positions.to(device), *copies)[1]
        return result.view(4, 1, rope.head_size).cpu()

    there = rotated(far)
    moved = rotated(near)
    PositionCorrector(spec).rotate_(moved, far - near)
    # The module's own angles are float32, off by up to a 2^24th of the position.
    tolerance = 4 * torch.finfo(dtype).eps + max_position * 2**-23
    return bool((moved.float() - there.float()).norm() <= tolerance * there.float().norm())


def _of_transformers(modules: Iterable[nn.Module]) -> nn.Module | None:
    """The one rotary embedding of a model that vLLM runs by the transformers library's code."""
    found = [
        module
        for module in modules
        if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "rope_type")
    ]
    return found[0] if len(found) == 1 else None


def _of_shared(rope: Any) -> RopeSpec:
    if rope.rope_type not in _TRANSFORMERS_KINDS or not hasattr(rope, "inv_freq"):
        raise EngineMismatchError(
            f"keys rotated by {type(rope).__name__} of kind {rope.rope_type} can't be moved"
        )
    return RopeSpec(tuple(rope.inv_freq.double().tolist()))
