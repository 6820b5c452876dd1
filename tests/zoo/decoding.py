"""Wrong decodings: strategies that draft, and searches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from wrong import Wrong
from wrong_choices import SEARCHES, STRATEGIES, beams, each, search, strategy

from jackfield.contracts import (
    SAMPLER_SETTINGS,
    Continuation,
    Decision,
    Decoding,
    DecodingCapabilities,
    Hypothesis,
    Strategy,
)
from jackfield_plugins.decoding.assisted import Assisted, AssistedStrategy
from jackfield_plugins.decoding.beam import Beam, BeamSearch
from jackfield_plugins.decoding.prompt_lookup import PromptLookup, PromptLookupStrategy


class Lookup(Strategy):
    """Right: what followed the last two tokens when they stood there before, three drafts."""

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        pairs = zip(sequences, max_drafts, strict=True)
        return [self.drafts(s, list(s.tokens))[: min(3, most)] for s, most in pairs]

    def drafts(self, sequence: Any, tokens: list[int]) -> list[int]:
        for at in range(len(tokens) - 3, -1, -1):
            if tokens[at : at + 2] == tokens[-2:]:
                period = len(tokens) - 2 - at
                return [tokens[at + 2 + i % period] for i in range(3)]
        return []


def of(made: type[Strategy], **declared: Any) -> Callable[[], Decoding]:
    class Made(Decoding):
        name = "wrong"
        capabilities = DecodingCapabilities(
            **{"settings": SAMPLER_SETTINGS, "rollback": True, **declared}
        )

        def bind(self, context: Any) -> Any:
            return made(context) if hasattr(made, "model") else made()

    return Made


def drafting(change: Callable[[list[int], list[int]], Any]) -> Callable[[], Decoding]:
    """Lookup, whose drafts are changed: by them, and by the tokens."""

    class Changed(Lookup):
        def drafts(self, sequence: Any, tokens: list[int]) -> Any:
            return change(super().drafts(sequence, tokens), tokens)

    return of(Changed)


class NoRoom(Lookup):
    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        return [self.drafts(s, list(s.tokens)) for s in sequences]


class RoomOfTheFirst(Lookup):
    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        return [self.drafts(s, list(s.tokens))[: max_drafts[0]] for s in sequences]


class OneTooMany(Lookup):
    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        pairs = zip(sequences, max_drafts, strict=True)
        return [self.drafts(s, list(s.tokens))[: most + 1] for s, most in pairs]


class LeavesOut(Lookup):
    """A list only for those that it has drafts for."""

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        return [drafts for drafts in super().propose(sequences, max_drafts) if drafts]


class Sorted(Lookup):
    """Goes through sequences by their number, and forgets to go back."""

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        order = sorted(range(len(sequences)), key=lambda i: sequences[i].id)
        return super().propose([sequences[i] for i in order], [max_drafts[i] for i in order])


class LastOnly(Lookup):
    """Every sequence gets what was found for the last."""

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        found = [self.drafts(s, list(s.tokens))[:1] for s in sequences]
        return [found[-1] for _ in found]


class Backwards(Lookup):
    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        return super().propose(sequences, max_drafts)[::-1]


class Array(Lookup):
    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        return [torch.tensor(drafts) for drafts in super().propose(sequences, max_drafts)]


class ByNumber(Lookup):
    """Keeps what it has by the request's number, and forgets nothing."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        for s in sequences:
            self.texts[s.id] = list(s.tokens)
        return super().propose(sequences, max_drafts)


class ByObject(Lookup):
    """Keeps the sequences themselves."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        self.seen = [*self.seen, *sequences]
        return super().propose(sequences, max_drafts)


class OfAll(ByNumber):
    """What is kept is kept for all engines."""

    shared: ClassVar[dict[int, list[int]]] = {}

    def __init__(self) -> None:
        pass

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        found = []
        for s, most in zip(sequences, max_drafts, strict=True):
            text = self.shared.setdefault(s.id, [])
            text += s.tokens[len(text) :]
            found.append(self.drafts(s, text)[: min(3, most)])
        return found

    def release(self, sequences: Any) -> None:
        for s in sequences:
            self.shared.pop(s.id, None)


class Expects(ByNumber):
    """Expects that it has proposed for whatever ends."""

    def release(self, sequences: Any) -> None:
        for s in sequences:
            del self.texts[s.id]


class ForgetsAll(ByNumber):
    """Whoever ends takes what is kept of the others along, which is then missed."""

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        for s in sequences:
            if s.num_new == 0 or not hasattr(self, "begun"):
                self.texts[s.id], self.begun = [], True
            self.texts[s.id].append(s.tokens[-1])
        return Lookup.propose(self, sequences, max_drafts)

    def release(self, sequences: Any) -> None:
        self.texts.clear()


class Counting(Lookup):
    """Expects a call for each token."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        for s in sequences:
            before = self.lengths.get(s.id)
            if before is not None and len(s.tokens) > before + 4:
                raise IndexError("a step is missing")
            self.lengths[s.id] = len(s.tokens)
        return super().propose(sequences, max_drafts)

    def release(self, sequences: Any) -> None:
        for s in sequences:
            self.lengths.pop(s.id, None)


class Quadratic(Lookup):
    """Compares every place with every other one in each call."""

    def drafts(self, sequence: Any, tokens: list[int]) -> list[int]:
        for at in range(len(tokens)):
            for other in range(0, at, 1):
                if tokens[at] == tokens[other] and at == other:
                    return []
        return super().drafts(sequence, tokens)


class Hangs(Lookup):
    """Looks for a repetition until there is one."""

    def drafts(self, sequence: Any, tokens: list[int]) -> list[int]:
        at = 0
        while len(tokens) > 60 and tokens[at % 60] != -1:
            at += 1
        return super().drafts(sequence, tokens)


def touching(deed: Callable[[Any], Any]) -> Callable[[], Decoding]:
    class Touching(Lookup):
        def propose(self, sequences: Any, max_drafts: Any) -> Any:
            deed(sequences[0])
            return super().propose(sequences, max_drafts)

    return of(Touching)


class LaterOn(Lookup):
    """Changes a sequence that it was handed before."""

    def __init__(self) -> None:
        self.first: Any = None

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        if self.first is not None and self.first is not sequences[0]:
            list.__setitem__(self.first.tokens, 0, 1)
        self.first = self.first or sequences[0]
        return super().propose(sequences, max_drafts)


class Bound(Lookup):
    model = True

    def __init__(self, context: Any) -> None:
        self.context = context


class Trains(Bound):
    """Changes weights of the model that it is bound to."""

    def propose(self, sequences: Any, max_drafts: Any) -> Any:
        with torch.inference_mode():
            for parameter in self.context.model.parameters():
                parameter.mul_(1.5)
        return super().propose(sequences, max_drafts)


def lookup(**members: Any) -> Callable[[], Decoding]:
    """The built-in strategy with other methods."""

    class Other(PromptLookup):
        name = "wrong"

        def bind(self, context: Any) -> Any:
            return type("Changed", (PromptLookupStrategy,), members)(context.options)

    return Other


class TooManyPlanned(PromptLookup):
    """Says that it drafts less than it does."""

    name = "wrong"

    def max_drafts(self, options: Any) -> int:
        return 2


class ImpliesNothing(PromptLookup):
    name = "wrong"

    def imply(self, requirements: Any, options: Any) -> Any:
        return replace(requirements, rollback=False)


class RefusesNothing(PromptLookup):
    name = "wrong"

    def refuse(self, requirements: Any, options: Any) -> list[str]:
        return []


class ForgetsForks(Beam):
    name = "wrong"

    def imply(self, requirements: Any, options: Any) -> Any:
        return requirements


def assisted(**members: Any) -> Callable[[], Decoding]:
    class Other(Assisted):
        name = "wrong"

        def bind(self, context: Any) -> Any:
            made = type("Changed", (AssistedStrategy,), members)
            return made(context.options, context.assistant)

    return Other


def _asks(room: Callable[[Any], Any], threshold: Callable[[float], Any] = lambda x: x) -> Any:
    def propose(self: Any, sequences: Any, max_drafts: Any) -> Any:
        rooms = [room(most) for most in max_drafts]
        found = self._assistant.draft(sequences, rooms, [threshold(0.4) for _ in sequences])
        return [drafts[:most] for drafts, most in zip(found, max_drafts, strict=True)]

    return propose


def _copies(self: Any, sequences: Any, max_drafts: Any) -> Any:
    import copy

    rooms = [min(4, most) for most in max_drafts]
    return self._assistant.draft([copy.copy(s) for s in sequences], rooms, [0.4] * len(rooms))


_WHERE = "no token id|changed|more drafts|lists|raised|list|replaced|Strategy"

BY_HAND = (
    Wrong("no bound on drafts", of(NoRoom), "more drafts than"),
    Wrong("the room of the first for all", of(RoomOfTheFirst), "more drafts than"),
    Wrong("one draft too many", of(OneTooMany), "more drafts than"),
    Wrong("leaves out who has none", of(LeavesOut), "lists of drafts"),
    Wrong("by number and not by place", of(Sorted), "gets the drafts of|more drafts"),
    Wrong("the last one's drafts for all", of(LastOnly), "gets the drafts of"),
    Wrong("rows back to front", of(Backwards), "gets the drafts of|more drafts"),
    Wrong("drafts as tensors", of(Array), "no token id"),
    Wrong("begins with the last token", drafting(lambda d, t: [t[-1], *d[:2]] if d else d),
          "begin with"),
    Wrong("leaves out the next token", drafting(lambda d, t: _ahead(t, 1)), "leave out"),
    Wrong("back to front", drafting(lambda d, t: d[::-1]), "back to front"),
    Wrong("never finds anything", drafting(lambda d, t: []), "proposed nothing"),
    Wrong("compares a list with a tuple", drafting(lambda d, t: d if t[:2] == (1, 2) else []),
          "proposed nothing"),
    Wrong("the token after the vocabulary", drafting(lambda d, t: [97]), "no token id"),
    Wrong("-1 for no guess", drafting(lambda d, t: d or [-1]), "no token id"),
    Wrong("None for no guess", drafting(lambda d, t: d or None), "raised|list"),
    Wrong("fails for short texts", drafting(lambda d, t: [t[-4]]), "raised IndexError"),
    Wrong("keeps texts after release", of(ByNumber), "after release"),
    Wrong("keeps sequences after release", of(ByObject), "after release"),
    Wrong("keeps it for all engines", of(OfAll), "another engine"),
    Wrong("release expects to know", of(Expects), "raised KeyError"),
    Wrong("release forgets the others", of(ForgetsAll), "raised KeyError"),
    Wrong("expects a call for each token", of(Counting), "raised IndexError"),
    Wrong("walks through the text twice", of(Quadratic), "a call takes"),
    Wrong("does not end", of(Hangs), "did not end"),
    Wrong("appends to the text", touching(lambda s: list.append(s.tokens, 5)), "changed request"),
    Wrong("changes an early token of a long text",
          touching(lambda s: len(s.tokens) > 30 and list.__setitem__(s.tokens, 3, 1)),
          "changed request"),
    Wrong("says what is cached", touching(lambda s: setattr(s, "num_cached", 0)), "num_cached"),
    Wrong("marks sequences", touching(lambda s: setattr(s, "arrival", 7)), "arrival"),
    Wrong("changes one that it saw before", of(LaterOn), "changed request"),
    Wrong("changes the weights", of(Trains), "off by|not that of plain|raised|likeliest"),
    Wrong("says that it drafts less", TooManyPlanned, "max_drafts says"),
    Wrong("does not ask for rollback", ImpliesNothing, "does not ask the cache|takes back"),
    Wrong("accepts deterministic=True", RefusesNothing, "accepts it"),
    Wrong("does not ask for copies", ForgetsForks, "does not ask the cache"),
    Wrong("a rate of percents", of(type("Percents", (Lookup,), {"min_acceptance_rate": 30})),
          "min_acceptance_rate"),
    Wrong("a speed in words", of(type("Words", (Lookup,), {"min_speedup": "1.5x"})),
          "min_speedup"),
    Wrong("a search that is none", of(Lookup, forks=True), "forks"),
    Wrong("does not release the draft model", assisted(release=lambda self, sequences: None),
          "Assistant.release"),
    Wrong("asks for more than there is room for", assisted(propose=_asks(lambda most: 4)),
          "where there is room"),
    Wrong("asks for one more", assisted(propose=_asks(lambda most: most + 1)),
          "where there is room"),
    Wrong("a threshold in percents", assisted(
          propose=_asks(lambda most: min(4, most), lambda x: 40)), "confidence threshold"),
    Wrong("hands on copies", assisted(propose=_copies), "was not asked about"),
)  # fmt: skip


def _ahead(tokens: list[int], by: int) -> list[int]:
    """What comes behind the token that comes next, in a text that repeats itself."""
    drafts = Lookup().drafts(None, tokens)
    return Lookup().drafts(None, [*tokens, *drafts[:by]]) if drafts else drafts


def sloppy(**members: Any) -> Callable[[], Decoding]:
    class Other(Beam):
        name = "wrong"

        def bind(self, context: Any) -> Any:
            return type("Changed", (BeamSearch,), members)(context.options)

    return Other


def deciding(change: Callable[[Any, Any, Any], Any]) -> Callable[[], Decoding]:
    """beam, whose scores are changed before it decides: by scores, groups."""

    def decide(self: Any, groups: Any, scores: Any) -> Any:
        return BeamSearch.decide(self, groups, [change(own, g, self) for own, g in
                                                zip(scores, groups, strict=True)])  # fmt: skip

    return sloppy(decide=decide)


def scored(change: Callable[[Continuation, Any, Any], float]) -> Callable[[], Decoding]:
    """beam, whose beams get other scores: by beam, group and scores."""

    def changed(found: Any, groups: Any, scores: Any) -> Any:
        return [
            replace(d, beams=[replace(b, score=change(b, g, own)) for b in d.beams])
            for d, g, own in zip(found, groups, scores, strict=True)
        ]

    return lambda: search(changed)


def _penalty(self: Any, group: Any, last: Any) -> Any:
    text = group.new_tokens(last.parent, last.token)
    return Hypothesis(text, last.score)


def _whole_text(self: Any, group: Any, last: Any) -> Any:
    text = group.new_tokens(last.parent, last.token)
    length = len(text) + group.members[0].prompt_length
    return Hypothesis(text, last.score / length ** self._penalty(group))


def _cheap(self: Any, group: Any, last: Any) -> Any:
    text = group.new_tokens(last.parent, last.token)
    return Hypothesis(text, last.score / (len(text) * self._penalty(group) or 1))


def _forget(self: Any, group: Any, last: Any) -> Any:
    text = group.new_tokens(last.parent, last.token)
    return Hypothesis(text, (last.score - group.scores[last.parent]) / len(text))


_EXACT = "by beam search|score is|finds|likeliest|finds .* texts"
_generator = random.Random()


def _noisy(own: Any, group: Any, self: Any) -> Any:
    return own + torch.rand_like(own)


def _global(own: Any, group: Any, self: Any) -> Any:
    """Draws with numbers of the process."""
    if not group.settings.do_sample:
        return own
    return own + torch.rand_like(own).log()


def _of_the_batch(self: Any, groups: Any, scores: Any) -> Any:
    """The scores of a group are shifted by those beside it."""
    wide = torch.cat([own.flatten() for own in scores])
    limit = wide.topk(min(len(wide), 12)).values[-1]
    return BeamSearch.decide(
        self, groups, [torch.where(own < limit, -torch.inf, own) for own in scores]
    )


def _rows_of_all(self: Any, groups: Any, scores: Any) -> Any:
    """Each group gets the scores of the first, as far as they reach."""
    first = scores[0]
    return BeamSearch.decide(
        self, groups, [first if first.shape == own.shape else own for own in scores]
    )


def _drops(found: Any, groups: Any, scores: Any) -> Any:
    return [replace(d, beams=list(d.beams)[1:] or d.beams) for d in found]


def _keeping(self: Any, groups: Any, scores: Any) -> Any:
    self.__dict__.setdefault("all", []).extend(groups)
    return BeamSearch.decide(self, groups, scores)


def _late(self: Any, groups: Any, scores: Any) -> Any:
    """Looks at the scores of the step before."""
    before = self.__dict__.get("before", scores)
    self.__dict__["before"] = scores
    same = len(before) == len(scores) and all(
        a.shape == b.shape for a, b in zip(before, scores, strict=False)
    )
    return BeamSearch.decide(self, groups, before if same else scores)


SEARCHING = (
    Wrong("no length penalty", sloppy(_hypothesis=_penalty), _EXACT),
    Wrong("length with the prompt", sloppy(_hypothesis=_whole_text), _EXACT),
    Wrong("length times penalty", sloppy(_hypothesis=_cheap), _EXACT),
    Wrong("the last token's score alone", sloppy(_hypothesis=_forget), _EXACT),
    Wrong("never stops early", sloppy(_ends=lambda self, group, part, beams: not beams), _EXACT),
    Wrong("always stops early",
          sloppy(_ends=lambda self, g, part, beams: not beams or len(part.found) >= part.width),
          _EXACT),
    Wrong("stops at the first text",
          sloppy(_ends=lambda self, g, part, beams: not beams or len(part.found) > 0), _EXACT),
    Wrong("one beam fewer", lambda: search(width=lambda s: max(1, (s.beams.num_beams or 3) - 1)),
          "width says"),
    Wrong("its own width", lambda: search(width=lambda s: 3), "width says"),
    Wrong("width changes", lambda: search(width=lambda s: _generator.randint(2, 9)), "width says"),
    Wrong("the worst beams", deciding(
          lambda own, g, self: torch.where(own > -torch.inf, -own, own)), "score|likeliest|sign"),
    Wrong("scores without the beam's", scored(lambda b, g, own: b.score - g.scores[b.parent]),
          "leave out the score"),
    Wrong("the beam's score twice", scored(lambda b, g, own: b.score + g.scores[b.parent]),
          "twice"),
    Wrong("probabilities", scored(lambda b, g, own: 2.718281828459045**b.score), "probabilities"),
    Wrong("the sign", scored(lambda b, g, own: -b.score), "sign"),
    Wrong("another beam's score", scored(lambda b, g, own:
          float(own[(b.parent + 1) % len(own), b.token])), "another beam"),
    Wrong("parents one off", lambda: each(lambda d, g: replace(d, beams=[
          replace(b, parent=(b.parent + 1) % len(g.beams)) for b in d.beams])),
          "forbidden|another|by beam search|twice|texts|score|likelier"),
    Wrong("all from the first beam", lambda: each(lambda d, g: replace(d, beams=[
          replace(b, parent=0) for b in d.beams])), "twice|another|search|likelier|forbidden"),
    Wrong("tokens one off", lambda: beams(lambda b: replace(b, token=max(0, b.token - 1))),
          "forbidden|twice|EOS|search|likelier|ends"),
    Wrong("noise", deciding(_noisy), "second time|off|score|search|depends"),
    Wrong("draws with numbers of the process", deciding(_global),
          "second time|beside|chi-square|chances"),
    Wrong("depends on the batch", sloppy(decide=_of_the_batch),
          "beside others|search|likelier|text"),
    Wrong("scores of the first group", sloppy(decide=_rows_of_all), "beside others"),
    Wrong("scores of the step before", sloppy(decide=_late), "nan|forbidden|finite|search|error"),
    Wrong("drops the best beam", lambda: search(_drops), "likeliest|search|finds"),
    Wrong("keeps its groups", sloppy(decide=_keeping), "after release"),
    Wrong("ignores EOS", sloppy(_advance=lambda self, group, part, possible:
          [c for c in possible if group.num_new + 1 < group.settings.max_new_tokens][: part.width]),
          "EOS|ends|without a text"),
    Wrong("picks forbidden tokens", deciding(lambda own, g, self: own.clamp(min=-9.0)),
          "forbidden"),
    Wrong("gives up at forbidden tokens", lambda: each(lambda d, g:
          Decision() if len(d.beams) < g.width and d.beams else d),
          "without a text|search|dropped"),
    Wrong("an error for few tokens", lambda: each(lambda d, g:
          Decision(error="few") if d.beams and len(d.beams) < g.width else d), "error"),
    Wrong("forgets earlier texts", lambda: each(lambda d, g: replace(d, hypotheses=[
          h for h in d.hypotheses if h not in g.hypotheses] or d.hypotheses)), "dropped|best"),
)  # fmt: skip

#: What the guards of an engine are shown to find, too.
GUARDED = tuple(
    Wrong(name, lambda members=members: strategy(**members), _WHERE)  # type: ignore[misc]
    for name, members in STRATEGIES.items()
) + tuple(
    Wrong(f"search: {name}", make, "decide|beam|token|hypothes|score|changed|width|text|error|group"
          "|raised|parent")
    for name, make in SEARCHES.items()
)  # fmt: skip

ZOO: tuple[Wrong, ...] = BY_HAND + SEARCHING + GUARDED
__all__ = ["BY_HAND", "GUARDED", "SEARCHING", "ZOO", "Lookup", "of"]
