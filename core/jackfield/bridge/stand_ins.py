"""Functions that stand in for a model's attention, masks and experts while it is looked at."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface

from jackfield.bridge.config_files import config_tree
from jackfield.bridge.encoders import has_encoder, part_configs

_serial = itertools.count(1)


@contextlib.contextmanager
def standing_in(
    model: PreTrainedModel,
    *,
    attention: Callable[..., Any] | None,
    experts: Callable[..., Any],
    mask: Callable[..., Any] | None,
) -> Iterator[None]:
    """Have `model` call these, under a name of their own in transformers' tables.

    Changes: the configs of `model`, for good. `attention` None: its own, as it is; `mask` None:
    transformers makes none.
    """
    key = f"jackfield-stand-in-{next(_serial)}"
    parts = part_configs(model) if has_encoder(model.config) else ()
    for config in (*config_tree(model.config), *parts):
        config._attn_implementation_internal = "eager" if attention is None else key
        config._experts_implementation_internal = key
    tables: tuple[tuple[Any, Callable[..., Any] | None], ...] = (
        (AttentionInterface, attention),
        (AttentionMaskInterface, mask),
        (ExpertsInterface, experts),
    )
    for table, function in tables:
        if function is not None:
            table.register(key, function)
    try:
        yield
    finally:
        for table, _ in tables:
            table._global_mapping.pop(key, None)
