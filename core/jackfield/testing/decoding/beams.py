"""Checks of searches: called directly, with a language of a few tokens that is known."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, cast

from jackfield.contracts import Search
from jackfield.contracts.settings import BeamSettings
from jackfield.testing.checks import Check, WrongError
from jackfield.testing.decoding.beam_reference import Asked, search
from jackfield.testing.decoding.bound import bind
from jackfield.testing.decoding.groups import Language, LentGroup, run, step, texts_of
from jackfield.testing.lent import lend
from jackfield.testing.memory import growth, quick_collection
from jackfield.testing.subject import Subject

EXACT = {"num_beams", "length_penalty", "early_stopping"}


def checks(subject: Subject) -> Iterator[Check]:
    """What a search must do, whatever it looks for."""
    own = subject.backend.capabilities.settings
    every: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
        "width": ("forks", _width, (2, 3, 5)),
        "rules": ("forks", _rules, ((2, 4, 1), (2, 4, 2), (2, 2, 5), (3, 11, 6), (6, 11, 12))),
        "forbidden": ("forks", _forbidden, (0.3, 0.7, 0.95, 1.0)),
        "eos": ("forks", _eos, ((1, 0), (3, 0), (3, 4), (9, 2))),
        "stop_strings": ("forks", _stops, (2, 4)),
        "together": ("forks", _together, (2, 3, 5)),
        "repeatable": ("forks", _repeatable, (False, True) if "do_sample" in own else (False,)),
        "release": ("forks", _release, (1, 4)),
        "release_unknown": ("forks", _release_unknown, ("",)),
        "forgets": ("forks", _forgets, ("",)),
    }
    if "num_beams" in own:
        every["widest"] = ("settings: num_beams", _widest, (2, 3))
        every["likeliest"] = ("settings: num_beams", _likeliest, (2, 4))
    if own >= EXACT:
        for name, cases in EXACTLY.items():
            every[f"exact.{name}"] = (f"settings: {name}", _exactly, cases)
        if own >= {"num_beam_groups", "diversity_penalty"}:
            for name, cases in APART.items():
                every[f"exact.{name}"] = (f"settings: {name}", _exactly, cases)
    for name, (capability, check, cases) in every.items():
        yield Check(f"beams.{name}", capability, functools.partial(check, subject), cases)


def bound(subject: Subject) -> Search:
    return cast("Search", bind(subject))


def group_of(
    subject: Subject, strategy: Search, number: int = 0, *, stops: Any = lambda _: False,
    **asked: Any,
) -> LentGroup:  # fmt: skip
    """A group as wide as the strategy says. `asked`: settings, also those of beams."""
    beams = {name: asked.pop(name) for name in BeamSettings._fields if name in asked}
    settings = {
        "max_new_tokens": 6, "decoding": subject.registered.name,
        "beams": BeamSettings(**beams), **asked,
    }  # fmt: skip
    width = strategy.width(lend(0, [5], **settings).settings)
    if type(width) is not int or width < 1:
        raise WrongError(f"width must return a whole number from 1 on, not {width!r:.40}")
    return LentGroup(number, [5, 6, 7][: 1 + number % 3], width, settings, stops)


def _declared(subject: Subject, **asked: Any) -> dict[str, Any]:
    """What of `asked` it declares."""
    known = subject.backend.capabilities.settings
    return {name: value for name, value in asked.items() if name in known}


def _width(subject: Subject, wanted: int) -> None:
    strategy = bound(subject)
    asked = _declared(subject, num_beams=wanted)
    first, second = (group_of(subject, strategy, **asked).width for _ in range(2))
    if first != second:
        raise WrongError(f"width says {first}, and {second} for the same request")
    if asked and first != wanted:
        raise WrongError(f"width says {first} where num_beams={wanted} is asked for")


def _rules(subject: Subject, case: tuple[int, int, int]) -> None:
    width, vocab, most = case
    for seed in range(4):
        strategy = bound(subject)
        asked = _declared(subject, num_beams=width)
        group = group_of(subject, strategy, max_new_tokens=most, **asked)
        run(strategy, [group], Language(vocab, seed))
        _found_something(group)


def _found_something(group: LentGroup) -> None:
    if not group.hypotheses:
        raise WrongError("a search ended without a text, where tokens were allowed")


def _forbidden(subject: Subject, share: float) -> None:
    for seed in range(6):
        strategy = bound(subject)
        group = group_of(subject, strategy, **_declared(subject, num_beams=3))
        run(strategy, [group], Language(11, seed, forbidden=share))


def _eos(subject: Subject, case: tuple[int, int]) -> None:
    count, least = case
    eos = tuple(range(count))
    for seed in range(6):
        strategy = bound(subject)
        asked = _declared(subject, num_beams=3)
        group = group_of(
            subject, strategy, eos_token_ids=eos, max_new_tokens=9, min_new_tokens=least, **asked
        )
        run(strategy, [group], Language(11, seed, eos=eos, least=least))
        _found_something(group)


def _stops(subject: Subject, width: int) -> None:
    """Texts that end by what they say, which only `BeamGroup.ends` knows."""
    for seed in range(6):
        strategy = bound(subject)
        asked = _declared(subject, num_beams=width)
        group = group_of(
            subject, strategy, max_new_tokens=8, **asked, stops=lambda t: sum(t) % 5 == 3
        )
        run(strategy, [group], Language(11, seed))
        _found_something(group)


def _together(subject: Subject, count: int) -> None:
    """Groups that are decided together, of several widths and ages, are decided as alone."""

    def made(strategy: Search, number: int) -> LentGroup:
        asked = _declared(subject, num_beams=2 + number % 3)
        return group_of(subject, strategy, number, max_new_tokens=5 + number, **asked)

    alone = []
    for number in range(count):
        strategy = bound(subject)
        group = made(strategy, number)
        run(strategy, [group], Language(11, 3))
        alone.append(texts_of(group))
    strategy = bound(subject)
    groups = [made(strategy, number) for number in range(count)]
    going: list[LentGroup] = []
    coming = list(groups)
    while going or coming:
        going += coming[:1]
        del coming[:1]
        going = going[::-1]
        found = step(strategy, going, Language(11, 3))
        going = [g for g, d in zip(going, found, strict=True) if d.beams]
    for number, group in enumerate(groups):
        if texts_of(group) != alone[number]:
            raise WrongError(
                f"group {number} finds {texts_of(group)[:1]} beside others, and "
                f"{alone[number][:1]} alone: what is decided depends on the batch"
            )


def _repeatable(subject: Subject, draws: bool) -> None:
    found = []
    for _ in range(2):
        strategy = bound(subject)
        asked = _declared(subject, num_beams=3)
        group = group_of(subject, strategy, do_sample=draws, seed=5, **asked)
        run(strategy, [group], Language(11, 1))
        found.append(texts_of(group))
    if found[0] != found[1]:
        raise WrongError(
            f"the same request finds {found[1][:1]} the second time, not {found[0][:1]}"
        )


def _widest(subject: Subject, length: int) -> None:
    """With beams for all texts that there are, the best of them has to be found."""
    language, vocab = Language(4, 2), 4
    strategy = bound(subject)
    asked = _declared(subject, length_penalty=1.0, early_stopping=False)
    group = group_of(subject, strategy, num_beams=vocab**length, max_new_tokens=length, **asked)
    run(strategy, [group], language)
    _found_something(group)
    every = itertools.product(range(vocab), repeat=length)
    best = max(every, key=lambda text: _total(language, text))
    if (found := group.hypotheses[0].tokens) != best:
        raise WrongError(
            f"with as many beams as there are texts it finds {list(found)}, and {list(best)} is "
            "likelier"
        )


def _total(language: Language, text: tuple[int, ...]) -> float:
    return sum(float(language.scores(text[:at])[token]) for at, token in enumerate(text))


def _likeliest(subject: Subject, width: int) -> None:
    """The likeliest continuation of all beams is passed over now and then, but not mostly."""
    passed, steps = 0, 0
    for seed in range(5):
        strategy, language = bound(subject), Language(11, seed)
        group = group_of(subject, strategy, num_beams=width, max_new_tokens=6)
        while True:
            texts = [tuple(beam.new_tokens) for beam in group.beams]
            every = [
                (group.scores[at] + score, (*text, token))
                for at, text in enumerate(texts)
                for token, score in enumerate(language.scores(text).tolist())
            ]
            best = max(every)[1]
            decision = step(strategy, [group], language)[0]
            kept = [tuple(beam.new_tokens) for beam in group.beams] if decision.beams else []
            steps += 1
            passed += best not in kept and all(best != h.tokens for h in decision.hypotheses)
            if not decision.beams:
                break
    if passed > steps / 2:
        raise WrongError(f"passes over the likeliest continuation in {passed} of {steps} steps")


_USUAL: dict[str, Any] = {"num_beams": 3, "length_penalty": 1.0, "early_stopping": False}
EXACTLY: dict[str, tuple[Any, ...]] = {
    "num_beams": tuple({**_USUAL, "num_beams": n} for n in (2, 3, 4, 7)),
    "length_penalty": tuple({**_USUAL, "length_penalty": x} for x in (0.0, -1.0, 2.0, 0.5)),
    "early_stopping": tuple({**_USUAL, "early_stopping": x} for x in (True, False, "never")),
}
_GROUPS = {**_USUAL, "num_beams": 4, "num_beam_groups": 2}
APART: dict[str, tuple[Any, ...]] = {
    "diversity_penalty": tuple({**_GROUPS, "diversity_penalty": x} for x in (0.5, 3.0)),
    "num_beam_groups": (
        {**_GROUPS, "num_beam_groups": 4, "diversity_penalty": 1.0},
        {**_GROUPS, "num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.0},
    ),
}


def _exactly(subject: Subject, asked: dict[str, Any]) -> None:
    """Beam search as transformers has it, which is where these settings are from."""
    for seed, eos in itertools.product(range(4), ((), (0, 1), (0, 1, 2, 3))):
        strategy = bound(subject)
        language = Language(9, seed, eos=eos)
        group = group_of(subject, strategy, eos_token_ids=eos, max_new_tokens=7, **asked)
        run(strategy, [group], language)
        right = search(_asked(language, eos, asked))
        if flaw := _difference(texts_of(group), right):
            raise WrongError(f"with {len(eos)} EOS tokens {flaw}")


def _asked(language: Language, eos: tuple[int, ...], asked: dict[str, Any]) -> Asked:
    return Asked(
        scores=lambda text: language.scores(text).tolist(),
        ends=lambda text: len(text) >= 7 or text[-1] in eos,
        max_new_tokens=7,
        num_eos=len(eos),
        **asked,
    )


def _difference(found: list[Any], right: list[Any]) -> str:
    for at, (text, score) in enumerate(right):
        if at >= len(found):
            return f"it finds {len(found)} texts, and beam search {len(right)}"
        if found[at][0] != text and abs(found[at][1] - score) > 1e-4:
            return f"text {at} is {list(found[at][0])}, and by beam search {list(text)}"
        if abs(found[at][1] - score) > 1e-4:
            return (
                f"text {at} is right, and its score is {found[at][1]:.4f}, not {score:.4f} (the "
                "sum of log-probabilities over length ** length_penalty)"
            )
    return ""


def _release(subject: Subject, count: int) -> None:
    strategy = bound(subject)
    with quick_collection():
        asked = _declared(subject, num_beams=4, num_beam_groups=2, diversity_penalty=0.5)
        groups = [group_of(subject, strategy, n, **asked) for n in range(count)]
        run(strategy, groups, Language(11, 1))
        for group in groups:
            strategy.release(tuple(group.members))
        kept = [weakref.ref(member) for group in groups for member in group.members]
        del groups, group
        gc.collect()
    if any(reference() is not None for reference in kept):
        raise WrongError("keeps the sequences of a group after release, with all of their tokens")


def _release_unknown(subject: Subject, _: object) -> None:
    strategy = bound(subject)
    strategy.release(())
    group = group_of(subject, strategy)
    strategy.release(tuple(group.members))
    step(strategy, [group], Language(11, 1))
    strategy.release((lend(9, [5]),))
    strategy.release(tuple(group.members))
    strategy.release(tuple(group.members))


def _forgets(subject: Subject, _: object) -> str:
    strategy = bound(subject)
    numbers = itertools.count()

    def requests() -> None:
        for _ in range(40):
            asked = _declared(subject, num_beams=4, num_beam_groups=2, diversity_penalty=0.5)
            group = group_of(subject, strategy, next(numbers), max_new_tokens=2, **asked)
            run(strategy, [group], Language(5, 1))
            strategy.release(tuple(group.members))

    each = growth(requests, 100 * 40) / 40
    if each > 100:
        raise WrongError(f"keeps {each:.0f} bytes of each request after release: memory grows")
    return f"{max(0.0, each):.0f} bytes a request stay"
