"""The model of the quality benchmark: chosen tokens over a cache that anyone may write to.

transformers runs the layers; its cache is one tensor, [layers, 2, tokens, heads, head_dim] as in a
stored payload, in which the tokens at hand overwrite their own places. That is what RecomputeEngine
does in vLLM's paged cache, without an engine around it, and with the queries and keys at hand that
a policy may ask for. A test holds both to the same KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Watch = Callable[[int, Tensor, Tensor, Tensor], bool]
"""(layer, queries, keys, values) of the tokens at hand, each [tokens, heads, head_dim], after RoPE;
answers whether to go on."""


class _LeaveError(Exception):
    """Ends a forward early: what was asked for is known."""


class CacheModel:
    """A causal language model over caches of ours.

    Args:
        folder: of the model, in Hugging Face's format.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("kvloom_bench", self._attend)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="kvloom_bench"
        )
        config = self._model.config
        self.layers = int(config.num_hidden_layers)
        self.heads = int(config.num_key_value_heads)
        self.head_dim = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self.rope_base = float(config.rope_parameters["rope_theta"])
        self._mask = torch.empty(0)
        self._watch: Watch | None = None

    def empty_cache(self, tokens: int) -> Tensor:
        return torch.zeros(self.layers, 2, tokens, self.heads, self.head_dim)

    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """The whole cache of a text."""
        cache = self.empty_cache(len(token_ids))
        self.compute(cache, torch.tensor(token_ids), torch.arange(len(token_ids)))
        return cache

    @torch.inference_mode()
    def compute(
        self,
        cache: Tensor,
        token_ids: Tensor,
        slots: Tensor,
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Fill ``cache`` at ``slots``, each token seeing the slots up to its own.

        Args:
            token_ids, slots: int64 [tokens]; slots ascending.
            positions: of the tokens, where they are not the slots.
            mask: bool [tokens, tokens of the cache], where it is not causal by slots.
            watch: sees every layer before its attention.

        Returns:
            Hidden states behind the last layer, [tokens, width]; nothing where ``watch`` ended the
            pass.
        """
        if mask is None:
            mask = torch.arange(cache.shape[2]) <= slots[:, None]
        self._mask, self._watch = mask, watch
        try:
            out = self._model.model(
                input_ids=token_ids[None],
                position_ids=(slots if positions is None else positions)[None],
                attention_mask=mask[None, None],
                past_key_values=_Slots(cache, slots),
                use_cache=True,
            )
        except _LeaveError:
            return torch.empty(0)
        finally:
            self._watch = None
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    @torch.inference_mode()
    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Of the next token, [tokens, vocabulary]."""
        logits: Tensor = self._model.lm_head(hidden)
        return logits.log_softmax(dim=-1)

    def _attend(
        self,
        module: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if self._watch is not None and not self._watch(
            module.layer_idx,
            queries[0].transpose(0, 1),
            keys[0].transpose(0, 1),
            values[0].transpose(0, 1),
        ):
            raise _LeaveError
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=attention_mask, enable_gqa=True
        )
        return out.transpose(1, 2), None


class _Slots:
    """What transformers takes for a cache: writes to our slots, reads all of them."""

    def __init__(self, cache: Tensor, slots: Tensor) -> None:
        self._cache = cache
        self._slots = slots

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        part = self._cache[layer]
        part[0, self._slots] = keys[0].transpose(0, 1)
        part[1, self._slots] = values[0].transpose(0, 1)
        return part[0].transpose(0, 1)[None], part[1].transpose(0, 1)[None]

    def get_seq_length(self, *args: Any) -> int:
        return 0
