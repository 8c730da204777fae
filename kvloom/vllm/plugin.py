"""Entry point of ``vllm.general_plugins``: runs in every engine process, perhaps several times."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvloom.vllm import compat

_BLEND_MODULE = "kvloom.vllm.blend_connector"
_OLDER_BLEND_MODULE = "ucm.integration.vllm.blend_connector"


def register() -> None:
    """Make the connectors known by name and keep hold of the model that is about to be loaded."""
    _log_as_vllm_does()
    compat.keep_loaded_models()
    if "BlendConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("BlendConnector", _BLEND_MODULE, "BlendConnector")
    # vLLM has a connector of this name built in; only ``kv_connector_module_path`` names ours.
    _alias(_OLDER_BLEND_MODULE, _BLEND_MODULE)


def _log_as_vllm_does() -> None:
    """vLLM sets logging up for its own loggers alone: kvloom's INFO lines would go nowhere.

    Where an application has set up logging for all, kvloom's lines go its way already.
    """
    ours, theirs = logging.getLogger("kvloom"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = theirs.handlers.copy()
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


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
