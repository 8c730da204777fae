"""Every place where kvloom leans on something that a vLLM version may change. Nothing else.

Written for vLLM 0.32. Each function says what it needs of the engine; what is not there becomes
``None`` or an ``EngineMismatchError``, and the connector then does less.
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.request import RequestStatus

from kvloom.vllm.paged_cache import CacheLayer

NULL_BLOCK = 0
"""The block that stands in a block table for none."""


class EngineMismatchError(RuntimeError):
    """The engine or model lacks something that a feature needs; the text says what."""


_models: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def keep_loaded_models() -> None:
    """Remember what the engine's model loaders return; connectors are given only its caches.

    vLLM hands a connector no reference to the model, and RecomputeEngine must call the model's
    own forward. Idempotent: plug-ins are loaded several times in one process.
    """
    load_model = BaseModelLoader.load_model
    if hasattr(load_model, "_kvloom"):
        return

    @functools.wraps(load_model)
    def remembering(
        self: BaseModelLoader, vllm_config: VllmConfig, model_config: Any, *args: Any, **kwargs: Any
    ) -> nn.Module:
        model: nn.Module = load_model(self, vllm_config, model_config, *args, **kwargs)
        _models[id(model_config)] = model
        return model

    remembering._kvloom = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = remembering  # type: ignore[method-assign]


def loaded_model(vllm_config: VllmConfig) -> nn.Module:
    """The module that the engine runs.

    Raises:
        EngineMismatchError: the plug-in was not loaded before the model was.
    """
    model = _models.get(id(vllm_config.model_config))
    if model is None:
        raise EngineMismatchError(
            "the model was loaded before kvloom's plug-in (is the package installed, and does "
            "VLLM_PLUGINS, if set, name 'kvloom'?)"
        )
    return model


def attention_layers(vllm_config: VllmConfig, names: Sequence[str]) -> dict[str, Any]:
    """The engine's attention modules by layer name."""
    context = vllm_config.compilation_config.static_forward_context
    missing = [name for name in names if name not in context]
    if missing:
        raise EngineMismatchError(f"attention layers not found: {', '.join(missing)}")
    return {name: context[name] for name in names}


def cache_layer(name: str, layer: Any, cache: Tensor) -> CacheLayer:
    """A layer's cache with the engine's own way to write it."""
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        raise EngineMismatchError(f"{type(layer.impl).__name__} has no do_kv_cache_update")

    if hasattr(layer, "kv_lora_rank"):
        return _latent_layer(name, layer, cache, update)

    def write(kv: Tensor, slots: Tensor) -> None:
        update(layer, kv[0], kv[1], cache, slots)

    return CacheLayer(name, cache, write)


def _latent_layer(name: str, layer: Any, cache: Tensor, update: Callable[..., None]) -> CacheLayer:
    """An MLA layer's cache; the engine registers it with one head."""
    rank, rope_dim = layer.kv_lora_rank, layer.qk_rope_head_dim
    if cache.dim() == 4:
        cache = cache.squeeze(1)
    if cache.dim() != 3 or cache.shape[-1] != rank + rope_dim:
        raise EngineMismatchError(
            f"{name}: a latent cache of shape {tuple(cache.shape)} for {rank} + {rope_dim} values"
        )

    def write(kv: Tensor, slots: Tensor) -> None:
        latent, rope = kv[0, :, 0, :rank], kv[0, :, :, rank:]
        update(latent, rope, cache, slots, layer.kv_cache_dtype, layer._k_scale)

    return CacheLayer(name, cache, write)


def metadata_builder(
    vllm_config: VllmConfig, spec: Any, layers: dict[str, Any], device: torch.device
) -> Any:
    """An attention metadata builder of our own for one group of layers."""
    backends = {layer.get_attn_backend() for layer in layers.values()}
    if len(backends) != 1:
        raise EngineMismatchError(f"{len(backends)} attention backends in one KV cache group")
    return backends.pop().get_builder_cls()(spec, list(layers), vllm_config, device)


def attention_metadata(
    builder: Any,
    *,
    positions: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slots: Tensor,
) -> Any:
    """What the attention of some pseudo-requests must know.

    Args:
        positions: int64 [tokens]; slots: int64 [tokens], where their KV goes.
        query_starts: int32 [groups + 1], where each pseudo-request starts in ``positions``.
        seq_lens: int32 [groups], context length of each pseudo-request, its own tokens included.
        block_table: int32 [groups, blocks].
    """
    device = positions.device
    common = CommonAttentionMetadata(
        query_start_loc=query_starts.to(device),
        query_start_loc_cpu=query_starts,
        seq_lens=seq_lens.to(device),
        num_reqs=len(seq_lens),
        num_actual_tokens=len(positions),
        max_query_len=int(query_starts.diff().max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=block_table.to(device),
        slot_mapping=slots,
        causal=True,
        positions=positions,
        seq_lens_cpu_upper_bound=seq_lens,
        is_prefilling=torch.ones(len(seq_lens), dtype=torch.bool),
    )
    return builder.build(0, common)


def run_model(
    model: nn.Module,
    vllm_config: VllmConfig,
    metadata: Any,
    *,
    input_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    layer_names: Sequence[str],
) -> None:
    """One forward of the engine's model over pseudo-requests; KV lands in ``slots``.

    Args:
        metadata: of ``attention_metadata``.
        input_ids: int32 [tokens]; positions: int64 [tokens]; slots: int64 [tokens].
    """
    with (
        torch.inference_mode(),
        set_forward_context(
            dict.fromkeys(layer_names, metadata),
            vllm_config,
            num_tokens=len(input_ids),
            slot_mapping=dict.fromkeys(layer_names, slots),
        ),
    ):
        model(input_ids=input_ids, positions=positions)


Look = Callable[[str, Tensor], bool]
"""(layer name, queries [tokens, heads, head_dim]) with the layer's new KV in the cache, before its
attention; answers whether to go on."""


class _LeaveError(Exception):
    """Ends a forward whose rest is not needed."""


@contextmanager
def looking(layers: dict[str, Any], look: Look) -> Iterator[None]:
    """Forwards in this block are shown to ``look`` layer by layer, and end when it has seen enough.

    The attention implementation is called in Python also where the model is compiled, and only
    after the layer's keys and values were written.
    """
    originals = {name: layer.impl.forward for name, layer in layers.items()}

    def shown(name: str) -> Callable[..., Any]:
        def forward(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not look(name, query):
                raise _LeaveError
            return originals[name](layer, query, *args, **kwargs)

        return forward

    for name, layer in layers.items():
        layer.impl.forward = shown(name)
    try:
        yield
    except _LeaveError:
        return
    finally:
        for layer in layers.values():
            del layer.impl.forward


def check_nested_forward(vllm_config: VllmConfig) -> None:
    """Refuse engines whose forward needs more than token ids, positions and attention metadata.

    Raises:
        EngineMismatchError: names the feature.
    """
    if vllm_config.lora_config is not None:
        raise EngineMismatchError("with LoRA enabled the forward needs each token's adapter")
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
        raise EngineMismatchError("engines that share experts run each forward together")
    if vllm_config.speculative_config is not None:
        raise EngineMismatchError("speculative decoding keeps a second cache that is not blended")
    if vllm_config.model_config.is_multimodal_model:
        raise EngineMismatchError("multimodal models take embeddings instead of token ids")


def block_tables(kv_cache_manager: Any, request_id: str) -> list[list[int]]:
    """The request's block table in each KV cache group, from the engine's own books: never extended
    or kept by us."""
    return list(kv_cache_manager.get_block_ids(request_id))


def block_ids(kv_cache_manager: Any, request_id: str) -> list[int]:
    """The request's block table where there is one group."""
    (table,) = block_tables(kv_cache_manager, request_id)
    return table


def tensor_parallel_group(vllm_config: VllmConfig) -> torch.distributed.ProcessGroup | None:
    """The ranks that hold shares of the same layers, on processors; None for one alone."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return None
    group: torch.distributed.ProcessGroup = get_tp_group().cpu_group
    return group


def caches_prefixes(kv_cache_manager: Any) -> bool:
    """Whether the engine has a prefix cache of its own."""
    return bool(kv_cache_manager.enable_caching)


def computes_cached(kv_cache_manager: Any, other: Any, request: Any, cached: int) -> bool:
    """Whether ``other`` computes a part of ``request``'s cached tokens in the step being planned.

    The engine enters blocks in its prefix cache when it plans to fill them, so that requests of
    the same step may share them.
    """
    block = other.num_computed_tokens // kv_cache_manager.block_pool.hash_block_size
    return bool(
        other.status == RequestStatus.RUNNING
        and block < cached // kv_cache_manager.block_pool.hash_block_size
        and other.block_hashes[block : block + 1] == request.block_hashes[block : block + 1]
    )


def leave_prefix_cache(
    kv_cache_manager: Any, request: Any, block_size: int, first_token: int
) -> None:
    """Take the blocks from ``first_token`` on out of the engine's prefix cache, for good.

    Blocks that are cached already are evicted. Those that fill later, while decoding, would enter
    under the hashes of an exact computation and be served as such once another request has cached
    the exact blocks before them: so this request's hashes become its own, old and future ones.

    Args:
        first_token: position of the first token whose KV is not exact.
    """
    pool = kv_cache_manager.block_pool
    first_block = first_token // block_size
    pool.evict_blocks(set(block_ids(kv_cache_manager, request.request_id)[first_block:]))
    hashes, hasher = request.block_hashes, request._block_hasher
    if hasher is None:
        return
    nonce = os.urandom(32)

    def own(block_hash: bytes) -> bytes:
        return hashlib.blake2b(block_hash, key=nonce, digest_size=len(block_hash)).digest()

    first_hash = first_token // pool.hash_block_size
    hashes[first_hash:] = [own(block_hash) for block_hash in hashes[first_hash:]]
    request._block_hasher = lambda later: [own(block_hash) for block_hash in hasher(later)]
