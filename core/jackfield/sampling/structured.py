"""Structured output: a text that a JSON schema, a regular expression, a grammar or a list allows.

A constraint says at each position which tokens may come next, and forbids all others; how they are
chosen among those is the sampler's business, so it goes together with every decoding strategy. The
sets of tokens come from llguidance (https://github.com/guidance-ai/llguidance), while the model
computes. llguidance and no other: its automata are built as they are needed, so that a schema costs
milliseconds and not seconds before the first token, its regular expressions cannot backtrack, it
has limits on what a grammar may cost, and it brings no other package along.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from jackfield.contracts.settings import Structure
from jackfield.errors import SettingsError
from jackfield.requests.text_errors import failed
from jackfield.sampling.fenced import OwnFailure, fenced

if TYPE_CHECKING:
    import torch

#: Of llguidance's unit of work: a fifth of its default, which lets a grammar take five seconds.
_MOST_WORK = 200_000
_KEPT = 128  # compiled grammars
_REHEARSED = 16  # tokens

_NO_END = "<|jackfield: no end|>"


class Constraint:
    """What may follow in one sequence. Grows with it; the next request gets one of its own."""

    def __init__(self, matcher: Any, forbidden: tuple[int, ...]) -> None:
        self.matcher = matcher
        self.failure: str | None = None  # the error that it ends with
        self.forbidden = forbidden  # ends that the grammar knows and the request does not

    def copy(self) -> Constraint:
        """One that goes on from here by itself."""
        return Constraint(self.matcher.deep_copy(), self.forbidden)

    def advance(self, tokens: Seq[int]) -> int | None:
        """The sequence grows by `tokens`; None, or how many of them there are before its end."""
        for count, token in enumerate(tokens, 1):
            self.matcher.consume_token(token)
            if self.matcher.is_stopped():
                return count
        return None

    @property
    def error(self) -> str | None:
        """Why nobody knows what may follow (it costs too much to find out), as the error of the
        request; None: all is well.
        """
        if self.failure is None and self.matcher.is_error():
            self.failure = failed("structure", _broken(self.matcher.get_error()))
        return self.failure


class Wanted(NamedTuple):
    """A text whose next tokens are wanted, of which request, and the drafts that are tried."""

    request: int
    constraint: Constraint
    drafts: Seq[int] = ()


class Structures:
    """The constraints of an engine's requests. Called from several threads.

    `tokenizer` is a fast one of transformers; `vocab_size` is the width of the model's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled = functools.lru_cache(_KEPT)(self._compile)
        self._vocabulary = functools.lru_cache(8)(self._read_vocabulary)
        self._thread: ThreadPoolExecutor | None = None
        self._many: Any = None  # llguidance's own threads

    def start(self, structure: Structure, ends: tuple[int, ...]) -> Constraint:
        """The constraint of a new sequence whose `ends` are its EOS tokens.

        Raises SettingsError where nothing can ever fit, or it costs too much to know.
        """
        own = ends or (self._with_end.eos_token_id,)
        constraint = Constraint(self._compiled(structure, own).deep_copy(), () if ends else own)
        if not ends and not self._goes_on(constraint):
            raise SettingsError(
                f"{structure.kind} is met by the empty text alone, and the request has no "
                "eos_token_id to end it with; set one, or change it"
            )
        return constraint

    def _goes_on(self, constraint: Constraint) -> bool:
        """Whether a text begins with any token that is no end."""
        return not set(self._next(constraint.matcher)) <= set(constraint.forbidden)

    def _next(self, matcher: Any) -> list[int]:
        """The tokens that may follow."""
        import torch

        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        found: list[int] = unpacked(bits[None], self._width)[0].nonzero()[:, 0].tolist()
        return found

    def _compile(self, structure: Structure, ends: tuple[int, ...]) -> Any:
        """A matcher to copy from. It tries some tokens first: most costs are at the beginning."""
        import llguidance
        from llguidance._lib import LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=_MOST_WORK)
        try:
            grammar = _grammar(structure)
        except ValueError as error:
            raise SettingsError(f"{structure.kind} cannot be read: {error}") from None
        vocabulary, apart = self._vocabulary(ends)
        if apart or self._spells_a_token(structure):
            grammar = _unforced(grammar)
        made = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if (cause := self._flaw(made, ends)) is not None:
            raise SettingsError(f"{structure.kind} cannot be met: {cause}; change it")
        return made

    def _spells_a_token(self, structure: Structure) -> bool:
        """Whether a special token's spelling is to be text, which would be read as that token."""
        source = structure.source.replace("\\", "")
        return any(token in source for token in self._tokenizer.all_special_tokens)

    def _flaw(self, made: Any, ends: tuple[int, ...]) -> str | None:
        """Why a text of some tokens cannot be made; None: it can."""
        tried, forced = (made if made.is_error() else made.deep_copy()), True
        for step in range(_REHEARSED):
            if tried.is_error() or tried.is_stopped():
                break
            following = [token for token in self._next(tried) if token not in ends]
            if not following:
                break
            forced &= len(following) == 1
            tried.consume_token(following[7919 * step % len(following)])
        if not tried.is_error():
            return None
        if "NoExtension" not in tried.get_error():
            return _broken(tried.get_error())
        return "none but an EOS token can follow its beginning" if forced else None

    @functools.cached_property
    def _with_end(self) -> Any:
        """The tokenizer, or a copy of it that has an EOS token, without which llguidance does not.

        It must be a token of its own: one that means something could not be said any more.
        """
        if self._tokenizer.eos_token_id is not None:
            return self._tokenizer
        ended = copy.deepcopy(self._tokenizer)
        ended.add_special_tokens({"eos_token": _NO_END})
        return ended

    @property
    def _width(self) -> int:
        """Tokens that llguidance knows: the model's, and perhaps the one that was added."""
        added = self._with_end is not self._tokenizer
        return max(self._vocab_size, self._with_end.eos_token_id + 1 if added else 0)

    def _read_vocabulary(self, ends: tuple[int, ...]) -> tuple[Any, bool]:
        """What llguidance knows of the tokens, and whether some of `ends` are otherwise text."""
        from llguidance.hf import from_tokenizer

        try:
            tokenizer = _set_apart(self._with_end, ends)
            found = from_tokenizer(tokenizer, n_vocab=self._width, eos_token=list(ends))
        except Exception as error:
            raise SettingsError(
                f"structured output does not work with this tokenizer: {error}"
            ) from error
        return found, tokenizer is not self._with_end

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def begin(self, wanted: Seq[Wanted]) -> Future[torch.Tensor]:
        """Find out, beside the model, what may follow each text, and each of its drafts.

        A bit for each token, int32 `[1 + drafts of each…, words]`, in the order of `wanted`.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "jackfield-structures")
        return self._thread.submit(self._masks, wanted)

    def _masks(self, wanted: Seq[Wanted]) -> torch.Tensor:
        import llguidance
        import torch

        self._many = self._many or llguidance.LLExecutor()
        starts, rows = [], 0
        for one in wanted:
            starts.append((rows, one))
            rows += 1 + len(one.drafts)
        words = -(-self._width // 32)
        bits = torch.zeros(rows, words, dtype=torch.int32)  # what nobody fills in is forbidden
        where = (bits.data_ptr(), words * 4, rows)
        try:
            self._fill(starts, where)
        except BaseException:  # noqa: BLE001 - a panic of llguidance is no Exception
            for start in starts:  # so that it ends the one whose structure it is
                self._fill_alone(start, where)
        for first, one in starts:
            for token in one.constraint.forbidden:
                bits[first : first + 1 + len(one.drafts), token // 32] &= ~_bit(token % 32)
        return bits

    def _fill(self, starts: Seq[tuple[int, Wanted]], where: tuple[int, int, int]) -> None:
        """Have llguidance write the rows of these texts, each from its first one on."""
        plain = [(one.constraint.matcher, row) for row, one in starts if not one.drafts]
        if plain:
            self._many.unsafe_compute_mask_ptr(plain, *where)
        guessed = [(w.constraint.matcher, row, list(w.drafts)) for row, w in starts if w.drafts]
        if guessed:
            self._many.unsafe_compute_mask_ptr_with_draft_token(guessed, *where)

    def _fill_alone(self, start: tuple[int, Wanted], where: tuple[int, int, int]) -> None:
        """The same for one; where that fails, its rows stay forbidden and its request ends."""
        one = start[1]
        try:
            fenced("structure", one.request, lambda: self._fill([start], where))
        except OwnFailure as failure:
            one.constraint.failure = str(failure)


def _set_apart(tokenizer: Any, ends: tuple[int, ...]) -> Any:
    """The tokenizer, or a copy of it in which none of `ends` is text.

    One that is, as a line break may be, would be allowed where the text may go on by it, and end it
    there, before it is whole.
    """
    named = tokenizer.convert_ids_to_tokens(list(ends))
    ordinary = [name for name in named if name not in (None, *tokenizer.all_special_tokens)]
    if not ordinary:
        return tokenizer
    apart = copy.deepcopy(tokenizer)
    apart.add_tokens(ordinary, special_tokens=True)
    return apart


def _bit(place: int) -> int:
    """The int32 with one bit set."""
    return 1 << place if place < 31 else -(1 << 31)


def unpacked(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 `[rows, words]` as bool `[rows, vocab_size]`."""
    import torch

    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits[:, :, None] >> places & 1).bool().flatten(1)[:, :vocab_size]


def _grammar(structure: Structure) -> str:
    from llguidance import LLMatcher

    source = structure.source
    if structure.kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if structure.kind == "json_schema":  # spaced as json.dumps does; loose spaces may never end
        return LLMatcher.grammar_from_json_schema(
            source,
            defaults={
                "whitespace_flexible": False,
                "item_separator": ", ",
                "key_separator": ": ",
            },
        )
    if structure.kind == "choices":
        source = "start: " + " | ".join(json.dumps(choice) for choice in json.loads(source))
    return LLMatcher.grammar_from_lark(source)


def _unforced(grammar: str) -> str:
    """The same, where llguidance takes no token because nothing else is left.

    It would look for it in the tokenizer's own way to cut the text, which may have an end in it.
    """
    raw = not grammar.startswith('{"grammars"')
    (inner,) = [{"lark_grammar": grammar}] if raw else json.loads(grammar)["grammars"]
    outer = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @inner', "name": "outer"}
    return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]})


def _broken(error: str) -> str:
    """What llguidance says, in one line: its last sentence about the cause."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (causes or lines or ["its grammar costs too much"])[0][:300]
