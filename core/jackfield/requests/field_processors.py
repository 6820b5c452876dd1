"""Fields of a `GenerationConfig` that a processor of transformers' own does, made for one request.

They run before the request's `logits_processor`, in the order in which `generate` runs them, on its
own rows: each of them looks at the whole text. `prefix_allowed_tokens_fn` runs before `LATE` ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jackfield.errors import SettingsError, quoted
from jackfield.requests.checked_numbers import CheckedNumbers
from jackfield.requests.token_settings import token_ids
from jackfield.requests.vocabulary import asks_for_nothing
from jackfield.requests.wishes import Wishes

if TYPE_CHECKING:
    import torch

#: From the prompt, int64 `[1, prompt_length]` on the device of the scores, to a processor.
Make = Callable[[Any], Any]


#: What says more than `prefix_allowed_tokens_fn` does.
LATE = frozenset(
    {
        "begin_suppress_tokens", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "remove_invalid_values",
    }
)  # fmt: skip


@dataclass
class FieldProcessor:
    """What a field with this value does behind a prompt of so many tokens.

    It is made when it is first called, as it may look at the prompt: `encoder_ids` where an encoder
    reads that.
    """

    name: str
    value: Any
    prompt_length: int
    encoder_ids: Sequence[int] | None = field(compare=False, repr=False)
    make: Make = field(compare=False, repr=False)
    _made: Any = field(default=None, init=False, compare=False, repr=False)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._made is None:
            own = self.encoder_ids
            prompt = input_ids.new_tensor([[*own]]) if own else input_ids[:, : self.prompt_length]
            self._made = self.make(prompt)
        return self._made(input_ids, scores)  # type: ignore[no-any-return]


def by_fields(
    wishes: Wishes,
    lengths: tuple[int, int],
    eos: Sequence[int],
    vocab_size: int,
    encoder_ids: Sequence[int] | None = None,
) -> tuple[FieldProcessor, ...]:
    """The processors that fields of `given` ask for. Raises SettingsError for odd values.

    `lengths` are those of the prompt and of the new text at most.
    """
    prompt, new = lengths
    given = wishes.given
    count = CheckedNumbers(given, wishes.origin)

    def tokens(name: str) -> Sequence[int]:
        try:
            return token_ids(given.get(name), name, vocab_size)
        except SettingsError as error:
            raise SettingsError(f"{error}{wishes.origin(name)}") from None

    makers: dict[str, Callable[[str], Make]] = {
        "encoder_repetition_penalty": lambda name: _penalized(count.real(name, 1.0, above=0)),
        "no_repeat_ngram_size": lambda name: _unrepeated(count.integer(name, 0, at_least=0)),
        "encoder_no_repeat_ngram_size": lambda name: _not_of_the_prompt(
            count.integer(name, 0, at_least=0)
        ),
        "forced_bos_token_id": lambda name: _begun(tokens(name), f"{name}{wishes.origin(name)}"),
        "forced_eos_token_id": lambda name: _ended(tokens(name), prompt + new),
        "remove_invalid_values": lambda name: _valid(given[name], tokens("suppress_tokens"), name),
        "exponential_decay_length_penalty": lambda name: _decaying(wishes, eos, prompt),
        "begin_suppress_tokens": lambda name: _begun_without(
            tokens(name), prompt + (prompt == 1 and "forced_bos_token_id" in given)
        ),
    }
    asked = [n for n in makers if n in given and not asks_for_nothing(n, given[n])]
    return tuple(FieldProcessor(n, given[n], prompt, encoder_ids, makers[n](n)) for n in asked)


def _penalized(penalty: float) -> Make:
    from transformers.generation.logits_process import (
        EncoderRepetitionPenaltyLogitsProcessor as Processor,
    )

    return lambda prompt: Processor(penalty, prompt)


def _unrepeated(size: int) -> Make:
    from transformers import NoRepeatNGramLogitsProcessor as Processor

    return lambda _: Processor(size)


def _not_of_the_prompt(size: int) -> Make:
    from transformers import EncoderNoRepeatNGramLogitsProcessor as Processor

    return lambda prompt: Processor(size, prompt)


def _begun(tokens: Sequence[int], name: str) -> Make:
    from transformers import ForcedBOSTokenLogitsProcessor as Processor

    if len(tokens) != 1:
        raise SettingsError(f"{name} must be one token id, not {len(tokens)} of them")
    return lambda _: Processor(tokens[0])


def _valid(value: Any, suppressed: Sequence[int], name: str) -> Make:
    """Scores that are numbers; what is suppressed, which we do before, stays so."""
    from transformers import (
        InfNanRemoveLogitsProcessor,
        LogitsProcessorList,
        SuppressTokensLogitsProcessor,
    )

    if value is not True:
        raise SettingsError(f"{name} must be True or False, not {quoted(value)}")
    return lambda prompt: LogitsProcessorList(
        [
            InfNanRemoveLogitsProcessor(),
            SuppressTokensLogitsProcessor([*suppressed], device=str(prompt.device)),
        ]
    )


def _ended(tokens: Sequence[int], max_length: int) -> Make:
    from transformers import ForcedEOSTokenLogitsProcessor as Processor

    return lambda prompt: Processor(max_length, [*tokens], device=str(prompt.device))


def _begun_without(tokens: Sequence[int], prompt_length: int) -> Make:
    from transformers import SuppressTokensAtBeginLogitsProcessor as Processor

    return lambda prompt: Processor([*tokens], prompt_length, device=str(prompt.device))


def _decaying(wishes: Wishes, eos: Sequence[int], prompt_length: int) -> Make:
    from transformers.generation.logits_process import ExponentialDecayLengthPenalty as Processor

    name = "exponential_decay_length_penalty"
    value = wishes.given[name]
    if not _is_decay(value):
        raise SettingsError(
            f"{name} must be (from which new token on, factor above 0), as in (50, 1.05), not "
            f"{quoted(value)}{wishes.origin(name)}"
        )
    if not eos:
        raise SettingsError(
            f"{name} makes an end likelier, and there is no eos_token_id; give one, or lift it "
            f"with {name}=None{wishes.origin(name)}"
        )
    start, factor = value
    return lambda _: Processor((start, factor), [*eos], prompt_length)


def _is_decay(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    start, factor = value
    numbers = type(start) is int and type(factor) in (int, float)
    return numbers and start >= 0 and 0 < factor < math.inf
