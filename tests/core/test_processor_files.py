"""The files of a processor are named by a text, or by any path, for images, sounds and texts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from jackfield.bridge import image_reader, sounds
from jackfield.bridge.processor_files import read_from_files
from jackfield.bridge.source import ModelSource
from jackfield.bridge.tokenizer_files import tokenizer_of
from jackfield.demo import MODEL_PATH
from jackfield.errors import UsageError

SOURCE = ModelSource(transformers.WhisperConfig(), "own", "v1")


class Place:
    """A path that is no `pathlib.Path`."""

    def __init__(self, folder: Any) -> None:
        self._folder = str(folder)

    def __fspath__(self) -> str:
        return self._folder


class Files:
    """What stands for a class of transformers, and notes what it is to read."""

    def __init__(self, made: Any = None) -> None:
        self.made, self.asked = made, list[Any]()

    def from_pretrained(self, location: Any, revision: Any, *, trust_remote_code: bool) -> Any:
        assert not trust_remote_code
        self.asked.append((location, revision))
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


@pytest.mark.parametrize(
    ("given", "read"),
    [("a/b", ("a/b", None)), (Place("a/b"), ("a/b", None)), (None, ("own", "v1"))],
)
def test_what_is_given_comes_before_the_models_own(given: Any, read: tuple[str, Any]) -> None:
    read_from_files(files := Files(), "processor", given, SOURCE)
    assert files.asked == [read]


@pytest.mark.parametrize(
    ("given", "made", "message"),
    [
        (3, None, "the model's processor is not known"),
        (None, ImportError("no PIL"), r"its processor needs a package more \(no PIL\); get it"),
        (None, ValueError("odd"), "its processor cannot be loaded: ValueError: odd"),
    ],
)
def test_what_cannot_be_read_is_a_reason(given: Any, made: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_from_files(Files(made), "processor", given, SOURCE, "; get it")


def test_any_path_is_one_for_images_sounds_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(MODEL_PATH)
    assert isinstance(place, os.PathLike)
    processor = object.__new__(transformers.ProcessorMixin)
    images, heard = Files(processor), Files(SimpleNamespace(sampling_rate=16_000))
    monkeypatch.setattr(image_reader, "AutoProcessor", images)
    monkeypatch.setattr(sounds, "AutoFeatureExtractor", heard)
    assert image_reader.processor_of(place, SOURCE) is processor
    assert isinstance(sounds.sound_reader(place, SOURCE), sounds.SoundReader)
    assert images.asked == heard.asked == [(str(MODEL_PATH), None)]
    assert tokenizer_of(place, SOURCE).decode([5])


def test_why_no_sound_is_heard_is_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sounds, "AutoFeatureExtractor", Files(ValueError("odd")))
    found = sounds.sound_reader(None, SOURCE)
    assert found == "its feature extractor cannot be loaded: ValueError: odd"
