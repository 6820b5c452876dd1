"""Engines that run the cache, whose logits are computed again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jackfield.testing import engines
from jackfield.testing.cache.bench import Bench, model_of, reference_of, stepped_reference_of
from jackfield.testing.cache.lossy import LossyReference
from jackfield.testing.checks import NotTriedError, WrongError
from jackfield.testing.engines import Computed, engine_with
from jackfield.testing.models import VOCAB, Reference

if TYPE_CHECKING:
    from jackfield.engine.engine import Engine

LENGTHS = (5, 1, 11, 3)
COUNTS = (9, 12, 3, 6)


def prompts(lengths: Seq[int], first: int = 0) -> list[list[int]]:
    """Token ids of these lengths, always the same ones, no two prompts alike."""
    return [
        [(29 * (first + n) + 13 * i + i * i * (n + 1)) % (VOCAB - 1) + 1 for i in range(length)]
        for n, length in enumerate(lengths, 1)
    ]


@contextlib.contextmanager
def engine_of(
    bench: Bench,
    name: str,
    dtype: str | None = None,
    *,
    what: str = "",
    seed: int = 0,
    chunk: int | None = None,
    **more: Any,
) -> Iterator[tuple[Engine, Computed]]:
    """An engine of one of `MODELS` with the cache, and what it computes."""
    more = {"attn_implementation": "eager", **more}
    dtype = dtype or bench.dtype
    if not seed:
        bench.plan(name, dtype, what, **more)
    model = model_of(name, dtype, seed)
    with engine_with(bench.subject, model, prefill_chunk_size=chunk, **more) as (engine, computed):
        yield engine, computed


def right_for(bench: Bench, name: str, dtype: str, seed: int = 0) -> Reference:
    """What is right, with a bound for what the cache rounds."""
    if rounding := bench.rounds(dtype):
        return LossyReference(model_of(name, dtype, seed), rounding)
    if name in ("linear", "convolution"):
        return stepped_reference_of(name, dtype, seed)
    return reference_of(name, dtype, seed)


def rows(engine: Engine) -> None:
    """Prompts of several lengths, which end at different times; then others."""
    engine.generate(prompts(LENGTHS), settings=[{"max_new_tokens": n} for n in COUNTS])
    engine.generate(prompts((7, 2), 9), max_new_tokens=5)


def alone(engine: Engine) -> None:
    """One after the other."""
    for text in prompts((1, 6, 14)):
        engine.generate(text, max_new_tokens=7)


def samples(engine: Engine) -> None:
    """Several texts that continue one prompt, and the same prompt again."""
    (text,) = prompts((19,))
    wanted: dict[str, Any] = {
        "num_return_sequences": 3,
        "temperature": 0.9,
        "seed": 3,
        "max_new_tokens": 8,
    }
    engine.generate(text, **wanted)
    engine.generate([text, text[:11], [*text, 4]], max_new_tokens=4)


def salts(engine: Engine) -> None:
    """Prompts that begin alike, with and without a salt."""
    (text,) = prompts((40,))
    for salt in ("", "a", "", "b", "a"):
        engine.generate([*text, 3], max_new_tokens=3, cache_salt=salt)


def beams(engine: Engine) -> None:
    """Two searches beside one another."""
    engine.generate(prompts((7, 3)), num_beams=3, num_return_sequences=2, max_new_tokens=9)
    engine.generate(prompts((13,)), num_beams=4, max_new_tokens=6)


def long(engine: Engine) -> None:
    """A prompt that is far longer than windows and pages."""
    engine.generate(prompts((150, 37)), max_new_tokens=12)


@dataclass(eq=False)
class Guesses:
    """Drafts of which some are right: the text that was found before, and then others."""

    engine: Engine
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        decoder = self.engine._loop.decoding
        inner = decoder.propose

        def propose(sequences: Any) -> list[list[int]]:
            inner(sequences)
            return [self.of(sequence) for sequence in sequences]

        decoder.propose = propose  # type: ignore[method-assign]

    def of(self, sequence: Any) -> list[int]:
        room = sequence.settings.max_new_tokens - sequence.num_new - 1
        whole = self.known.get(tuple(sequence.tokens[: sequence.prompt_length]))
        if whole is None or len(sequence.tokens) - sequence.num_cached != 1:
            return []
        at, right = sequence.num_new, (sequence.id + sequence.num_new) % 4
        drafts = whole[at : at + min(room, 3)]
        return [(t + 1) % VOCAB if n >= right else t for n, t in enumerate(drafts)]


def drafts(engine: Engine) -> None:
    """Rows that keep different numbers of their drafts, and end at different times."""
    guesses = Guesses(engine)
    texts, settings = prompts(LENGTHS), [{"max_new_tokens": n} for n in COUNTS]
    found = engine.generate(texts, settings=settings)
    guesses.known = {tuple(text): own.token_ids for text, own in zip(texts, found, strict=True)}
    again = engine.generate(texts, settings=settings)
    seen = engine.report().speculation
    if seen is None or not seen.accepted or seen.accepted == seen.proposed:
        raise NotTriedError("no draft was kept, or all were")
    _same([own.token_ids for own in found], [own.token_ids for own in again], "with drafts")


def _same(found: list[list[int]], again: list[list[int]], how: str) -> None:
    for number, (one, other) in enumerate(zip(found, again, strict=True)):
        if one != other:
            raise WrongError(f"request {number} has another text {how}: {other}, {one} without")


def preemptions(engine: Engine) -> None:
    """Now and then there is no room, so that the youngest makes some."""
    cache = engine._loop.cache
    inner, calls = cache.fits, [0]

    def fits(step: Any) -> bool:
        calls[0] += 1
        several = len({item.sequence.members[0].id for item in step.scheduled}) > 1
        return inner(step) and not (several and calls[0] % 5 in (3, 4))

    cache.fits = fits  # type: ignore[method-assign]
    rows(engine)
    if not engine.statistics().preemptions:
        raise NotTriedError("nobody was preempted")


def failures(engine: Engine) -> None:
    """A model that fails in a step; the next requests find nothing of it."""
    rows(engine)
    loop = engine._loop
    forward, calls = loop.forward, [0]

    def failing(inputs: Any) -> Any:
        calls[0] += 1
        found = forward(inputs)
        if calls[0] in (1, 4, 6):
            raise RuntimeError("the kit's own failure")
        return found

    loop.forward = failing
    for text in prompts((9, 4, 40)):
        with contextlib.suppress(Exception):
            engine.generate([text, *prompts(LENGTHS)], max_new_tokens=6)
    loop.forward = forward
    rows(engine)
    engine.generate(prompts((9, 4, 40)), max_new_tokens=3)  # those of the steps that failed


def filled(engine: Engine) -> None:
    """Long prompts again and again, of which a small pool has room for few."""
    for _ in range(3):
        for text in prompts((40, 33, 50, 41, 60, 39)):
            engine.generate([text, text[:34]], max_new_tokens=4)


def cancellations(engine: Engine) -> None:
    """Readers that leave in the middle of a text, while others go on."""
    streams: list[Any] = [engine.stream(text, max_new_tokens=12) for text in prompts(LENGTHS)]
    for number, stream in enumerate(streams):
        for _ in range(number + 1):
            next(stream, None)
        if number % 2:
            stream.close()
    for stream in streams[::2]:
        for _ in stream:
            pass
    rows(engine)


def two_engines(bench: Bench, name: str) -> str:
    """Two models with a cache each, whose steps go in turn."""
    bench.plan(name)
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(engine_of(bench, name, seed=seed)) for seed in (0, 1)]
        pairs = [
            engine.stream(text, max_new_tokens=10)
            for text in prompts((6, 13))
            for engine, _ in engines
        ]
        for _ in range(12):
            for stream in pairs:
                next(stream, None)
    found = [
        computed.compare(right_for(bench, name, bench.dtype, seed))
        for seed, (_, computed) in enumerate(engines)
    ]
    return "; ".join(found)


def overlapping(bench: Bench, name: str) -> str:
    """Steps that are laid out before their last tokens are known, as on a GPU: the same texts.

    Prompts come that go on as these texts began, and with other tokens, while they run.
    """
    bench.plan(name)
    texts, settings = prompts(LENGTHS), [{"max_new_tokens": n} for n in (40, 9, 33, 21)]
    known = _texts(bench, name, texts, settings, overlaps=False)
    for text, own in zip(list(texts), known, strict=True):
        more = [[*text, *own[:count], 0, 5] for count in range(1, len(own))]
        texts += more
        settings += [{"max_new_tokens": 3}] * len(more)
    due, found = (_texts(bench, name, texts, settings, overlaps=how) for how in (False, True))
    for number, (right, own) in enumerate(zip(due, found, strict=True)):
        if right != own:
            raise WrongError(
                f"text {number} is {own} where steps are begun before the last tokens are read, "
                f"and else {right}: what `prepare` does with a placeholder is not undone"
            )
    return f"{len(due)} texts"


def _texts(
    bench: Bench, name: str, texts: list[list[int]], settings: list[Any], *, overlaps: bool
) -> list[list[int]]:
    more: dict[str, Any] = {"attn_implementation": "eager", "max_batch_size": 4}
    with engines.engine_of(bench.subject, model_of(name, bench.dtype), **more) as engine:
        if not getattr(engine._bound.cache, "overlaps", False):
            raise NotTriedError("does not say `overlaps`: each step waits for the last one")
        engine._loop.overlaps = overlaps
        done = engine.generate(texts, settings=settings)
    return [one.token_ids for one in done]


Run = Callable[["Engine"], None]
