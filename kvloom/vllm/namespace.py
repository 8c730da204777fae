"""What separates stores that must never mix: everything that changes KV bytes (DESIGN.md)."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from kvloom.tokens.hashing import namespace_id
from kvloom.vllm.identity import model_identity

LAYOUT_VERSION = 1


def engine_namespace(
    vllm_config: VllmConfig, layers: int, heads: int, head_dim: int, **more: str | int | None
) -> str:
    """Hex digest over model, weights, dtypes, geometry, RoPE and parallel layout.

    Args:
        layers, heads, head_dim: geometry of the KV cache.
        more: what else tells a connector's bytes apart.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    load_format = str(vllm_config.load_config.load_format)
    return namespace_id(
        {
            "layout": LAYOUT_VERSION,
            **model_identity(model),
            "load_format": load_format,
            "seed": model.seed if load_format == "dummy" else None,
            "hf_overrides": repr(model.hf_overrides),
            "quantization": model.quantization,
            "dtype": str(model.dtype),
            "kv_dtype": str(cache.cache_dtype),
            "layers": layers,
            "heads": heads,
            "head_dim": head_dim,
            "rope": repr(rope_parameters(vllm_config)),
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            **more,
        }
    )


def rope_parameters(vllm_config: VllmConfig) -> dict[str, Any]:
    """RoPE parameters of the model's own configuration, sorted by name.

    Of LongRoPE's two sets of factors the engine uses one, by its ``max_model_len``, which is no
    parameter of the model: which one is told too, for their keys must never meet.
    """
    config = vllm_config.model_config.hf_text_config
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    for name in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        value = getattr(config, name, None)
        if value is not None:
            parameters.setdefault(name, value)
    if parameters.get("rope_type") == "longrope":
        original = parameters["original_max_position_embeddings"]
        parameters["long"] = vllm_config.model_config.max_model_len > original
    return dict(sorted(parameters.items()))
