"""Which tokenizer is meant, and reading it, after making sure that its files are whole."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, ProcessorMixin

from jackfield.bridge.config_files import is_folder
from jackfield.bridge.features import reads_features
from jackfield.bridge.gguf import is_gguf
from jackfield.bridge.guilty_fields import without_it
from jackfield.bridge.hub_files import cached_folder, fetch_first
from jackfield.bridge.image_reader import reads_images
from jackfield.bridge.source import ModelSource, find, packaged
from jackfield.errors import CheckpointError, UsageError, quoted
from jackfield.foreign import error_line, read_json

#: A model with one of these has a tokenizer; of these files transformers reads its vocabulary, or
#: which class it is that needs none.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_NAMED = ("bos", "cls", "eos", "mask", "pad", "sep", "unk")
#: field of tokenizer_config.json -> whether a value is right, what it is then; null always is
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "added_tokens_decoder": (lambda v: isinstance(v, dict), "an object"),
    **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"),
                    (lambda v: isinstance(v, list | dict), "a list")),
    "chat_template": (lambda v: isinstance(v, str | list | dict), "a text"),
    "model_input_names": (lambda v: isinstance(v, list), "a list of texts"),
    "model_max_length": (lambda v: type(v) in (int, float), "a number"),
    "split_special_tokens": (lambda v: isinstance(v, bool), "true or false"),
    "tokenizer_class": (lambda v: isinstance(v, str), "a text"),
    **dict.fromkeys(("padding_side", "truncation_side"),
                    (lambda v: v in ("left", "right"), "left or right")),
    **dict.fromkeys((f"{name}_token" for name in _NAMED),
                    (lambda v: isinstance(v, str) or (isinstance(v, dict) and "content" in v),
                     "a text")),
}  # fmt: skip
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(source: ModelSource) -> Any | None:
    """The tokenizer of `source`; None for a model without one, which serves token ids only.

    Raises CheckpointError.
    """
    if source.gguf is not None:
        return source.gguf.tokenizer
    if source.location is None or not _has_one(source, source.location):
        return None
    return _read(source.location, source.revision)


def tokenizer_of(given: Any | None, source: ModelSource) -> Any | None:
    """The caller's own tokenizer, or the one that its folder or hub id names; None: the model's.

    Raises CheckpointError, UsageError for what is no tokenizer.
    """
    if given is None:
        return load_tokenizer(source)
    if isinstance(given, str | os.PathLike):
        location = packaged(os.fspath(given))
        if is_gguf(location):
            return load_tokenizer(find(location, None))
        if not location:
            raise UsageError("tokenizer='' names nothing; give a folder, a hub id, or none")
        if is_folder(Path(location), location) and not _in_folder(Path(location)):
            raise CheckpointError(
                f"tokenizer={location!r} is a folder without {' or '.join(FILES)}"
            )
        return _read(location, None)
    if isinstance(given, type) or not (callable(given) and hasattr(given, "decode")):
        raise UsageError(_no_tokenizer(given))
    if isinstance(given, ProcessorMixin):
        if reads_features(source.config):
            return _with_template(given)
        if not reads_images(source):
            raise UsageError(
                "tokenizer=… is a processor, and the model reads text only; give its tokenizer: "
                "processor.tokenizer"
            )
        return _with_template(given)
    return given


def _with_template(processor: Any) -> Any:
    """The tokenizer of a processor, with the chat template that may be the processor's alone."""
    tokenizer = processor.tokenizer
    template = getattr(processor, "chat_template", None)
    if template is None or getattr(tokenizer, "chat_template", None):
        return tokenizer
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def _no_tokenizer(given: Any) -> str:
    kind, rust = type(given).__name__, type(given).__module__.partition(".")[0] == "tokenizers"
    wrap = "give one of transformers, a folder or a hub id"
    if rust:
        wrap = "write PreTrainedTokenizerFast(tokenizer_object=…)"
    lacks = f"cannot be called with a text and decode tokens, as {kind} does not"
    if isinstance(given, type):
        lacks = "is a class and not a tokenizer"
    return f"tokenizer={quoted(given)} {lacks}: {wrap}"


def _has_one(source: ModelSource, location: str) -> bool:
    if source.folder:
        return _in_folder(source.folder)
    commit = cached_folder(location, source.revision)
    return commit is None or fetch_first(location, commit, FILES)


def _in_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in FILES)


def _read(location: str, revision: str | None) -> Any:
    for name in _SETTINGS:
        if (file := Path(location) / name).is_file():
            found = read_json(file)
            if name == "tokenizer_config.json":
                _check_settings(found, file)
    folder = Path(location)
    hint = ""
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        hint = " (it has no tokenizer.json; fetch it again, or give tokenizer=…)"
    try:
        tokenizer = _opened(location, revision)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # also a panic of the tokenizers' library
        file = folder / "tokenizer_config.json"
        guilty = without_it(file, lambda other: _opened(str(other), None)) if file.is_file() else ""
        why = error_line(error).replace(location, folder.name)  # which may be long, and said often
        raise CheckpointError(
            f"cannot load the tokenizer of {location}{hint}: {why}{guilty}"
        ) from error
    if _is_empty(tokenizer):
        raise CheckpointError(
            f"the tokenizer of {location} has no vocabulary, so every text would be unknown to it; "
            "its files are not all there: fetch them again, or give tokenizer=…"
        )
    return tokenizer


def _opened(location: str, revision: str | None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(location, revision=revision, trust_remote_code=False)
    tokenizer("")  # some files are found to be broken by the first text only
    _is_empty(tokenizer)
    return tokenizer


def _check_settings(found: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError for a field of a type that fails later, without its name."""
    for name, (is_right, wanted) in _FIELDS.items():
        if (value := found.get(name)) is not None and not is_right(value):
            raise CheckpointError(f"{file}: {name}={quoted(value)} is not {wanted}; mend it")


def _is_empty(tokenizer: Any) -> bool:
    """Whether it has special tokens at most, and a mark for blanks.

    For many families transformers makes such a one where the file with the vocabulary lacks.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return len(set(tokenizer.get_vocab()) - added) < 2
