"""Configs whose layers differ in a field (transformers' `per_layer_config`: Gemma 4, Step 3).

Such a config raises where the field is read of the model as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedConfig


def of_all(config: PreTrainedConfig, name: str, default: Any = None) -> Any:
    """What `config` says of all layers that it says nothing else of."""
    return config._getattr_without_heterogeneous_validation(name, default)


def of_layer(config: PreTrainedConfig, layer: int, name: str) -> Any:
    """What it says of one layer; None: nothing."""
    return of_some(config).get(layer, {}).get(name, of_all(config, name))


def of_some(config: PreTrainedConfig) -> Mapping[int, Mapping[str, Any]]:
    """What it says of single layers, by their number."""
    spec = getattr(config, "_heterogeneity_spec", None)
    return {} if spec is None else spec.per_layer_overrides
