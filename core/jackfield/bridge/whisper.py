"""How Whisper's decoder begins: with tokens for the language and the task of a sound.

The rules are those of transformers' `WhisperGenerationMixin._retrieve_init_tokens`, for sounds of
one window (30 s) and texts without timestamps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from jackfield.errors import SettingsError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from jackfield.requests.wishes import Wishes

TASKS = ("transcribe", "translate")
_TIMESTAMPS = "return_timestamps"


@dataclass(frozen=True)
class Beginning:
    """The tokens that a decoder begins with.

    Attributes:
        ids: One at least.
        languages: The tokens of which the likeliest becomes the second one; none: it is told.
    """

    ids: list[int]
    languages: tuple[int, ...] = ()


def is_whisper(model: PreTrainedModel) -> bool:
    """Whether its class generates as transformers' Whisper does."""
    return getattr(type(model), "generate", None) is WhisperGenerationMixin.generate


class WhisperBeginnings:
    """What texts of a Whisper begin with, as its generation config and a request say."""

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size

    def of(self, wished: Wishes, start: int) -> Beginning:
        """What a request's text begins with, behind `start`. Raises SettingsError."""
        if self._asked(wished, _TIMESTAMPS):
            raise SettingsError(
                "return_timestamps=True is not built here, as the text would be cut by them; set "
                "return_timestamps=False"
            )
        language, task = self._text(wished, "language"), self._text(wished, "task")
        self._check_multilingual(wished)
        ids: list[int | None] = [start]
        if task is None and language is None:
            ids += self._forced()
        ids, languages = self._with_language(ids, language)
        ids += self._of_a_task(ids, language, task)
        plain = self._own("no_timestamps_token_id")
        if plain is not None and ids[-1] != plain:
            ids.append(plain)
        return Beginning([self._token(token) for token in ids if token is not None], languages)

    def _own(self, name: str) -> Any:
        return getattr(self._model.generation_config, name, None)

    def _asked(self, wished: Wishes, name: str) -> Any:
        """What a request says, or else its model's own; a None of the request's lifts that."""
        return wished.given.get(name) if name in wished.of_caller else self._own(name)

    def _text(self, wished: Wishes, name: str) -> str | None:
        value = self._asked(wished, name)
        if isinstance(value, list | tuple):
            raise SettingsError(
                f"{name} must be a string, not {quoted(value)}; for several prompts give "
                f"settings=[{{'{name}': …}}, …]"
            )
        if value is not None and not isinstance(value, str):
            raise SettingsError(f"{name} must be a string, not {quoted(value)}")
        return value

    def _check_multilingual(self, wished: Wishes) -> None:
        for name in ("language", "task"):
            if self._own("is_multilingual") is False and wished.given.get(name) is not None:
                raise SettingsError(
                    f"{name}={quoted(wished.given[name])}: the model knows English only and is "
                    f"not told {name}s; drop it"
                )

    def _forced(self) -> list[int | None]:
        """The tokens of `forced_decoder_ids`, from the second place on; None: one is to be found.

        By these, checkpoints told the language and the task before there were settings for them.
        """
        forced = self._own("forced_decoder_ids")
        if forced is None:
            forced = getattr(self._model.config, "forced_decoder_ids", None)
        if not forced:
            return []
        right = isinstance(forced, list | tuple) and all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in forced
        )
        if not right or [place for place, _ in forced] != [*range(1, len(forced) + 1)]:
            raise SettingsError(
                f"forced_decoder_ids={quoted(forced)} of the model's config do not say a token for "
                "each place from 1 on; set language and task"
            )
        return [token for _, token in forced]

    def _with_language(
        self, ids: list[int | None], language: str | None
    ) -> tuple[list[int | None], tuple[int, ...]]:
        """`ids` with the language in the second place, and of which tokens it is to be found."""
        known = self._tokens_of("lang_to_id")
        if language is not None:
            return [ids[0], self._language(language, known), *ids[2:]], ()
        if known and (len(ids) == 1 or ids[1] is None):
            return [ids[0], ids[0], *ids[2:]], tuple(sorted(set(known.values())))
        return ids, ()

    def _language(self, language: str, known: Mapping[str, int]) -> int:
        if not known:
            raise SettingsError(
                f"language={quoted(language)}: the model's generation config has no lang_to_id, "
                "which says the languages' tokens; drop it, or give decoder_input_ids"
            )
        name = language.lower()
        token = name if name in known else f"<|{TO_LANGUAGE_CODE.get(name, name)}|>"
        if token not in known:
            raise SettingsError(
                f"language={quoted(language)} is none of the model's {len(known)}; give a name "
                f"such as 'german', or a code: {', '.join(sorted(k.strip('<|>') for k in known))}"
            )
        return known[token]

    def _of_a_task(
        self, ids: list[int | None], language: str | None, task: str | None
    ) -> list[int | None]:
        """The token of the task, where it is to be told."""
        known = self._tokens_of("task_to_id")
        if task is None and (language is None or not known):
            return []
        if task is not None and (task not in TASKS or task not in known):
            raise SettingsError(
                f"task={quoted(task)} is none of the model's; give one of "
                f"{', '.join(sorted(known)) or 'none, as it has none'}"
            )
        if task is None and not set(known.values()).isdisjoint(ids):
            return []
        return [known.get(task or TASKS[0])]

    def _tokens_of(self, name: str) -> Mapping[str, int]:
        """A mapping to tokens in its generation config; empty where there is none."""
        found = self._own(name)
        if found is None:
            return {}
        if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
            raise SettingsError(f"{name} in the model's generation config is no mapping; mend it")
        return {key: self._token(token) for key, token in found.items()}

    def _token(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value < self._vocab_size:
            raise SettingsError(
                f"{quoted(value)} in the model's generation config is no token id (0 to "
                f"{self._vocab_size - 1}); mend it"
            )
        return value
