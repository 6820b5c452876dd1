"""Checks of searches that draw: by the request's seed alone, and by the right chances."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.decoding.beams import bound, group_of
from jackfield.testing.decoding.groups import Language, run, step, texts_of
from jackfield.testing.subject import Subject

DRAWS = 1500
VOCAB = 6
WIDTH = 2
#: The 0.9999 quantiles of chi-square, for 1 to 15 degrees of freedom (Abramowitz and Stegun 26.8).
QUANTILES = (
    15.14, 18.42, 21.11, 23.51, 25.74, 27.86, 29.88, 31.83, 33.72, 35.56, 37.37, 39.13, 40.87,
    42.58, 44.26,
)  # fmt: skip

Pair = tuple[int, ...]


def checks(subject: Subject) -> Iterator[Check]:
    """Of searches that declare do_sample."""
    every = {"seeds": _seeds, "batch": _batch, "chances": _chances}
    for name, run_ in every.items():
        yield Check(f"draws.{name}", "settings: do_sample", functools.partial(run_, subject))


def _found(subject: Subject, seed: int, count: int = 1) -> list[tuple[Pair, float]]:
    strategy = bound(subject)
    groups = [
        group_of(subject, strategy, n, do_sample=True, seed=seed + 100 * n, max_new_tokens=5)
        for n in range(count)
    ]
    run(strategy, groups, Language(11, 1))
    return texts_of(groups[0])


def _seeds(subject: Subject, _: object) -> None:
    """Two seeds mostly draw two texts; one always the same."""
    found = [_found(subject, seed) for seed in range(12)]
    if len({repr(one) for one in found}) == 1:
        raise WrongError("12 seeds find the same texts where a request samples")
    for seed in range(3):
        if _found(subject, seed) != found[seed]:
            raise WrongError(f"seed {seed} finds another text the second time")


def _batch(subject: Subject, _: object) -> None:
    for seed in range(4):
        if _found(subject, seed) != _found(subject, seed, count=3):
            raise WrongError(
                f"seed {seed} finds another text where other requests run beside it: draw by the "
                "request's own seed and place"
            )


def _chances(subject: Subject, _: object) -> str:
    """Which beams the first step goes on with, over many seeds (Pearson's chi-square)."""
    if "num_beams" not in subject.backend.capabilities.settings:
        raise NotTriedError("its width cannot be chosen")
    language, strategy = Language(VOCAB, 4), bound(subject)
    counts: Counter[Pair] = Counter()
    for seed in range(DRAWS):
        asked = {"num_beams": WIDTH, "do_sample": True, "seed": seed, "max_new_tokens": 4}
        group = group_of(subject, strategy, 0, **asked)
        decision = step(strategy, [group], language)[0]
        counts[tuple(sorted(beam.token for beam in decision.beams))] += 1
        strategy.release(tuple(group.members))
    chances = [math.exp(x) for x in language.scores(()).tolist()]
    found = {}
    for name, expected in _schemes(chances).items():
        found[name] = _chi_square(counts, expected)
    fits = [name for name, (value, most) in found.items() if value <= most]
    if not fits:
        name, (value, most) = min(found.items(), key=lambda one: one[1][0])
        raise WrongError(
            f"{DRAWS} draws are not by the chances of tokens: chi-square is {value:.0f}, at most "
            f"{most:.0f} is chance (nearest: {name})"
        )
    return f"drawn {fits[0]}"


def _schemes(chances: list[float]) -> dict[str, dict[Pair, float]]:
    """Ways to draw beams without replacement: pairs of tokens, and their chances."""
    every = range(len(chances))

    def best(order: Pair) -> Pair:
        return tuple(sorted(sorted(order, key=lambda t: -chances[t])[:WIDTH]))

    schemes: dict[str, tuple[int, Callable[[Pair], Pair]]] = {
        "two for each beam, of which the best go on": (2 * WIDTH, best),
        "as many as there are beams": (WIDTH, lambda order: tuple(sorted(order))),
    }
    found = {}
    for name, (count, kept) in schemes.items():
        expected: defaultdict[Pair, float] = defaultdict(float)
        for order in itertools.permutations(every, count):
            chance, left = 1.0, 1.0
            for token in order:
                chance *= chances[token] / left
                left -= chances[token]
            expected[kept(order)] += chance
        found[name] = dict(expected)
    return found


def _chi_square(counts: Counter[Pair], expected: dict[Pair, float]) -> tuple[float, float]:
    """The statistic, rare cells joined, and what it is at most in 9,999 of 10,000 cases."""
    if any(pair not in expected for pair in counts):
        return math.inf, 0.0
    cells: list[tuple[float, float]] = []
    rare = [0.0, 0.0]
    for pair, chance in expected.items():
        if chance * DRAWS >= 8:
            cells.append((counts[pair], chance * DRAWS))
        else:
            rare[0] += counts[pair]
            rare[1] += chance * DRAWS
    if rare[1] >= 8:
        cells.append((rare[0], rare[1]))
    value = sum((seen - right) ** 2 / right for seen, right in cells)
    return value, QUANTILES[min(len(cells) - 2, len(QUANTILES) - 1)]
