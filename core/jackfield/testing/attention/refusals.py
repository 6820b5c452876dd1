"""What an attention does not declare must be refused: by itself, and when a job is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jackfield.contracts.requirements import FEATURES, LAYOUTS
from jackfield.testing.attention.crossing import config_for
from jackfield.testing.attention.jobs import (
    capabilities_of,
    main_dtype,
    model_of,
    requirements_of,
)
from jackfield.testing.attention.whole import CACHES, MODELS
from jackfield.testing.checks import Check
from jackfield.testing.engines import on_invariant_device
from jackfield.testing.models import config_of
from jackfield.testing.refusals import refused, refused_in_a_plan, undeclared
from jackfield.testing.subject import Subject

#: A feature -> the model that needs it.
_NEEDING = {feature: name for name, feature in reversed(MODELS.items()) if feature}


def checks(subject: Subject) -> Iterator[Check]:
    can = capabilities_of(subject)

    def check(name: str, capability: str, run: Callable[[], None]) -> Check:
        return Check(f"refusal.{name}", capability, lambda _: run(), refusal=True)

    for feature in sorted(FEATURES.keys() - can.features):
        yield check(feature, f"features: {feature}", lambda f=feature: _feature(subject, f))  # type: ignore[misc]
    for layout in sorted(set(LAYOUTS) - can.layouts):
        yield check(layout, f"layouts: {layout}", lambda own=layout: _layout(subject, own))  # type: ignore[misc]
    for name, needs in undeclared(can):
        (what,) = needs
        run = _dtype if what == "dtype" else _need
        yield check(name, f"{what}s: {name}", partial(run, subject, **needs))
    if can.head_dims is not None:
        yield check("head_dims", "head_dims", lambda: _head_dim(subject))
    if not can.batch_invariant:
        yield check("batch_invariant", "batch_invariant", lambda: _invariant(subject))


def _need(subject: Subject, **needs: Any) -> None:
    """Raise WrongError unless `refuse` has a reason against a plain job that needs this too."""
    layout = "padded" if "padded" in capabilities_of(subject).layouts else "packed"
    refused(subject, requirements_of(subject, model_of(subject, "plain"), layout), **needs)


def _planned(subject: Subject, config: Any, what: str, **arguments: Any) -> None:
    """Raise WrongError unless a plan refuses the backend by name."""
    arguments.setdefault("dtype", main_dtype(subject))
    refused_in_a_plan(subject, config, what, **arguments)


def _feature(subject: Subject, feature: str) -> None:
    _need(subject, features={feature: "asked by the check"})
    if feature == "bidirectional_blocks":  # no plan asks for it, an image does
        return
    if feature == "cross_attention":
        config: Any = config_for(subject)
    else:
        config = model_of(subject, _NEEDING[feature]).config
    _planned(subject, config, f"a model of type {config.model_type!r}, which needs {feature},")


def _layout(subject: Subject, layout: str) -> None:
    _need(subject, layout=layout)
    config = model_of(subject, "plain").config
    _planned(subject, config, f"the {layout} layout", cache_implementation=CACHES[layout])


def _dtype(subject: Subject, dtype: str) -> None:
    _need(subject, dtype=dtype)
    _planned(subject, model_of(subject, "plain").config, dtype, dtype=dtype)


def _head_dim(subject: Subject) -> None:
    sizes = capabilities_of(subject).head_dims or frozenset()
    odd = next(size for size in (14, 20, 22, 26, 258, 514) if size not in sizes)
    _need(subject, head_dims=(odd,))
    config = config_of("plain", head_dim=odd)
    _planned(subject, config, f"heads of {odd}")


def _invariant(subject: Subject) -> None:
    _need(subject, batch_invariant=True)
    on_invariant_device(subject)
    config = model_of(subject, "plain").config
    _planned(subject, config, "deterministic=True", deterministic=True)
