"""Which tokenizer is meant, and reading it, after making sure that its files are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, ProcessorMixin

from jackfield.bridge.config_files import is_folder
from jackfield.bridge.gguf import is_gguf
from jackfield.bridge.hub_files import cached_folder, fetch_first
from jackfield.bridge.source import ModelSource, find, packaged
from jackfield.errors import CheckpointError, UsageError, quoted, shown
from jackfield.foreign import named, read_json

#: A model with one of these has a tokenizer; of these files transformers reads its vocabulary, or
#: which class it is that needs none.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
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
    if isinstance(given, str | Path):
        location = packaged(str(given))
        if is_gguf(location):
            return load_tokenizer(find(location, None))
        if not location:
            raise UsageError("tokenizer='' names nothing; give a folder, a hub id, or none")
        if is_folder(Path(location), location) and not _in_folder(Path(location)):
            raise CheckpointError(
                f"tokenizer={str(given)!r} is a folder without {' or '.join(FILES)}"
            )
        return _read(location, None)
    if isinstance(given, type) or not (callable(given) and hasattr(given, "decode")):
        raise UsageError(_no_tokenizer(given))
    if isinstance(given, ProcessorMixin):
        raise UsageError("tokenizer=… is a processor; give its tokenizer: processor.tokenizer")
    return given


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
            read_json(file)
    folder = Path(location)
    hint = ""
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        hint = " (it has no tokenizer.json; fetch it again, or give tokenizer=…)"
    with named(f"cannot load the tokenizer of {location}{hint}"):
        tokenizer = AutoTokenizer.from_pretrained(
            location, revision=revision, trust_remote_code=False
        )
        tokenizer("")  # some files are found to be broken by the first text only
        empty = _is_empty(tokenizer)
    if empty:
        raise CheckpointError(
            f"the tokenizer of {location} has no vocabulary, so every text would be unknown to it; "
            "its files are not all there: fetch them again, or give tokenizer=…"
        )
    longest = getattr(tokenizer, "model_max_length", 0)
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise CheckpointError(
            f"the tokenizer_config.json of {location}: model_max_length is {shown(longest)}"
            ", which is no number"
        )
    return tokenizer


def _is_empty(tokenizer: Any) -> bool:
    """Whether it has special tokens at most, and a mark for blanks.

    For many families transformers makes such a one where the file with the vocabulary lacks.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return len(set(tokenizer.get_vocab()) - added) < 2
