"""Checks in an engine: whatever a strategy guesses, texts are those of plain decoding."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from jackfield.contracts.decoding import DRAFT_SETTINGS, SAMPLER_SETTINGS
from jackfield.demo import DRAFT_PATH
from jackfield.engine.completions import Completion
from jackfield.errors import JackfieldError
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.decoding.asked import ENDS, asked
from jackfield.testing.decoding.plain import compare, exact, plain_engine
from jackfield.testing.engines import engine_with
from jackfield.testing.models import Reference, build
from jackfield.testing.subject import Subject

#: From the smallest up; two repeat themselves.
PROMPTS = ([5], [9, 8, 7, 6, 5, 4], [21, 22, 23] * 6, [40, 41, 42, 43, 44] * 4 + [40, 41])
COUNT = 10
CACHES = ("dynamic", "paged")
#: Each token calls for the next one, so that texts run in circles and drafts come true.
CIRCLE = {(a, 50 + (a - 49) % 6): 60.0 for a in range(50, 56)} | {(50,): 20.0}
TALES = ["Once upon a time", "The cat and the dog, the cat and the dog, the cat", "Tom"]


def checks(subject: Subject) -> Iterator[Check]:
    """Of strategies that are no search."""
    own = subject.backend.capabilities
    yield Check("texts.logits", "contract", lambda cache: _logits(subject, cache), CACHES)
    yield Check("texts.greedy", "contract", lambda case: _greedy(subject, case), _batches())
    yield Check("texts.ends", "contract", lambda cache: _ends(subject, cache), CACHES)
    yield Check("texts.pieces", "contract", lambda case: _pieces(subject, case), (1, 3, 7))
    yield Check("texts.stop_strings", "contract", lambda _: _stop_strings(subject))
    yield Check("texts.structures", "contract", lambda _: _structures(subject))
    if "sequence_bias" in own.settings:
        yield Check("texts.circle", "contract", lambda cache: _circle(subject, cache), CACHES)
    for name in sorted(own.settings & (SAMPLER_SETTINGS | DRAFT_SETTINGS)):
        run = functools.partial(_setting, subject, name)
        yield Check(f"settings.{name}", f"settings: {name}", run, CACHES[:1])


def _batches() -> tuple[str, ...]:
    return tuple(f"{n} prompts, {cache}" for n in (1, len(PROMPTS)) for cache in CACHES)


def needs(subject: Subject, kind: str = "right") -> dict[str, Any]:
    """The draft model, where the subject asks for one."""
    if not subject.wants_draft_model:
        return {}
    return {"assistant_model": _assistant(kind, subject.seed)}


@functools.cache
def _assistant(kind: str, seed: int) -> Any:
    """The model itself, and one that is often wrong."""
    if kind == "right":
        return build("grouped_query", torch.float64, seed)
    shaken = build("grouped_query", torch.float64, seed)
    generator = torch.Generator().manual_seed(seed + 5)
    with torch.no_grad():
        for parameter in shaken.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.numel() > 1:
                parameter.add_(0.02 * parameter.std() * noise)
    return shaken


def run(
    subject: Subject, prompts: Any, settings: list[dict[str, Any]], cache: str, **arguments: Any
) -> tuple[list[Completion], list[Completion]]:
    """What the subject says, and what plain decoding does."""
    return (
        _said(subject, prompts, settings, cache, **arguments),
        _plainly(subject.seed, prompts, settings, cache, **arguments),
    )


def _said(
    subject: Subject, prompts: Any, settings: list[dict[str, Any]], cache: str, **arguments: Any
) -> list[Completion]:
    own = {**needs(subject, "shaken"), **arguments}
    with engine_with(subject, exact(subject.seed), cache_implementation=cache, **own) as (
        engine,
        _,
    ):
        return engine.generate(prompts, settings=settings)


def _plainly(
    seed: int, prompts: Any, settings: list[dict[str, Any]], cache: str, **arguments: Any
) -> list[Completion]:
    own = [{k: v for k, v in one.items() if k not in DRAFT_SETTINGS} for one in settings]
    key = repr((seed, prompts, own, cache, arguments))
    if key not in _KNOWN:
        with plain_engine(exact(seed), cache_implementation=cache, **arguments) as engine:
            _KNOWN[key] = engine.generate(prompts, settings=own)
    return _KNOWN[key]


#: What plain decoding said, by what it was asked.
_KNOWN: dict[str, list[Completion]] = {}


def _logits(subject: Subject, cache: str) -> str:
    """All logits that are computed, those behind drafts too, against a recomputation alone."""
    model = exact(subject.seed)
    reference, remark = Reference(model), ""
    for kind in ("right", "shaken") if needs(subject) else ("right",):
        chosen = {"cache_implementation": cache, **needs(subject, kind)}
        with engine_with(subject, model, **chosen) as (engine, computed):
            found = engine.generate([*PROMPTS], max_new_tokens=COUNT)
        remark = computed.compare(reference)
        for prompt, one in zip(PROMPTS, found, strict=True):
            _greedy_of(reference, prompt, one)
    return remark


def _greedy_of(reference: Reference, prompt: list[int], one: Completion) -> None:
    """Whether each token is the likeliest behind what comes before it, computed again."""
    text = (*prompt, *one.token_ids)
    right = reference.logits(text).argmax(-1).tolist()
    for at in range(len(prompt), len(text)):
        if text[at] != right[at - 1]:
            raise WrongError(
                f"new token {at - len(prompt)} is {text[at]}, and {right[at - 1]} is the likeliest"
            )


def _greedy(subject: Subject, case: str) -> None:
    count, _, cache = case.partition(" prompts, ")
    prompts = [*PROMPTS[: int(count)]]
    settings = [{"max_new_tokens": COUNT + n} for n in range(len(prompts))]
    compare(*run(subject, prompts, settings, cache), when=f"({case})")


def _ends(subject: Subject, cache: str) -> None:
    settings = [{"max_new_tokens": 30, "eos_token_id": ENDS} for _ in PROMPTS]
    compare(*run(subject, [*PROMPTS], settings, cache), when="with EOS tokens")


def _pieces(subject: Subject, piece: int) -> None:
    """Prompts in pieces, and fewer places than requests."""
    settings = [{"max_new_tokens": COUNT} for _ in PROMPTS]
    arguments = {"prefill_chunk_size": piece, "max_batch_size": 2}
    found = run(subject, [*PROMPTS], settings, "paged", **arguments)
    compare(*found, when=f"where prompts are read {piece} tokens at a time")


def _circle(subject: Subject, cache: str) -> str:
    """A text that runs in circles: here guesses come true."""
    settings = [{"max_new_tokens": 40, "sequence_bias": CIRCLE} for _ in PROMPTS]
    found, right = run(subject, [*PROMPTS], settings, cache)
    compare(found, right, when="where the text repeats itself")
    drafted = found[0].report.speculation
    return "no drafts" if drafted is None else str(drafted)


def _setting(subject: Subject, name: str, cache: str) -> None:
    own = subject.backend.capabilities.settings
    settings = []
    for number in range(len(PROMPTS)):
        if (wanted := asked(name, own, number)) is None:
            raise NotTriedError(f"{name} shows only beside settings that are not declared")
        settings.append({"max_new_tokens": COUNT, **wanted})
    compare(*run(subject, [*PROMPTS], settings, cache), when=f"with {name}")


def _stop_strings(subject: Subject) -> None:
    stops = (["e"], [" the", "and "], ["."])
    every = [{"max_new_tokens": 24, "stop_strings": stop} for stop in stops]
    _told(subject, every, "with stop_strings")


_STRUCTURES: list[dict[str, Any]] = [
    {"choices": ["yes", "no, not at all", "no, never"]},
    {"regex": r"[a-z]{3,9} (and [a-z]{2,5} ){2}"},
    {"choices": ["once"]},
]


def _structures(subject: Subject) -> None:
    _told(subject, [{"max_new_tokens": 32, **one} for one in _STRUCTURES], "with a structure")


def _told(subject: Subject, every: list[dict[str, Any]], when: str) -> None:
    """The model inside the package, which has a tokenizer."""
    helper = {"assistant_model": str(DRAFT_PATH)} if subject.wants_draft_model else {}
    with engine_with(subject, "demo", dtype="float64", **helper) as (engine, _):
        try:
            found = engine.generate([*TALES], settings=every)
        except JackfieldError as error:
            if "pip install" in str(error):
                raise NotTriedError(str(error)) from None
            raise
    key = repr(every)
    if key not in _KNOWN:
        with plain_engine("demo", dtype="float64") as engine:
            _KNOWN[key] = engine.generate([*TALES], settings=every)
    compare(found, _KNOWN[key], when)
