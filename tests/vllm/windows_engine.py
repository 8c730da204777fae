"""One engine of a model with sliding windows: what test_windows runs in a process of its own.

Prints a JSON line with the answers and figures that the tests judge.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.tokens.hashing import prefix_keys, scope_id

from .blend_ranks_engine import Asked
from .soak import VOCABULARY, make_windowed_model

CHUNK = 32
LENGTH = 21 * CHUNK + 28
CONFIG: dict[str, Any] = {
    # What was deleted is neither found in memory nor missed before it is asked for.
    "store_pipeline": "Posix",
    "index_poll_s": 3600.0,
    "blend_chunk_size": CHUNK,
    "min_gain": None,  # computing is cheaper than anything with this model
}
KINDS: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "one group": {"disable_hybrid_kv_cache_manager": True},
    "two ranks": {},
}


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    make_windowed_model(folder / "model")
    asked = Asked(
        folder,
        2 if kind == "two ranks" else 1,
        CONFIG,
        block_size=32,
        max_num_batched_tokens=160,  # prompts are computed in pieces, whose windows move on
        max_num_seqs=16,
        **KINDS[kind],
    )
    random = np.random.default_rng(3)

    def text(count: int) -> list[int]:
        found: list[int] = random.integers(2, VOCABULARY, count).tolist()
        return found

    prompt = text(LENGTH)
    keys = prefix_keys(np.array(prompt, np.int32), CHUNK, scope_id(cache_salt=None, lora_name=None))
    cold = asked.cold(prompt)
    found: dict[str, Any] = {"cold": cold, "first": asked.ask(prompt)}
    found["stored"] = [len(names) for names in asked.wait_stored((LENGTH + 7) // CHUNK)]
    found["again"] = asked.ask(prompt)

    part = prompt[:300] + text(5)
    found["part"] = [asked.cold(part), asked.ask(part)]
    found["behind_part"] = asked.ask(prompt, fresh=False)

    for name, number in ("in_window", 20), ("behind_window", 3):
        asked.lose(keys[number])
        found[name] = [asked.ask(prompt)]
        asked.wait_stored(found["stored"][0])
        found[name].append(asked.ask(prompt))

    load_plan = asked.ours._load_plan
    asked.ours._load_plan = None  # calling it fails
    found["no_plan"] = asked.ask(prompt)
    asked.ours._load_plan = load_plan

    turn = text(60)
    first = asked.ask(turn, max_tokens=151)
    second = turn + first["tokens"] + text(9)
    asked.wait_stored(found["stored"][0] + 210 // CHUNK)
    found["turns"] = [asked.cold(second), asked.ask(second)]
    found["live"] = asked.ours.live_requests
    print("RESULT" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
