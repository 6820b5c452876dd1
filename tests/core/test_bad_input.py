"""A caller's mistake is a UsageError in one line that says what to do; nothing is half-loaded."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from families import CONTEXT, VOCAB, build, character_tokenizer

import jackfield
from jackfield.errors import OptionError, SelectionError, UsageError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield_plugins.attention.sdpa import SdpaAttention


@dataclass(frozen=True)
class TunedOptions:
    splits: int = 1
    scale: float = 1.0
    causal: bool = True
    kernel: Literal["math", "flash"] = "math"
    window: int | None = None


class TunedAttention(SdpaAttention):
    name = "tuned"
    auto_rank = None
    options = TunedOptions


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture(scope="module")
def engine(model) -> Iterator[jackfield.Engine]:
    with jackfield.load(model, tokenizer=character_tokenizer()) as engine:
        yield engine


def mistake(act: Callable[[], Any], kind: type[UsageError] = UsageError) -> str:
    """The message of the error that `act` raises, after checking what all of them have to be."""
    with pytest.raises(kind) as caught:
        act()
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert message
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.fixture
def weights_stay_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("jackfield.engine.reading.load_model", opened)


@pytest.mark.usefixtures("weights_stay_closed")
@pytest.mark.parametrize(
    ("argument", "name", "nearest"),
    [
        ("attn_implementation", "plugin:spda", "'sdpa'"),
        ("attn_implementation", "eagre", "'eager'"),
        ("cache_implementation", "plugin:dynamc", "'dynamic'"),
        ("decoding", "smple", "'sample'"),
        ("attn_implementation", "dynamic", "'dynamic' is of kind cache"),
        ("attn_implementation", "nobody/sdpa", "distribution 'nobody'"),
        ("attn_implementation", "", "plugin:name"),
        ("attn_implementation", "plugin:a b", "plugin:name"),
        ("attn_implementation", [], "fallback"),
        ("attn_implementation", ["spda", "eager"], "'sdpa'"),
        ("attn_implementation", 7, "string"),
        ("attn_implementation", 3, "string"),
    ],
    ids=str,
)
def test_backend_names(folder: Path, argument: str, name: Any, nearest: str) -> None:
    assert nearest in mistake(lambda: jackfield.load(folder, **{argument: name}), SelectionError)


@pytest.mark.usefixtures("weights_stay_closed")
@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("splits=two", "'splits' of attention 'tuned' of test 1 must be of type int"),
        ("splits=1.5", "must be of type int"),
        ("scale=big", "must be of type float"),
        ("causal=maybe", "must be of type bool"),
        ("kernel=cudnn", "must be one of math, flash"),
        ("window=wide", "must be of type int"),
        ("splts=2", "did you mean 'splits'"),
        ("splits=1&splits=2", "twice"),
        ("splits", "option=value"),
    ],
)
def test_options(folder: Path, monkeypatch: pytest.MonkeyPatch, query: str, words: str) -> None:
    known = registry().backends["attention"]
    tuned = Registered(TunedAttention(), "test", "1", "test")
    monkeypatch.setitem(registry().backends, "attention", [*known, tuned])
    selection = f"plugin:tuned?{query}"
    message = mistake(lambda: jackfield.load(folder, attn_implementation=selection), OptionError)
    assert words in message
    assert "foo" in mistake(lambda: jackfield.load(folder, attn_implementation="sdpa?foo=1"))


LONG = [1] * CONTEXT


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        (LONG, "context is 128"),
        (LONG[1:] * 2, "at most 127 tokens"),
        ([VOCAB], "no token id (0 to 119)"),
        ([-1], "no token id"),
        ([1.5], "not float"),
        ([1, "2"], "no token id"),
        ([True, False], "no token id"),
        ([[]], "empty"),
        (["fine", ""], "empty"),
        ([None], "no prompt"),
        (None, "no prompt"),
        (7, "int"),
        (b"bytes", "bytes"),
        ([b"bytes"], "bytes"),
        ({"role": "user", "content": "x"}, "dict"),
        ([{"role": "user"}], "'content'"),
        ([{"role": "user", "content": "x"}, "y"], "'content'"),
        ([{"role": "robot", "content": "x"}], "no role robot"),
        (torch.zeros(2, 2), "no token id"),
        ({1, 2}, "set"),
    ],
    ids=repr,
)
def test_prompts(engine, prompt: Any, words: str) -> None:
    assert words in mistake(lambda: engine.generate(prompt, max_new_tokens=3))
    assert not engine._worker._open


def test_a_tokenizer_that_does_not_fit_the_model(model) -> None:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["Ω"])
    model = build("llama", torch.float32)
    with jackfield.load(model, tokenizer=tokenizer) as engine:
        assert "tokenizer" in mistake(lambda: engine.generate("aΩ"))


def test_a_tokenizer_without_a_chat_template(model) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    with jackfield.load(build("llama", torch.float32), tokenizer=tokenizer) as engine:
        messages = [{"role": "user", "content": "x"}]
        assert "plain text" in mistake(lambda: engine.generate(messages))


@pytest.mark.parametrize("own", [[{}, {}], ["top_k"], [None], [[("top_k", 3)]]], ids=repr)
def test_settings_of_each_prompt(engine, own: Any) -> None:
    assert "settings" in mistake(lambda: engine.generate([1, 2, 3], settings=own))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "at least 1"),
        ({"max_new_tokens": -3}, "at least 1"),
        ({"max_new_tokens": CONTEXT}, "lower max_new_tokens to 125"),
        ({"temperature": -1}, "at least 0"),
        ({"sequence_bias": {(1,): math.nan}}, "sequence_bias"),
        ({"max_tokens": 5}, "no setting 'max_tokens'"),
        ({"num_beams": 3}, "does not honour num_beams=3"),
        ({"cache_implementation": "static"}, "jackfield.load"),
        ({"generation_config": {"top_k": 3}}, "GenerationConfig"),
    ],
    ids=repr,
)
def test_settings(engine, settings: dict[str, Any], words: str) -> None:
    assert words in mistake(lambda: engine.generate([1, 2, 3], **settings))
    assert words in mistake(lambda: engine.stream([1, 2, 3], **settings))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float8"}, "float64"),
        ({"dtype": "bfloat61"}, "did you mean 'bfloat16'"),
        ({"dtype": 3}, "dtype"),
        ({"device_map": "cuda:99"}, "not a device of this machine"),
        ({"device_map": "nowhere"}, "not a device of this machine"),
        ({"device_map": "meta"}, "models run on"),
        ({"device_map": {"": 0}}, "device_map"),
        ({"max_batch_size": 0}, "at least 1"),
        ({"max_batch_size": "4"}, "max_batch_size"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size must be a whole number, at least 1"),
        ({"prefill_chunk_size": 2.5}, "prefill_chunk_size"),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("weights_stay_closed")
def test_arguments(folder: Path, arguments: dict[str, Any], words: str) -> None:
    assert words in mistake(lambda: jackfield.load(folder, **arguments))


def test_a_live_model_is_used_as_it_is(model) -> None:
    fresh = build("llama", torch.float32)
    assert "convert" in mistake(lambda: jackfield.load(fresh, dtype="bfloat16"))
    assert "device_map" in mistake(lambda: jackfield.load(fresh, device_map="meta"))
    assert "no weights" in mistake(lambda: jackfield.load(fresh.config))
    assert "int" in mistake(lambda: jackfield.load(7))
    jackfield.load(fresh).close()
