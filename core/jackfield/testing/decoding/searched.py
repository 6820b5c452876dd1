"""Checks of searches in an engine: every beam's logits, and texts that end as they should."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.decoding.asked import ENDS, EVERY, asked, few
from jackfield.testing.decoding.beam_reference import Asked, search
from jackfield.testing.decoding.beams import EXACT
from jackfield.testing.decoding.plain import exact
from jackfield.testing.decoding.texts import CACHES, PROMPTS
from jackfield.testing.engines import engine_with
from jackfield.testing.models import Reference
from jackfield.testing.subject import Subject

COUNT = 6


def checks(subject: Subject) -> Iterator[Check]:
    """Of strategies that declare `forks`."""
    own = subject.backend.capabilities
    yield Check("texts.logits", "forks", lambda cache: _logits(subject, cache), CACHES)
    yield Check("texts.preempted", "forks", lambda _: _preempted(subject))
    if own.settings >= EXACT:
        yield Check("texts.exact", "settings: num_beams", lambda c: _exactly(subject, c), CACHES)
    for name in sorted(own.settings & EVERY):
        run = functools.partial(_setting, subject, name)
        yield Check(f"settings.{name}", f"settings: {name}", run)


def _logits(subject: Subject, cache: str) -> str:
    """Of each beam, computed again from its beginning."""
    model = exact(subject.seed)
    with engine_with(subject, model, cache_implementation=cache) as (engine, computed):
        _complete(engine.generate([*PROMPTS], max_new_tokens=COUNT))
        _complete(engine.generate([*PROMPTS], max_new_tokens=COUNT, eos_token_id=ENDS))
    return computed.compare(Reference(model))


def _complete(found: Any) -> None:
    for number, one in enumerate(found):
        if one.error is not None or not one.token_ids:
            raise WrongError(f"request {number} ended without a text: {one.error}")


def _preempted(subject: Subject) -> str:
    """Pages for some of the requests: groups lose their memory and are read again."""
    model = exact(subject.seed)
    cache = "paged?page_size=4&num_tokens=160"
    with engine_with(subject, model, cache_implementation=cache) as (engine, computed):
        _complete(engine.generate([*PROMPTS], max_new_tokens=COUNT))
    return computed.compare(Reference(model))


def _exactly(subject: Subject, cache: str) -> None:
    model = exact(subject.seed)
    reference = Reference(model)
    wanted: dict[str, Any] = {"num_beams": 3, "length_penalty": 0.5, "early_stopping": False}
    with engine_with(subject, model, cache_implementation=cache) as (engine, _):
        found = engine.generate([*PROMPTS], max_new_tokens=COUNT, eos_token_id=ENDS, **wanted)
    for prompt, one in zip(PROMPTS, found, strict=True):
        right = search(
            Asked(
                scores=lambda t, p=prompt: (  # type: ignore[misc]
                    reference.logits((*p, *t))[-1].float().log_softmax(-1).tolist()
                ),
                ends=lambda t: len(t) >= COUNT or t[-1] in ENDS,
                max_new_tokens=COUNT,
                num_eos=len(ENDS),
                **wanted,
            )
        )
        if one.token_ids != list(right[0][0]):
            raise WrongError(
                f"finds {one.token_ids} behind {len(prompt)} tokens, and beam search "
                f"{list(right[0][0])}"
            )


def _setting(subject: Subject, name: str, _: object) -> None:
    """It runs with the setting, and what was asked for is seen in the text."""
    wanted = asked(name, subject.backend.capabilities.settings, 0)
    if wanted is None:
        raise NotTriedError(f"{name} shows only beside settings that are not declared")
    with engine_with(subject, exact(subject.seed)) as (engine, _):
        found = engine.generate([*PROMPTS], **{"max_new_tokens": 10, **wanted})
    _complete(found)
    is_so = _SEEN.get(name, lambda _: True)
    for one in found:
        if not is_so(one.token_ids):
            raise WrongError(f"the text {one.token_ids} was made with {name}={wanted[name]!r:.60}")


_SEEN: dict[str, Any] = {
    "bad_words_ids": lambda text: all(token % 2 for token in text),
    "begin_suppress_tokens": lambda text: text[0] % 2 == 1,
    "forced_eos_token_id": lambda text: text[-1] == 3 or len(text) < 10,
    "logits_processor": lambda text: all(token % 2 == 0 for token in text),
    "min_new_tokens": lambda text: len(text) >= 5,
    "no_repeat_ngram_size": lambda text: len(set(text)) == len(text),
    "suppress_tokens": lambda text: min(text) >= 40,
    "prefix_allowed_tokens_fn": lambda text: all(
        b in few(0, [a]) for a, b in itertools.pairwise(text)
    ),
}
