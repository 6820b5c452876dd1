"""Regexes of a model's or an adapter's files, held to a number of steps before anybody runs them.

Python's `re` goes back and tries again: ``(.*.*)*z`` takes longer than the universe lasts, holds
the interpreter's lock meanwhile, and neither a thread nor a deadline can stop it. So the ways that
a pattern has through a name are counted first. `re` goes each way once at most, and here those
that meet are counted together, so that counting takes no longer than the steps that are allowed.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jackfield.errors import CheckpointError, quoted, shown

STEPS = 20_000  # of one pattern in one name; those that are in use take some hundreds
ALL_STEPS = 5_000_000  # of all patterns in all names
COMPARISONS = 1_000_000  # of patterns with names: Python compiles most of them anew for each
NAMES = 10_000  # of a list that PEFT compares with itself, to make it shorter
LONGEST = 100_000  # characters of a text; one that names each layer of a large model has 20,000

#: A text that has no more than one way through a name: names, paths, numbers.
_PLAIN = re.compile(r"[\w ./:@%,=#~<>&!;\"'-]*")
#: How torchao and gptqmodel mark a pattern.
_MARK = re.compile(r"re:|[+-]:")
#: Fields in which a list is one of names; a text by itself is a pattern there, too.
_LISTS = ("target_modules", "exclude_modules", "target_parameters")

_parser: Any = importlib.import_module("re._parser")
_CATEGORIES = {
    f"CATEGORY_{word}": re.compile(regex)
    for word, regex in (("DIGIT", r"\d"), ("NOT_DIGIT", r"\D"), ("SPACE", r"\s"),
                        ("NOT_SPACE", r"\S"), ("WORD", r"\w"), ("NOT_WORD", r"\W"))
}  # fmt: skip
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")

Ways = Mapping[int, int]  # place in the name -> ways that lead there


class _TooManyError(Exception):
    pass


def check_patterns(what: str, fields: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise CheckpointError where a text in `fields` would take too long as a regex on `names`.

    Args:
        what: The file, as the error calls it.
        fields: What is in it. Any text may be a pattern, also in lists and as a key of an object.
        names: The model's modules and parameters, to which patterns are compared.
    """
    known = list(names)
    shapes, taken = _shapes(known), 0
    for field, value in fields.items():
        texts = list(_texts(value))
        most = NAMES if field in _LISTS else COMPARISONS // max(1, len(known))
        if len(texts) > most:
            raise CheckpointError(
                f"{what}: {field} has {len(texts):,} names or patterns, and at most "
                f"{most:,} are compared with this model's; write one pattern for many"
            )
        for text in texts:
            if len(text) > LONGEST:
                raise CheckpointError(
                    f"{what}: a text in {field} has {len(text):,} characters, and no pattern "
                    f"needs more than {LONGEST:,}; name the modules"
                )
            for name in () if _PLAIN.fullmatch(text) else shapes:
                found = steps(_MARK.sub("", text, count=1), name)
                taken += found or 0
                if found is None or taken > ALL_STEPS:
                    raise CheckpointError(
                        f"{what}: the pattern {quoted(text)} in {field} would take too long to be "
                        f"compared with {shown(name)}; name the modules, or repeat nothing inside "
                        "of a repeat"
                    )


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value of JSON, keys included."""
    level = [value]
    while level:
        yield from (part for part in level if isinstance(part, str))
        below: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                below += (*part, *part.values())
            elif isinstance(part, list):
                below += part
        level = below


def _shapes(names: Iterable[str]) -> list[str]:
    """One name for all that differ in numbers only: any digit is taken for any other."""
    longest = {re.sub(r"\d+", "0", name): name for name in sorted(names, key=len)}
    return list(longest.values())


def steps(pattern: str, name: str) -> int | None:
    """The most steps of a search for `pattern` that begins anew behind each dot of `name`, as PEFT
    has it begin; None: more than `STEPS`. 0 for what is no pattern, which `re` refuses.
    """
    search = _Search(name)
    try:
        parsed = _parser.parse(pattern)
        search.through(parsed, {p: 1 for p in range(len(name) + 1) if not p or name[p - 1] == "."})
    except (re.error, OverflowError):
        return 0
    except (_TooManyError, RecursionError):
        return None
    return search.taken


class _Search:
    """Counts the ways of patterns through a name. What only takes ways away is left out: anchors,
    assertions and references to groups always fit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._chars = [_variants(char) for char in name]
        self.taken = 0

    def through(self, nodes: Any, ways: Ways) -> Ways:
        """Where `nodes`, one behind the other, end when they begin at `ways`."""
        for op, argument in nodes:
            self._take(sum(ways.values()))
            ways = self._step(str(op), argument, ways)
            if not ways:
                break
        return ways

    def _take(self, steps: int) -> None:
        self.taken += steps
        if self.taken > STEPS:
            raise _TooManyError

    def _step(self, op: str, argument: Any, ways: Ways) -> Ways:
        if op in _FITS:
            return self._one_char(_FITS[op], argument, ways)
        if op in _REPEATS:
            return self._repeated(ways, *argument)
        if op in ("SUBPATTERN", "ATOMIC_GROUP"):
            return self.through(argument[-1] if op == "SUBPATTERN" else argument, ways)
        if op in ("BRANCH", "GROUPREF_EXISTS"):
            return self._any_of(argument[1] if op == "BRANCH" else argument[1:], ways)
        if op in ("ASSERT", "ASSERT_NOT"):
            direction, body = argument
            back = body.getwidth()[1] if direction < 0 else 0
            self.through(body, {place - back: n for place, n in ways.items() if place >= back})
        if op == "GROUPREF":
            return self._any_end(ways)
        return ways

    def _one_char(self, fits: Callable[[Any, str], bool], argument: Any, ways: Ways) -> Ways:
        return {
            place + 1: count
            for place, count in ways.items()
            if place < len(self._name) and any(fits(argument, c) for c in self._chars[place])
        }

    def _any_of(self, branches: Iterable[Any], ways: Ways) -> Ways:
        ends: Counter[int] = Counter()
        for branch in branches:
            ends.update(ways if branch is None else self.through(branch, ways))
        return ends

    def _any_end(self, ways: Ways) -> Ways:
        return {
            end: sum(count for place, count in ways.items() if place <= end)
            for end in range(min(ways), len(self._name) + 1)
        }

    def _repeated(self, ways: Ways, low: int, high: int, body: Any) -> Ways:
        for _ in range(low):
            if not ways:
                return ways
            self._take(1)  # also for a body with nothing in it
            ways = self.through(body, ways)
        if high - low > len(self._name):
            return self._starred(body, ways)
        ends = Counter(ways)
        for _ in range(high - low):
            ways = self.through(body, ways)
            ends.update(ways)
        return ends

    def _starred(self, body: Any, ways: Ways) -> Ways:
        """As often as it gets on: a repeat of nothing ends at once."""
        ends = Counter(ways)
        for place in range(len(self._name) + 1):
            if count := ends[place]:
                for end, more in self.through(body, {place: count}).items():
                    if end > place:
                        ends[end] += more
        return {place: count for place, count in ends.items() if count}


def _variants(char: str) -> str:
    """What stands for a character: any digit for a digit, and both cases of a letter, since a
    pattern may say that these are alike.
    """
    return "0123456789" if char.isdigit() else "".join({char, *char.lower(), *char.upper()})


def _in_class(parts: Any, char: str) -> bool:
    negated = any(str(op) == "NEGATE" for op, _ in parts)
    return negated != any(_has(str(op), value, char) for op, value in parts)


def _has(op: str, value: Any, char: str) -> bool:
    if op == "CATEGORY":
        return _CATEGORIES[str(value)].match(char) is not None
    if op == "RANGE":
        return bool(value[0] <= ord(char) <= value[1])
    return op == "LITERAL" and bool(value == ord(char))


_FITS: Mapping[str, Callable[[Any, str], bool]] = {
    "ANY": lambda _, char: True,
    "IN": _in_class,
    "LITERAL": lambda code, char: code == ord(char),
    "NOT_LITERAL": lambda code, char: code != ord(char),
}
