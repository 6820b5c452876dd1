"""``from_pretrained(quantization_config=jackfield.quantization("plugin:NAME"))``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield.contracts import BindContext
from jackfield.errors import PlanError, UsageError
from jackfield.registry.discovery import registry
from jackfield.spelling import parse

if TYPE_CHECKING:
    from transformers.utils.quantization_config import QuantizationConfigMixin


def quantization(selection: str) -> QuantizationConfigMixin:
    """The transformers config of a quantizer backend, for plain transformers code.

    `selection` is ``plugin:NAME?option=value``. Raises SelectionError or OptionError, PlanError
    where this machine cannot run the backend, UsageError where it quantizes nothing.
    """
    parsed = parse(selection)
    registered = registry().find("quantizer", parsed)
    options = registered.options(parsed.arguments)
    if reasons := registered.ask("available"):
        raise PlanError(f"{selection!r} cannot run here: {'; '.join(reasons)}")
    unknown: Any = None  # the model that transformers is going to load
    bound = registered.bind(
        BindContext(model=None, config=unknown, requirements=unknown, options=options)
    )
    if bound.config is None:
        raise UsageError(f"{selection!r} quantizes nothing; leave quantization_config out")
    return bound.config  # type: ignore[no-any-return]
