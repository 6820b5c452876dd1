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
from typing import TYPE_CHECKING, Any

from jackfield.contracts.settings import Structure
from jackfield.errors import SettingsError
from jackfield.sampling.constraint import Constraint, Wanted, broken
from jackfield.sampling.fenced import OwnFailure, fenced

if TYPE_CHECKING:
    import torch

#: Of llguidance's unit of work: a fifth of its default, which lets a grammar take five seconds.
_MOST_WORK = 200_000
_KEPT = 128  # compiled grammars
_REHEARSED = 16  # tokens

_NO_END = "<|jackfield: no end|>"


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
        made = self._compiled(structure, own).deep_copy()
        constraint = Constraint(made, structure.kind, own, may_end=bool(ends))
        if not ends and not self._goes_on(constraint):
            raise SettingsError(
                f"{structure.kind} is met by the empty text alone, and the request has no "
                "eos_token_id to end it with; set one, or change it"
            )
        return constraint

    def _goes_on(self, constraint: Constraint) -> bool:
        """Whether a text begins with any token that is no end."""
        return not set(self._next(constraint.matcher)) <= set(constraint.ends)

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
        vocabulary = self._vocabulary(ends)
        made = llguidance.LLMatcher(vocabulary, _unforced(grammar), log_level=0, limits=limits)
        if (cause := self._flaw(made, ends)) is not None:
            raise SettingsError(f"{structure.kind} cannot be met: {cause}; change it")
        return made

    def _flaw(self, made: Any, ends: tuple[int, ...]) -> str | None:
        """Why a text of some tokens cannot be made; None: it can."""
        tried, forced, stuck = (made if made.is_error() else made.deep_copy()), True, False
        for step in range(_REHEARSED):
            if tried.is_error() or tried.is_stopped():
                break
            following = [token for token in self._next(tried) if token not in ends]
            if not following:
                stuck = not tried.is_accepting()
                break
            forced &= len(following) == 1
            tried.consume_token(following[7919 * step % len(following)])
        if tried.is_error() and "NoExtension" not in tried.get_error():
            return broken(tried.get_error())
        if forced and (stuck or tried.is_error()):
            return "none but an EOS token can follow its beginning"
        return None

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

    def _read_vocabulary(self, ends: tuple[int, ...]) -> Any:
        """What llguidance knows of the tokens."""
        from llguidance.hf import from_tokenizer

        try:
            tokenizer = _set_apart(self._with_end, ends)
            return from_tokenizer(tokenizer, n_vocab=self._width, eos_token=list(ends))
        except Exception as error:
            raise SettingsError(
                f"structured output does not work with this tokenizer: {error}"
            ) from error

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
        try:
            self._fill(starts, bits)
        except BaseException:  # noqa: BLE001 - a panic of llguidance is no Exception
            for start in starts:  # so that it ends the one whose structure it is
                self._fill_alone(start, bits)
        return bits

    def _fill(self, starts: Seq[tuple[int, Wanted]], bits: torch.Tensor) -> None:
        """Have llguidance write the rows of these texts, each from its first one on."""
        where = (bits.data_ptr(), bits.shape[1] * 4, bits.shape[0])
        plain = [(one.constraint.matcher, row) for row, one in starts if not one.drafts]
        if plain:
            self._many.unsafe_compute_mask_ptr(plain, *where)
        guessed = [(w.constraint.matcher, row, list(w.drafts)) for row, w in starts if w.drafts]
        if guessed:
            self._many.unsafe_compute_mask_ptr_with_draft_token(guessed, *where)
        for first, one in starts:
            if closed := [first + count for count in one.constraint.closed(one.drafts)]:
                for token in one.constraint.ends:
                    bits[closed, token // 32] &= ~_bit(token % 32)

    def _fill_alone(self, start: tuple[int, Wanted], bits: torch.Tensor) -> None:
        """The same for one; where that fails, its rows stay forbidden and its request ends."""
        first, one = start
        try:
            fenced("structure", one.request, lambda: self._fill([start], bits))
        except OwnFailure as failure:
            bits[first : first + 1 + len(one.drafts)] = 0
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

    It would look for it in the tokenizer's own way to cut the text, which has a special token
    wherever one is spelled; and it would pay at once for all that is left.
    """
    raw = not grammar.startswith('{"grammars"')
    (inner,) = [{"lark_grammar": grammar}] if raw else json.loads(grammar)["grammars"]
    outer = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @inner', "name": "outer"}
    return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]})
