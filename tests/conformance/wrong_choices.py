"""Schedulers and decodings of a stranger, each wrong in one way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wrong_attentions import UntoldError, raising

from jackfield.contracts import (
    SAMPLER_SETTINGS,
    BindContext,
    Decision,
    Decoding,
    DecodingCapabilities,
    Hypothesis,
    Scheduler,
    Sequence,
    Strategy,
)
from jackfield_plugins.decoding.beam import Beam, BeamOptions, BeamSearch
from jackfield_plugins.scheduler.fifo import FifoSchedule

Change = Callable[..., Any]


def scheduler(**members: Change) -> Scheduler:
    """fifo with other methods; each is handed the one that it replaces."""

    class Wrong(Scheduler):
        name = "wrong"

        def bind(self, context: BindContext) -> Any:
            own = FifoSchedule(10)
            for name, change in members.items():
                setattr(own, name, _bound(getattr(own, name), change))
            return own

    return Wrong()


def _bound(own: Change, change: Change) -> Change:
    return lambda *args: change(own, *args)


#: What a plugin does to a request that it is handed, past every fence of Python's own.
DEEDS: dict[str, Callable[[Any], Any]] = {
    "another id": lambda s: setattr(s, "id", 10**6),
    "another sample": lambda s: setattr(s, "sample", 7),
    "other settings": lambda s: setattr(s, "settings", s.settings._replace(seed=1)),
    "a field of its settings": lambda s: object.__setattr__(s.settings, "max_new_tokens", 1),
    "a bias in its settings": lambda s: s.settings.sequence_bias.__setitem__((7,), 9.0),
    "what it is asked for in drafts": lambda s: object.__setattr__(
        s.settings.drafts, "num_assistant_tokens", 1
    ),
    "a token more": lambda s: list.append(s.tokens, 5),
    "a token less": lambda s: list.pop(s.tokens),
    "no tokens": lambda s: list.clear(s.tokens),
    "another first token": lambda s: list.__setitem__(s.tokens, 0, 99),
    "another last token": lambda s: list.__setitem__(s.tokens, -1, 99),
    "tokens in another order": lambda s: list.reverse(s.tokens),
    "an end": lambda s: setattr(s, "finish_reason", "stop"),
    "an error": lambda s: setattr(s, "error", "so"),
    "a score": lambda s: setattr(s, "score", 1.0),
    "another arrival": lambda s: setattr(s, "arrival", 10**6),
}


def doing(deed: Callable[[Any], Any]) -> Change:
    """What the method returns, after `deed` was done to the first sequence that it is handed."""

    def change(own: Change, sequences: Any, *rest: Any) -> Any:
        deed(sequences if isinstance(sequences, Sequence) else sequences[0])
        return own(sequences, *rest)

    return change


class Pair(tuple[int, ...]):
    """Is before all others."""

    __slots__ = ()

    def __lt__(self, other: object) -> bool:
        return True


SCHEDULERS: dict[str, dict[str, Change]] = {
    "key raises": {"key": raising(ValueError("boom"))},
    "key exits": {"key": raising(SystemExit(1))},
    "key of one number": {"key": lambda own, sequence: sequence.id},
    "key is None": {"key": lambda own, sequence: None},
    "key is a list": {"key": lambda own, sequence: [0, sequence.id]},
    "key of NaN": {"key": lambda own, sequence: (math.nan,)},
    "key of text": {"key": lambda own, sequence: (str(sequence.id),)},
    "key of requests": {"key": lambda own, sequence: (sequence,)},
    "key of a tuple's child": {"key": lambda own, sequence: Pair((0, sequence.id))},
    "key ends a request": {
        "key": lambda own, sequence: setattr(sequence, "finish_reason", "stop") or own(sequence)
    },
    "schedule raises": {"schedule": raising(UntoldError())},
    "schedule of zeros": {"schedule": lambda own, running, *_: [0] * len(running)},
    "schedule of nobody": {"schedule": lambda own, *_: []},
    "schedule below zero": {"schedule": lambda own, running, *_: [-1] * len(running)},
    "schedule above what is there": {
        "schedule": lambda own, r, pending, *_: [n + 1 for n in pending]
    },
    "schedule as floats": {"schedule": lambda own, r, pending, *_: [float(n) for n in pending]},
    "schedule as True": {"schedule": lambda own, r, pending, *_: [True] * len(pending)},
    "schedule is None": {"schedule": lambda own, *_: None},
    "schedule changes what is pending": {"schedule": lambda own, r, pending, *_: pending.append(1)},
    "schedule says what is cached": {
        "schedule": lambda own, running, *rest: (
            setattr(running[0], "num_cached", 3) or own(running, *rest)
        )
    },
    "schedule takes a request out": {
        "schedule": lambda own, running, *rest: running.pop() and own(running, *rest)
    },
    "schedule without an end": {"schedule": lambda own, *_: itertools.repeat(1)},
    **{f"schedule gives {what}": {"schedule": doing(deed)} for what, deed in DEEDS.items()},
    **{f"key gives {what}": {"key": doing(deed)} for what, deed in DEEDS.items()},
}


class Sly(list[int]):
    """Says that there is nothing in it, and that what is in it is fine."""

    def __len__(self) -> int:
        return 0

    def __ne__(self, other: object) -> bool:
        return False


def strategy(**members: Change) -> Decoding:
    class Guess(Strategy):
        def propose(self, sequences: Any, max_drafts: Any) -> Any:
            return [[] for _ in sequences]

    class Wrong(Decoding):
        name = "wrong"
        capabilities = DecodingCapabilities(settings=SAMPLER_SETTINGS, rollback=True)

        def bind(self, context: BindContext) -> Any:
            own = Guess()
            for name, change in members.items():
                setattr(own, name, _bound(getattr(own, name), change))
            return own

    return Wrong()


def proposing(change: Callable[[Any, Any], Any]) -> dict[str, Change]:
    return {"propose": lambda own, sequences, most: change(sequences, most)}


STRATEGIES: dict[str, dict[str, Change]] = {
    "propose raises": {"propose": raising(OSError("no model"))},
    "propose exits": {"propose": raising(SystemExit(1))},
    "proposes None": proposing(lambda s, most: None),
    "proposes for nobody": proposing(lambda s, most: []),
    "proposes too many": proposing(lambda s, most: [[5] * (n + 1) for n in most]),
    "proposes text": proposing(lambda s, most: ["the" for _ in s]),
    "proposes tokens below 0": proposing(lambda s, most: [[-1] for _ in s]),
    "proposes tokens that are none": proposing(lambda s, most: [[10**6] for _ in s]),
    "proposes floats": proposing(lambda s, most: [[5.0] for _ in s]),
    "appends to the tokens": proposing(lambda s, most: s[0].tokens.append(5) or [[] for _ in s]),
    "sets a token": proposing(lambda s, most: s[0].tokens.__setitem__(0, 5) or [[] for _ in s]),
    "replaces the tokens": proposing(
        lambda s, most: setattr(s[0], "tokens", [5]) or [[] for _ in s]
    ),
    "sets what is cached": proposing(
        lambda s, most: setattr(s[0], "num_cached", 0) or [[] for _ in s]
    ),
    "sets another length": proposing(
        lambda s, most: setattr(s[0], "prompt_length", 0) or [[] for _ in s]
    ),
    "release raises": {"release": raising(ValueError("unknown"))},
    "proposes without an end": proposing(lambda s, most: [itertools.repeat(5) for _ in s]),
    "proposes a number for a list": proposing(lambda s, most: [5 for _ in s]),
    "hides what it proposes": proposing(lambda s, most: [Sly([10**6]) for _ in s]),
    **{f"propose gives {what}": {"propose": doing(deed)} for what, deed in DEEDS.items()},
    **{
        f"release gives {what}": {"release": doing(deed)}
        for what, deed in DEEDS.items()
        if what not in ("an end", "no tokens")  # it has ended, and maybe that way
    },
}


def search(decide: Change | None = None, width: Change | None = None) -> Decoding:
    """beam, whose decisions are changed: by what it decides, and by the groups."""

    class Changed(BeamSearch):
        def decide(self, groups: Any, scores: Any) -> Any:
            found = super().decide(groups, scores)
            return found if decide is None else decide(found, groups, scores)

        def width(self, settings: Any) -> Any:
            return super().width(settings) if width is None else width(settings)

    class Wrong(Beam):
        name = "wrong"

        def bind(self, context: BindContext) -> Any:
            return Changed(BeamOptions(num_beams=3))

    return Wrong()


def each(change: Callable[[Decision, Any], Decision]) -> Decoding:
    return search(
        lambda found, groups, _: [change(d, g) for d, g in zip(found, groups, strict=True)]
    )


def beams(change: Callable[[Any], Any]) -> Decoding:
    return each(lambda d, _: replace(d, beams=[change(beam) for beam in d.beams]))


def _texts(d: Decision, texts: list[Hypothesis]) -> Decision:
    return replace(d, hypotheses=texts)


def _last(group: Any) -> bool:
    return bool(group.num_new + 1 >= group.settings.max_new_tokens)


SEARCHES: dict[str, Callable[[], Decoding]] = {
    "decide raises": lambda: search(raising(ValueError("boom"))),
    "decides nothing": lambda: search(lambda found, *_: []),
    "decides None": lambda: search(lambda found, *_: None),
    "decides with tuples": lambda: search(lambda found, *_: [(1, 2) for _ in found]),
    "no width": lambda: search(width=lambda settings: 0),
    "half a width": lambda: search(width=lambda settings: 2.5),
    "width raises": lambda: search(width=raising(SystemExit(1))),
    "score that is no number": lambda: beams(lambda b: replace(b, score=math.nan)),
    "score without an end": lambda: beams(lambda b: replace(b, score=math.inf)),
    "score as text": lambda: beams(lambda b: replace(b, score="good")),
    "token that is none": lambda: beams(lambda b: replace(b, token=10**6)),
    "token as float": lambda: beams(lambda b: replace(b, token=float(b.token))),
    "token that is forbidden": lambda: beams(lambda b: replace(b, token=7)),
    "token that is forbidden, in scores that it changed": lambda: search(
        lambda found, groups, scores: [
            [own.zero_() for own in scores],
            [replace(d, beams=[replace(b, token=7) for b in d.beams]) for d in found],
        ][1]
    ),
    "ends a text by a token that is forbidden": lambda: each(
        lambda d, g: _texts(d, [Hypothesis(g.new_tokens(0, 7), 0.0)]) if _last(g) else d
    ),
    "parent that is none": lambda: beams(lambda b: replace(b, parent=99)),
    "parent as True": lambda: beams(lambda b: replace(b, parent=True)),
    "all beams the same": lambda: each(lambda d, _: replace(d, beams=[*d.beams[:1]] * 2)),
    "more beams than places": lambda: each(lambda d, _: replace(d, beams=[*d.beams] * 3)),
    "goes on for ever": lambda: each(
        lambda d, g: d if d.beams else replace(d, beams=[_continued(g)])
    ),
    "invents a text": lambda: each(
        lambda d, _: _texts(d, [Hypothesis((5, 6, 7), 0.0), *d.hypotheses])
    ),
    "says a text twice": lambda: each(lambda d, _: _texts(d, [*d.hypotheses, *d.hypotheses])),
    "ends a text in the middle": lambda: each(
        lambda d, g: (
            d if _last(g) else _texts(d, [Hypothesis(g.new_tokens(0, 9), 0.0), *d.hypotheses])
        )
    ),
    "text whose score is no number": lambda: each(
        lambda d, _: _texts(d, [replace(h, score=math.nan) for h in d.hypotheses])
    ),
    "worst text first": lambda: each(lambda d, _: _texts(d, list(d.hypotheses)[::-1])),
    "texts of floats": lambda: each(
        lambda d, _: _texts(
            d, [replace(h, tokens=tuple(map(float, h.tokens))) for h in d.hypotheses]
        )
    ),
    "score that is True": lambda: beams(lambda b: replace(b, score=True)),
    "forgets all texts": lambda: each(lambda d, _: _texts(d, [])),
    "ends with nothing": lambda: each(lambda d, _: Decision()),
    "beams without an end": lambda: each(
        lambda d, _: replace(d, beams=itertools.cycle(d.beams)) if d.beams else d
    ),
    "an error that is none": lambda: each(lambda d, _: replace(d, error=7)),
    "changes its group": lambda: search(
        lambda found, groups, _: [groups[0].beams.append(groups[0].beams[0]), *found][1:]
    ),
    "changes the scores of its group": lambda: search(
        lambda found, groups, _: [groups[0].scores.append(0.0), *found][1:]
    ),
}

SEARCHES |= {
    f"decide gives {what}": lambda deed=deed: search(  # type: ignore[misc]
        lambda found, groups, _: [deed(groups[0].beams[0]), *found][1:]
    )
    for what, deed in DEEDS.items()
}


def _continued(group: Any) -> Any:
    from jackfield.contracts import Continuation

    return Continuation(0, 9, -1.0)
