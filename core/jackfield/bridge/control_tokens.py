"""Control tokens that stand in what a chat is made of: read as the text that they look like.

A tokenizer takes ``<|im_end|>`` for the token of this name wherever it stands, so that who writes
it into a message ends that message and begins another one, of any role. Here what a chat template
is given is searched for such names, and each is put between two marks, which are characters that
the chat does not have. What stands between marks in the template's text is then encoded piece by
piece without looking for tokens; the template's own tokens count as always. The way is that of
`sanitize_control_tokens` of transformers 5.22; here keys of objects are marked as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

from jackfield.errors import PromptError, quoted
from jackfield.requests.chat_settings import ChatSettings

#: Code points that are no characters, of which nobody's text has many.
_NO_CHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]

#: tokenizer -> (texts of its template, how many tokens were added) -> names
_KNOWN: WeakKeyDictionary[Any, dict[tuple[str, int], _Names]] = WeakKeyDictionary()
MOST = 10_000  # names of control tokens in a chat; each is encoded by itself

Read = Callable[..., list[int]]


@dataclass(frozen=True)
class _Names:
    """Names of control tokens, longest first: what is special, and what a template writes of the
    tokens that were added. `normalized` are those that are looked for in normalized text, as they
    look there.
    """

    names: tuple[str, ...]
    normalized: tuple[str, ...]

    @cached_property
    def starts(self) -> frozenset[str]:
        return frozenset(name[:2] for name in self.names)


class ControlTokens:
    """The control tokens of a tokenizer whose chat template has the texts `literals` in it."""

    def __init__(self, tokenizer: Any, literals: str) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        known, key = _KNOWN.setdefault(tokenizer, {}), (literals, len(added))
        if key not in known:
            known[key] = self._found(added.values(), literals)
        self._known = known[key]

    def _found(self, added: Collection[Any], literals: str) -> _Names:
        names = set(getattr(self._tokenizer, "all_special_tokens", ()))
        names |= {str(t) for t in added if getattr(t, "special", True) or str(t) in literals}
        names = {name for name in names if name.strip()}  # templates write white space as text
        normalized: set[str] = set()
        if (normalizer := self._normalizer) is not None:
            own = {str(t) for t in added if getattr(t, "normalized", False) and str(t) in names}
            normalized = own | {normalizer.normalize_str(name) for name in own}
        longest_first = sorted(names, key=lambda name: (-len(name), name))
        return _Names(tuple(longest_first), tuple(filter(str.strip, sorted(normalized))))

    @property
    def _backend(self) -> Any:
        fast = getattr(self._tokenizer, "is_fast", False)
        return getattr(self._tokenizer, "backend_tokenizer", None) if fast else None

    @property
    def _normalizer(self) -> Any:
        return None if self._backend is None else self._backend.normalizer

    def in_(self, texts: Sequence[str]) -> list[str]:
        """Those that stand in texts, longest first."""
        found = set()
        for text in texts:
            there = {start for start in self._known.starts if start in text}
            found |= {name for name in self._known.names if name[:2] in there and name in text}
        return [name for name in self._known.names if name in found]

    def check(self, texts: Sequence[str]) -> None:
        """Raise PromptError where normalizing a text makes one of it, which no mark can prevent.

        What is one before it is normalized is marked.
        """
        for text in texts if self._known.normalized else ():
            made = self._normalizer.normalize_str(text)
            for name in self._known.normalized:
                if name in made and name not in text:
                    raise PromptError(
                        f"a text has what the tokenizer reads as its control token {quoted(name)}; "
                        "write it in another way"
                    )

    def plain(self, text: str, read: Read) -> list[int]:
        """The ids of a text in which no token is looked for. Raises PromptError."""
        if (backend := self._backend) is None:
            return read(text, add_special_tokens=False, split_special_tokens=True)
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        parts = [text]
        if backend.pre_tokenizer is not None:
            parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for part in parts for token in backend.model.tokenize(part)]

    def as_text(self, name: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a token's name as text, which `encode` finds without looking for tokens.

        A vocabulary may have the name as a piece of text, too; then the name is cut in two. Raises
        PromptError where that does not help.
        """
        for cut in range(len(name)):
            ids = [id_ for part in (name[:cut], name[cut:]) if part for id_ in encode(part)]
            if ids and self._ids.isdisjoint(ids):
                return ids
        raise PromptError(
            f"a text has the control token {quoted(name)}, which this tokenizer cannot read as "
            "text; drop it"
        )

    @cached_property
    def _ids(self) -> frozenset[int]:
        """The ids of all of them, but for one that stands for all that is unknown."""
        unknown = getattr(self._tokenizer, "unk_token", None)
        own = [name for name in self._known.names if name != unknown]
        return frozenset(map(self._tokenizer.convert_tokens_to_ids, own))


class _Inside:
    """Encodes pieces that stand inside of a text.

    SentencePiece puts a space before the beginning of one, so a line end is put before it, whose
    ids are then taken off.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._before = encode("\n")

    def __call__(self, piece: str) -> list[int]:
        before, ids = self._before, self._encode(f"\n{piece}")
        if before and ids[: len(before)] == before:
            return ids[len(before) :]
        return self._encode(piece)


class Marks:
    """The marks of one chat in which names of control tokens stand."""

    def __init__(self, control: ControlTokens, present: Sequence[str], marks: Sequence[str]):
        self._control = control
        self.opening, self._close = marks
        self._names = re.compile("|".join(map(re.escape, present)))
        opens, closes = (f"(?:{mark}|\\\\u{ord(mark):04x})" for mark in marks)  # as JSON has it
        self._pieces = re.compile(f"{opens}({self._names.pattern}){closes}|{opens}|{closes}")

    def mark(self, value: Any) -> Any:
        """The same with marks around every name, in keys of objects as well."""
        if isinstance(value, str):
            return self._names.sub(rf"{self.opening}\g<0>{self._close}", value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def count(self, text: str) -> int:
        return sum(1 for _ in self._names.finditer(text))

    def settings(self, asked: ChatSettings) -> ChatSettings:
        return replace(
            asked,
            tools=self.mark(asked.tools),
            documents=self.mark(asked.documents),
            chat_template_kwargs=self.mark(asked.chat_template_kwargs),
        )

    def encode(self, text: str, read: Read) -> list[int]:
        """The ids of what a template made of marked texts, without the marks. Raises PromptError.

        A template that cuts texts leaves marks without a partner, which stand for nothing.
        """
        as_always = partial(read, add_special_tokens=False)
        inside = _Inside(as_always)
        plain = _Inside(partial(self._control.plain, read=read))
        spelled = cache(partial(self._control.as_text, encode=plain))
        first, *rest = self._pieces.split(text)
        ids = as_always(first) if first else []
        for at, piece in enumerate(rest):
            if piece:
                ids += inside(piece) if at % 2 else spelled(piece)
        return ids


def marks_for(
    tokenizer: Any, literals: str, messages: Sequence[Any], asked: ChatSettings
) -> Marks | None:
    """The marks for a chat; None: no control token stands in it. Raises PromptError."""
    control = ControlTokens(tokenizer, literals)
    given = (messages, asked.tools, asked.documents, asked.chat_template_kwargs)
    texts = list(_texts(given))
    control.check(texts)
    if not (found := control.in_(texts)):
        return None
    marks = Marks(control, found, _free(texts))
    if (count := sum(map(marks.count, texts))) > MOST:
        raise PromptError(f"the texts have {count} control tokens, and {MOST} are the most")
    return marks


def _free(texts: Sequence[str]) -> list[str]:
    """Two marks that stand in none of the texts, not even as JSON has them."""
    free = [
        mark
        for mark in _NO_CHARACTERS
        if not any(mark in text or f"\\u{ord(mark):04x}" in text for text in texts)
    ]
    if len(free) < 2:
        raise PromptError("the texts of this chat have too many code points that are no characters")
    return free[:2]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
