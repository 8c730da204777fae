"""RecomputeEngine: the engine's own model, over chosen tokens only (DESIGN.md, spec rows B12, B15).

Every contiguous group of chosen tokens [a..b] is shown to the model as one request whose query is
the group and whose context is the prompt up to b, in the real request's blocks. The attention
backend writes their new K and V in place, layer by layer, before it attends: so a token sees the
blended cache before it, chosen tokens of the same pass included, and choosing all tokens is a full
prefill.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from kvloom.blend.selection.base import LAST_TOKENS, LayerView, LookingPolicy
from kvloom.vllm import compat
from kvloom.vllm.budget import Budget, Slices
from kvloom.vllm.paged_cache import PagedCache
from kvloom.vllm.ranks import Ranks


class RecomputeEngine:
    """Computes KV of chosen prompt tokens in place.

    Args:
        model: the module that the engine runs.
        spec: the KV cache spec of the attention group.
        layers: the group's attention modules by name.
        cache: of that group, the only one.
        ranks: those that call the model together.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        spec: Any,
        layers: dict[str, Any],
        cache: PagedCache,
        *,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._vllm_config = vllm_config
        self._model = model
        self._layers = layers
        self._layer_names = list(layers)
        self.cache = cache
        self._builder = compat.metadata_builder(vllm_config, spec, layers, cache.device)
        # A compiled model accepts no larger batch than the engine's own, and attention backends
        # that keep buffers for it (FlashInfer, FlashAttention 3) no more requests.
        self._max_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._max_groups = int(vllm_config.scheduler_config.max_num_seqs)

    def compute(
        self,
        block_ids: Sequence[int],
        token_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        shift: int = 0,
    ) -> None:
        """Fill the cache of one request at ``positions``.

        Args:
            block_ids: the request's block table; its KV before and between the chosen tokens
                must be in place.
            token_ids: int32 [tokens], the tokens at ``positions``.
            positions: int64 [tokens], strictly ascending positions in the prompt.
            shift: is added to what the model is told of positions, not to where KV lies: a chunk
                without what stands before it.
        """
        while positions.size:
            count = self._fitting(positions)
            self._compute_batch(block_ids, token_ids[:count], positions[:count], shift)
            token_ids, positions = token_ids[count:], positions[count:]

    def _fitting(self, positions: npt.NDArray[np.int64]) -> int:
        """How many of the first positions fit into one batch."""
        starts = _group_starts(positions)
        end = int(starts[self._max_groups]) if len(starts) > self._max_groups else len(positions)
        return min(end, self._max_tokens)

    def choose(
        self,
        policy: LookingPolicy,
        block_ids: Sequence[int],
        token_ids: npt.NDArray[np.int32],
        *,
        count: int,
        start: int,
        candidates: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        budget: Budget,
    ) -> Slices[npt.NDArray[np.int64]]:
        """Which loaded tokens the policy wants computed anew.

        A whole first pass leaves exact KV in the layers before the one it ends at, and in that one;
        any other leaves what a later ``compute`` of the same positions puts right.

        Args:
            count: tokens to choose at most.
            token_ids: int32, the prompt's tokens from ``start`` to the end of the plan.
            candidates: int64, positions of the loaded tokens that may be chosen, ascending.
            positions: int64, ascending, those to be computed in any case.
        """
        last = len(self._layer_names) - 1 if policy.layer is None else policy.layer
        last = min(last, len(self._layer_names) - 1)
        looked_at = range(last + 1) if policy.layer is None else range(last, last + 1)
        seen = np.union1d(candidates, positions) if policy.whole else positions
        where = torch.from_numpy(candidates)
        with self._ranks.together():
            slots = self.cache.slots(block_ids, where)
            loaded = {layer: self.cache.gather_layer(layer, slots) for layer in looked_at}
            context = self.cache.slots(block_ids, torch.arange(start + len(token_ids)))
            scores = torch.zeros(len(candidates), device=self.cache.device)

        def score(layer: int, queries: Tensor, tokens: npt.NDArray[np.int64]) -> None:
            keys, values = self.cache.gather_layer(layer, context)
            heads = queries.reshape(len(queries), -1, self.cache.head_dim)
            view = LayerView(
                keys=keys,
                values=values,
                candidates=where.to(keys.device),
                loaded=loaded[layer],
                queries=heads[: len(tokens)][-LAST_TOKENS:],
                query_positions=torch.from_numpy(tokens[-LAST_TOKENS:]).to(keys.device),
            )
            scores.add_(policy.score(view))

        failures: list[Exception] = []

        def look(name: str, queries: Tensor, tokens: npt.NDArray[np.int64]) -> bool:
            layer = self._layer_names.index(name)
            if layer in loaded and tokens[-1] == seen[-1] and not failures:
                try:
                    score(layer, queries, tokens)
                except Exception as error:  # noqa: BLE001  (raised when the forward is over)
                    failures.append(error)
            return layer < last or policy.layer is None

        # Attention aside, a pass through a part of the layers costs that part.
        price = (last + 1) / len(self._layer_names)
        rest = seen
        while rest.size:
            taken = budget.take(self._fitting(rest), price)
            tokens, rest = np.split(rest, [taken])
            with compat.looking(self._layers, functools.partial(look, tokens=tokens)):
                self._compute_batch(block_ids, token_ids[tokens - start], tokens)
            if budget.spent:
                yield
        with self._ranks.together():
            if failures:
                raise failures[0]
        # On the processor: where two score the same, all ranks must take the same one.
        return policy.choose(self._ranks.sum(scores.cpu()), where, count)

    def _compute_batch(
        self,
        block_ids: Sequence[int],
        token_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        shift: int = 0,
    ) -> None:
        starts = np.append(_group_starts(positions), len(positions))
        last_positions = positions[starts[1:] - 1]
        blocks_used = int(last_positions[-1]) // self.cache.block_size + 1
        device = self.cache.device
        with self._ranks.together():
            where = torch.from_numpy(positions)
            moved, slots = (where + shift).to(device), self.cache.slots(block_ids, where)
            table = torch.tensor(list(block_ids[:blocks_used]), dtype=torch.int32)
            metadata = compat.attention_metadata(
                self._builder,
                positions=moved,
                query_starts=torch.from_numpy(starts.astype(np.int32)),
                seq_lens=torch.from_numpy((last_positions + 1).astype(np.int32)),
                block_table=table.expand(len(starts) - 1, -1).contiguous(),
                slots=slots,
            )
            input_ids = torch.from_numpy(token_ids).to(device)
        compat.run_model(
            self._model,
            self._vllm_config,
            metadata,
            input_ids=input_ids,
            positions=moved,
            slots=slots,
            layer_names=self._layer_names,
        )


def _group_starts(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Indices at which groups of neighbouring positions begin."""
    return np.concatenate(([0], np.flatnonzero(np.diff(positions) != 1) + 1))
