"""Settings that hold tokens, texts and functions: read, and checked against the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jackfield.errors import SettingsError, quoted
from jackfield.requests.checked_numbers import LARGEST, plain
from jackfield.requests.honouring import Limits
from jackfield.requests.wishes import Wishes

if TYPE_CHECKING:
    import torch

_LISTS = (list, tuple)

# Each is looked at after every token, in the loop that all requests share: a fraction of a
# millisecond for as many as this.
MOST_STOPS = 1000
MOST_PHRASES = 10_000


def token_ids(value: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids from an int, a list of ints, or nothing."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)
    ids = tuple(map(plain, ids))
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            never = "; eos_token_id=None ends at none" if name == "eos_token_id" else ""
            raise SettingsError(
                f"{name} holds {quoted(token)}, which is no token id (0 to {vocab_size - 1}){never}"
            )
    return tuple(map(int, ids))


def one_token(wishes: Wishes, name: str, vocab_size: int, default: int) -> int:
    """The one token id that a field names. Raises SettingsError for none, and for several."""
    value = wishes.given.get(name)
    if value is None:
        return default
    try:
        ids = token_ids(value, name, vocab_size)
    except SettingsError as error:
        raise SettingsError(f"{error}{wishes.origin(name)}") from None
    if len(ids) != 1:
        raise SettingsError(
            f"{name} must be one token id, not {len(ids)} of them{wishes.origin(name)}; for "
            f"several prompts give settings=[{{'{name}': …}}, …]"
        )
    return ids[0]


def biases(
    given: Mapping[str, Any], eos: tuple[int, ...], vocab_size: int
) -> dict[tuple[int, ...], float]:
    """`sequence_bias`, `bad_words_ids` and `suppress_tokens` as one mapping."""
    found: dict[tuple[int, ...], float] = {}
    for key, value in _pairs(given.get("sequence_bias", ())):
        ids = token_ids(key, "sequence_bias", vocab_size)
        if not ids:
            raise SettingsError("sequence_bias has an entry without a token id; drop it")
        found[ids] = _bias(plain(value), ids)
    words = given.get("bad_words_ids", ())
    if not (isinstance(words, _LISTS) and all(isinstance(w, _LISTS) and w for w in words)):
        raise SettingsError(
            f"bad_words_ids must be lists of token ids, none empty, not {quoted(words)}"
        )
    for word in words:
        ids = token_ids(word, "bad_words_ids", vocab_size)
        if not (len(ids) == 1 and ids[0] in eos):  # as in transformers, EOS is no bad word
            found[ids] = -math.inf
    for token in token_ids(given.get("suppress_tokens"), "suppress_tokens", vocab_size):
        found[(token,)] = -math.inf
    if (phrases := sum(len(ids) > 1 for ids in found)) > MOST_PHRASES:
        raise SettingsError(
            f"sequence_bias and bad_words_ids have {phrases} entries of several tokens, and "
            f"{MOST_PHRASES} are the most; give fewer, or a logits_processor"
        )
    return found


def _bias(value: Any, ids: tuple[int, ...]) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and (abs(value) <= LARGEST or value == -math.inf)):
        raise SettingsError(
            f"sequence_bias for {quoted(list(ids))} must be a finite number or -inf, not "
            f"{quoted(value)}"
        )
    return float(value)


def _pairs(bias: Any) -> Sequence[tuple[Any, Any]]:
    """The (token ids, number) pairs of a `sequence_bias`, which is a mapping or a list of pairs."""
    pairs = list(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, _LISTS) or not all(
        isinstance(p, _LISTS) and len(p) == 2 for p in pairs
    ):
        raise SettingsError(f"sequence_bias must be like {{(5, 6): -1.0}}, not {quoted(bias)}")
    return pairs


def functions(given: Mapping[str, Any], name: str) -> tuple[Callable[..., Any], ...]:
    """One function of (ids, scores), or a list of them."""
    value = given.get(name, ())
    found = tuple(value) if isinstance(value, _LISTS) else (value,)
    for function in found:
        if not callable(function):
            raise SettingsError(
                f"{name} must be functions of (input_ids, scores), such as transformers' own, not "
                f"{quoted(function)}"
            )
    return found


def allowed_by_prefix(given: Mapping[str, Any], number: int) -> tuple[Callable[..., Any], ...]:
    """`prefix_allowed_tokens_fn`, which is told the prompt's `number`."""
    allowed = given.get("prefix_allowed_tokens_fn")
    if allowed is not None and not callable(allowed):
        raise SettingsError(
            "prefix_allowed_tokens_fn must be a function of (number of the prompt, its tokens), "
            f"not {quoted(allowed)}"
        )
    return () if allowed is None else (AllowedByPrefix(allowed, number),)


def salt(value: Any) -> str:
    if not isinstance(value, str):
        raise SettingsError(f"cache_salt must be a string, not {quoted(value)}")
    return whole_text("cache_salt", value)


def adapter(value: Any) -> str | None:
    """The name of an adapter; whether there is one is seen when the request enters."""
    if value is not None and not isinstance(value, str):
        raise SettingsError(
            "adapter must be the name of one that jackfield.load(…, adapters={…}) was given, not "
            f"{quoted(value)}"
        )
    return value


def whole_text(name: str, value: str) -> str:
    """`value`, which the setting `name` has. Raises SettingsError for one that is no Unicode."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"{name} has half a character in it: {error.reason}") from None
    return value


def stop_strings(value: Any, limits: Limits) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not (isinstance(strings, _LISTS) and all(isinstance(s, str) and s for s in strings)):
        raise SettingsError(f"stop_strings must be non-empty strings, not {quoted(value)}")
    if strings and not limits.has_tokenizer:
        raise SettingsError(
            "stop_strings need a tokenizer, which this model has not; stop on token ids with "
            "eos_token_id=[…]"
        )
    found = tuple(dict.fromkeys(map(str, strings)))
    if len(found) > MOST_STOPS:
        raise SettingsError(
            f"stop_strings has {len(found)} texts, and {MOST_STOPS} are the most; give fewer, or "
            "stopping_criteria"
        )
    return found


@dataclass(frozen=True)
class AllowedByPrefix:
    """A processor that forbids what `allowed(number, tokens)` does not list, as transformers does.

    `number` is that of the prompt among those of the call.
    """

    allowed: Callable[[int, torch.Tensor], Any]
    number: int

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        import torch

        tokens = torch.as_tensor(self.allowed(self.number, ids[0]), device=scores.device).flatten()
        if tokens.numel() == 0:
            raise ValueError("prefix_allowed_tokens_fn allows no token")
        if tokens.dtype == torch.bool or tokens.is_floating_point() or tokens.is_complex():
            raise ValueError(f"it must return token ids, not {tokens.dtype}")
        vocab, tokens = scores.shape[-1], tokens.long()
        if wrong := tokens[(tokens < 0) | (tokens >= vocab)].tolist()[:1]:
            raise ValueError(f"it allows {wrong[0]}, which is no token id (0 to {vocab - 1})")
        kept = torch.full_like(scores, -torch.inf)
        kept[:, tokens] = scores[:, tokens]
        return kept
