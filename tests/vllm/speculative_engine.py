"""An engine that speculates, over a store that is damaged: what test_speculative runs in a process.

Prints a JSON line with the answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .engines import Engine, prose
from .test_survival import flip_bits, unnoticed

OPTIONS: dict[str, Any] = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
    }
}
DOCUMENT, LENGTH, ANSWER = 320, 650, 16


def main() -> None:
    model, store = Path(sys.argv[1]), Path(sys.argv[2])
    engine = Engine(model, store, OPTIONS, store_pipeline="Posix", min_gain=None)
    document = prose(engine, 1, DOCUMENT)
    prompt = document + prose(engine, 2, LENGTH - DOCUMENT)
    found: dict[str, Any] = {}
    with engine.without_store():
        found["cold"] = engine.plain(prompt, ANSWER)
    engine.ask(document)
    engine.forget()
    with unnoticed(engine):
        flip_bits(store)
        for layer in engine.worker._cache.layers:
            layer.cache.normal_()  # as other requests leave it
        damaged = engine.ask(prompt, ANSWER)
        found["failed"], found["damaged"] = damaged.failed, damaged.tokens
    engine.forget()
    again = engine.ask(prompt, ANSWER)
    engine.forget()
    last = engine.ask(prompt, ANSWER)
    found["later"] = [again.tokens, last.tokens]
    found["exact"] = last.figures["exact"]
    print("RESULT" + json.dumps(found), flush=True)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
