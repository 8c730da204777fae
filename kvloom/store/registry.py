"""Stages by name, pipelines by text, and one store a process for those who ask for the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from kvloom.config import ConfigError, KvloomConfig, known_names
from kvloom.store.base import Store
from kvloom.store.cache import Cache
from kvloom.store.pipeline import Pipeline
from kvloom.store.posix import Posix

StageFactory = Callable[[str, KvloomConfig], Store]

_BUILT_IN: dict[str, StageFactory] = {"Cache": Cache.from_config, "Posix": Posix.from_config}
_SEPARATOR = "|"


def open_store(namespace: str, config: KvloomConfig) -> Store:
    """The store that ``store_pipeline`` describes.

    Raises:
        ConfigError: a stage that nobody provides.
    """
    names = [name.strip() for name in config.store_pipeline.split(_SEPARATOR)]
    stages = [_factory(name, config)(namespace, config) for name in names]
    return stages[0] if len(stages) == 1 else Pipeline(stages)


def _factory(name: str, config: KvloomConfig) -> StageFactory:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    third_party = {entry.name: entry for entry in entry_points(group="kvloom.stages")}
    if name in third_party:
        factory: StageFactory = third_party[name].load()
        return factory
    names = known_names(name, [*_BUILT_IN, *third_party])
    raise ConfigError(f"store_pipeline = {config.store_pipeline!r}: no stage {name!r}, {names}")


@dataclass
class _Shared:
    store: Store
    users: int


_shared: dict[tuple[str, str], _Shared] = {}
_shared_lock = threading.Lock()


def acquire_store(namespace: str, config: KvloomConfig) -> Store:
    """This process's store for a namespace and config; give it back by ``release_store``.

    The engine's scheduler and worker sides often live in one process: they then share a store, and
    with it the ``Cache`` stage and word of each write.

    Raises:
        ConfigError: as ``open_store``.
    """
    key = (namespace, config.model_dump_json())
    with _shared_lock:
        if key not in _shared:
            _shared[key] = _Shared(open_store(namespace, config), users=0)
        _shared[key].users += 1
        return _shared[key].store


def release_store(store: Store) -> None:
    """Give up an acquired store; the last user's release closes it."""
    with _shared_lock:
        for key, shared in list(_shared.items()):
            if shared.store is store:
                shared.users -= 1
                if shared.users:
                    return
                del _shared[key]
    store.close()
