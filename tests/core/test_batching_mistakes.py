"""Mistakes about batches are told in one line, before weights are read or anything is computed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driven import ways
from families import build, config_of, prompts

import jackfield
from jackfield.errors import CacheFullError, SettingsError, UsageError

PROMPT = prompts((5,))[0]
PAGED = {"cache_implementation": "paged"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder without weights: whoever reads them fails with another error."""
    path = tmp_path_factory.mktemp("bare")
    config_of("llama").save_pretrained(path)
    assert [file.name for file in Path(path).iterdir()] == ["config.json"]
    return str(path)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be a whole number, at least 1, not 0"),
        ({"max_batch_size": True}, "max_batch_size must be .* not True"),
        ({"max_batch_tokens": "8"}, "max_batch_tokens must be .* not '8'"),
        ({"prefill_chunk_size": -1}, "prefill_chunk_size must be .* not -1"),
        ({"max_waiting": 0}, "max_waiting must be a whole number, at least 1, not 0"),
        ({"max_waiting": 1.5}, r"max_waiting must be .* not 1\.5"),
        ({"stall_after": 0}, "stall_after must be a number of seconds, more than 0, not 0"),
        ({"stall_after": float("nan")}, "stall_after must be .* not nan"),
        ({"stall_after": "1"}, "stall_after must be .* not '1'"),
        (
            {"max_batch_tokens": 64, "cache_implementation": "dynamic"},
            "max_batch_tokens=64 .* 'dynamic' pads; select cache 'paged', or drop it",
        ),
        (
            {"max_batch_tokens": 4, "max_batch_size": 5, **PAGED},
            "max_batch_tokens=4 is too few for max_batch_size=5, which needs 5",
        ),
        (
            {"max_batch_tokens": 31, **PAGED},
            "max_batch_tokens=31 is too few for max_batch_size=32",
        ),
        (
            {"max_batch_tokens": 9, "max_batch_size": 4, "prefill_chunk_size": 6,
             "deterministic": True, **PAGED},
            "max_batch_tokens=9 .* needs 10",
        ),
        ({"scheduler": "lifo"}, "no scheduler 'lifo'"),
        ({"scheduler": "fifo?patience=0"}, "patience must be more than 0 seconds, not 0"),
        ({"scheduler": "short-first?patience=soon"}, "patience"),
        ({"cache_implementation": "paged?num_tokens=3"}, "num_tokens=3 is less than one page"),
    ],
)  # fmt: skip
def test_sizes_are_refused_before_weights_are_read(
    folder: str, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        jackfield.load(folder, **given)
    assert "\n" not in str(caught.value)
    assert "weights" not in str(caught.value)


@pytest.fixture(scope="module")
def engine() -> Iterator[jackfield.Engine]:
    with jackfield.load(
        build("llama"), cache_implementation="paged?page_size=4&num_tokens=32"
    ) as engine:
        yield engine


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"deadline": 0}, "deadline must be more than 0, not 0"),
        ({"deadline": -2.5}, r"deadline must be more than 0, not -2\.5"),
        ({"deadline": float("nan")}, "deadline must be a finite number"),
        ({"deadline": "soon"}, "deadline must be a number, not 'soon'"),
        ({"deadline": True}, "deadline must be a number, not True"),
        ({"priority": 1.5}, r"priority must be a whole number, not 1\.5"),
        ({"priority": "high"}, "priority must be a whole number, not 'high'"),
        ({"priority": True}, "priority must be a whole number, not True"),
        ({"cache_salt": 5}, "cache_salt must be a string, not 5"),
        ({"cache_salt": b"me"}, "cache_salt must be a string"),
        ({"num_return_sequences": 3}, "num_return_sequences=3 without sampling"),
        ({"num_return_sequences": 3, "do_sample": False}, "num_return_sequences=3 without"),
        ({"num_return_sequences": 0}, "num_return_sequences must be at least 1"),
        ({"num_return_sequences": 2.0, "temperature": 1.0}, "num_return_sequences must be"),
        ({"logits_processor": 5}, "logits_processor must be functions .* not 5"),
        ({"logits_processor": [len, "x"]}, "logits_processor must be functions .* not 'x'"),
        ({"prioritty": 1}, "no setting 'prioritty'; did you mean 'priority'"),
        ({"max_new_tokens": 40}, "need 44 places, and it holds 32"),
    ],
)
def test_settings_are_refused_before_anything_is_computed(
    engine: jackfield.Engine, given: dict[str, Any], says: str
) -> None:
    given = {"max_new_tokens": 4, **given}
    for act in (
        lambda: engine.generate([PROMPT] * 2, settings=[{"max_new_tokens": 4}, given]),
        *(functools.partial(way, PROMPT, **given) for way in ways(engine)[1:]),
    ):
        with pytest.raises((SettingsError, CacheFullError), match=says) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert engine.statistics().steps == engine.statistics().tokens_in == 0
    assert engine._worker._thread is None


def test_several_samples_have_no_single_reader(engine: jackfield.Engine) -> None:
    asked = {"num_return_sequences": 2, "temperature": 1.0, "max_new_tokens": 4}
    for act in ways(engine)[1:]:
        with pytest.raises(SettingsError, match="num_return_sequences=2 has no single reader"):
            act(PROMPT, **asked)
        with pytest.raises(UsageError, match="one prompt"):
            act([PROMPT, PROMPT])
    assert engine.statistics().steps == 0
