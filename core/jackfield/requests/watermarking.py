"""`watermarking_config`: a watermark of transformers', checked, and made for one text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from jackfield.errors import SettingsError, quoted
from jackfield.requests.checked_numbers import CheckedNumbers
from jackfield.requests.field_processors import FieldProcessor, Make
from jackfield.requests.wishes import Wishes

if TYPE_CHECKING:
    Read = Callable[[CheckedNumbers, Mapping[str, Any]], dict[str, Any]]

_NAME = "watermarking_config"
_SCHEMES = ("lefthash", "selfhash")
_LARGEST = 2**63 - 1  # what torch's generators take
_DEPTHS = 256  # keys of SynthID at most; its authors use 30
_TABLE = 2**24  # as in transformers
_HISTORY = 2**20


def watermark(wishes: Wishes, prompt_length: int, vocab_size: int) -> FieldProcessor | None:
    """What marks the text of a request. Raises SettingsError for a config that is none."""
    value = wishes.given.get(_NAME)
    if value is None:
        return None
    try:
        made, fields = _read(value)
    except SettingsError as error:
        raise SettingsError(f"{_NAME}: {error}{wishes.origin(_NAME)}") from None
    return FieldProcessor(_NAME, fields, prompt_length, None, _maker(made, fields, vocab_size))


def _maker(made: type[Any], fields: Mapping[str, Any], vocab_size: int) -> Make:
    return lambda prompt: made(**fields).construct_processor(vocab_size, prompt.device)


def _read(value: Any) -> tuple[type[Any], dict[str, Any]]:
    """The class of a config, or of a mapping that is like one, and all its fields."""
    if isinstance(value, WatermarkingConfig | SynthIDTextWatermarkingConfig):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        raise SettingsError(
            "it must be a WatermarkingConfig or a SynthIDTextWatermarkingConfig of transformers, "
            f"or a mapping of its fields, not {quoted(value)}"
        )
    synthid = "keys" in value or "ngram_len" in value
    made, read = (
        (SynthIDTextWatermarkingConfig, _synthid) if synthid else (WatermarkingConfig, _green)
    )
    fields = read(CheckedNumbers(value), value)
    if strange := [name for name in value if name not in fields]:
        raise SettingsError(
            f"{made.__name__} has no {quoted(strange[0])}; it has {', '.join(fields)}"
        )
    return made, fields


def _green(number: CheckedNumbers, value: Mapping[str, Any]) -> dict[str, Any]:
    """Green tokens, by the tokens before them (Kirchenbauer et al. 2023, arXiv:2301.10226)."""
    scheme = value.get("seeding_scheme", _SCHEMES[0])
    if not isinstance(scheme, str) or scheme not in _SCHEMES:
        raise SettingsError(
            f"seeding_scheme must be one of {', '.join(_SCHEMES)}, not {quoted(scheme)}"
        )
    return {
        "greenlist_ratio": number.real("greenlist_ratio", 0.25, above=0, below=1),
        "bias": number.real("bias", 2.0),
        "hashing_key": number.integer("hashing_key", 15485863, at_least=0, at_most=_LARGEST),
        "seeding_scheme": scheme,
        "context_width": number.integer("context_width", 1, at_least=1),
    }


def _synthid(number: CheckedNumbers, value: Mapping[str, Any]) -> dict[str, Any]:
    """SynthID-Text (Dathathri et al. 2024, doi:10.1038/s41586-024-08025-4)."""
    for name in ("ngram_len", "keys"):
        if name not in value:
            raise SettingsError(f"SynthIDTextWatermarkingConfig needs {name}, and there is none")
    return {
        "ngram_len": number.integer("ngram_len", 0, at_least=2, at_most=_DEPTHS),
        "keys": _keys(value["keys"]),
        "context_history_size": number.integer(
            "context_history_size", 1024, at_least=1, at_most=_HISTORY
        ),
        "sampling_table_seed": number.integer(
            "sampling_table_seed", 0, at_least=0, at_most=_LARGEST
        ),
        "sampling_table_size": number.integer(
            "sampling_table_size", 2**16, at_least=1, at_most=_TABLE
        ),
        "skip_first_ngram_calls": _flag(value, "skip_first_ngram_calls"),
        "debug_mode": _flag(value, "debug_mode"),
    }


def _keys(value: Any) -> list[int]:
    whole = isinstance(value, list | tuple) and all(type(key) is int for key in value)
    if not whole or not 1 <= len(value) <= _DEPTHS or not all(abs(k) <= _LARGEST for k in value):
        raise SettingsError(
            f"keys must be 1 to {_DEPTHS} whole numbers of 64 bits, not {quoted(value)}"
        )
    return list(value)


def _flag(value: Mapping[str, Any], name: str) -> bool:
    if not isinstance(found := value.get(name, False), bool):
        raise SettingsError(f"{name} must be True or False, not {quoted(found)}")
    return found
