"""Entry point of ``vllm.general_plugins``: runs in every engine process, perhaps several times."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvloom.vllm import compat

_BLEND_MODULE = "kvloom.vllm.blend_connector"
_OLDER_BLEND_MODULE = "ucm.integration.vllm.blend_connector"


def register() -> None:
    """Make the connectors known by name and keep hold of the model that is about to be loaded."""
    compat.keep_loaded_models()
    if "BlendConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("BlendConnector", _BLEND_MODULE, "BlendConnector")
    # vLLM has a connector of this name built in; only ``kv_connector_module_path`` names ours.
    _alias(_OLDER_BLEND_MODULE, _BLEND_MODULE)


class _Alias(ModuleType):
    """A module that is another one, imported when something is first asked of it."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"Alias of {target}.")
        self._target = target

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self._target), name)


def _alias(name: str, target: str) -> None:
    """Let configs that still say ``name`` load ``target``, unless that package is really there."""
    package = name.partition(".")[0]
    if name in sys.modules or importlib.util.find_spec(package) is not None:
        return
    sys.modules[name] = _Alias(name, target)
