"""Kernels in engines, and what they do not declare refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from jackfield.planning.solving import reasons_against
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.engines import engine_with, on_invariant_device
from jackfield.testing.kernel.layers import capabilities_of, fits, main_dtype, requirements_of
from jackfield.testing.models import Reference, build
from jackfield.testing.refusals import refused, refused_in_a_plan, undeclared
from jackfield.testing.subject import Subject

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 9], [11, 12, 13]]


def checks(subject: Subject, found: Mapping[str, str]) -> Iterator[Check]:
    """In an engine, for each model that has a layer of its; and refusals."""
    can = capabilities_of(subject)
    for name in dict.fromkeys(found.values()):
        yield Check(f"engine.{name}", "in an engine", partial(_run, subject, name))
    name = next(iter(found.values()), "plain")
    if can.batch_invariant:
        yield Check(
            "engine.deterministic", "batch_invariant, in an engine",
            partial(_run, subject, name, deterministic=True),
        )  # fmt: skip

    def refusal(name: str, capability: str, run: Callable[..., None]) -> Check:
        return Check(f"refusal.{name}", capability, run, refusal=True)

    for own, needs in undeclared(can):
        (what,) = needs
        run = partial(_refused, subject, name, own) if what == "dtype" else partial(_need, subject)
        yield refusal(own, f"{what}s: {own}", partial(run, **needs))
    if not can.batch_invariant:
        yield refusal(
            "batch_invariant", "batch_invariant",
            partial(_refused, subject, name, "deterministic=True", batch_invariant=True),
        )  # fmt: skip
    yield refusal("offloaded", "contract: one device", partial(_need, subject, offloaded=("disk",)))


def _run(subject: Subject, name: str, _: object, **arguments: Any) -> str:
    """Ragged prompts, then decoding; every logit is computed again without the kernel."""
    model: Any = build(name, getattr(torch, main_dtype(subject)), subject.seed)
    needs = requirements_of(subject, model)
    if reasons := reasons_against(subject.registered, needs, subject.options):
        raise NotTriedError(f"it refuses {needs.architecture}: {'; '.join(reasons)}")
    prompts = [tuple(prompt) for prompt in PROMPTS] if name == "bidirectional_prefix" else []
    reference = Reference(model, prompts)
    with engine_with(subject, model, **arguments) as (engine, computed):
        engine.generate(PROMPTS, max_new_tokens=6)
    remark = computed.compare(reference)
    for module in model.modules():
        if "forward" in vars(module) and fits(subject, module):
            raise WrongError(f"{type(module).__name__} keeps the kernel when the engine is closed")
    return remark


def _need(subject: Subject, _: object, **needs: Any) -> None:
    """Raise WrongError unless `refuse` has a reason against a plain job that needs this too."""
    model = build("plain", getattr(torch, main_dtype(subject)))
    refused(subject, requirements_of(subject, model), **needs)


def _refused(subject: Subject, name: str, what: str, _: object, **needs: Any) -> None:
    """Raise WrongError unless the backend and a plan refuse this by its name."""
    _need(subject, None, **needs)
    asked = {"dtype": needs.get("dtype", main_dtype(subject))}
    if "batch_invariant" in needs:
        on_invariant_device(subject)
        asked["deterministic"] = True
    refused_in_a_plan(subject, build(name).config, what, **asked)
