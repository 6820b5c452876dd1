"""Odd values: settings that mean something, or one line that names the field; nothing else."""

from __future__ import annotations

import json
import math
import shutil
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from jackfield.bridge.quiet import quiet
from jackfield.bridge.source import find
from jackfield.contracts import Settings
from jackfield.demo import DRAFT_PATH
from jackfield.errors import CheckpointError, PromptError, SettingsError
from jackfield.requests.honouring import Limits
from jackfield.requests.settings import resolve
from jackfield.requests.vocabulary import ALIASES, ARGUMENTS, CODE, DRAFTING, FACTS, OWN
from jackfield.requests.wishes import VOCABULARY, notice_selectors, wishes
from jackfield_plugins.decoding.assisted import Assisted
from jackfield_plugins.decoding.beam import Beam
from jackfield_plugins.decoding.prompt_lookup import PromptLookup
from jackfield_plugins.decoding.sample import Sample

VOCAB = 50
NAMES = sorted(VOCABULARY | OWN | ALIASES.keys() | CODE.keys() | ARGUMENTS.keys())
DECODINGS = (Sample, PromptLookup, Assisted, Beam)


class Hostile:
    """Fails wherever it is looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    __hash__ = None  # type: ignore[assignment]

    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape")


class Few(IntEnum):
    ONE = 1
    TWO = 2


ODD: list[Any] = [
    True, False, 0, 1, 2, -1, 7, 10**6, 2**31, 2**63, -(2**63), 10**400, 10**5000,
    0.0, -0.0, 0.5, 1.0, 2.5, 1e-40, 1e39, math.nan, math.inf, -math.inf, 1j,
    "", "x", "1", "true", "never", "constant", "a\nb", "\ud800", "x" * 5000, b"1", bytearray(b"1"),
    [], [1], [[1]], [[]], [True], [1.0], ["x"], [None], [[1, True]], [(1, 2)], [[[1]]], ["a", 1],
    (), (1,), {}, {(1,): 1.0}, {(1,): True}, {1: 1}, {"a": {"b": 1}}, {1, 2}, frozenset({1}),
    np.int64(1), np.float32(0.5), np.float64(math.nan), np.bool_(True), np.str_("x"),
    np.array(1), np.array([1, 2]), np.array([]), torch.tensor(1), torch.tensor(0.5),
    torch.tensor(True), torch.tensor([1, 2]), torch.tensor([]), torch.tensor(1, device="meta"),
    Few.TWO, Fraction(1, 2), object(), Hostile(), [Hostile()], {(1,): Hostile()},
    range(3), iter([1]), len, print, type, lambda ids, scores: scores, Ellipsis, NotImplemented,
]  # fmt: skip
PLAIN = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=5)
VALUES = PLAIN | st.lists(PLAIN, max_size=3) | st.dictionaries(st.integers(), PLAIN, max_size=2)
MANY = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def limits(decoding: Any) -> Limits:
    return Limits(VOCAB, 100, decoding.capabilities.settings, decoding.name, has_tokenizer=True)


def config_with(fields: dict[str, Any]) -> GenerationConfig:
    config = GenerationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def outcome(asked: dict[str, Any], file: GenerationConfig, decoding: Any) -> Settings | str:
    """The settings, or what the caller is told; anything else fails the test."""
    try:
        return resolve(wishes(asked, file), 10, limits(decoding))
    except (SettingsError, PromptError) as error:
        said = str(error)
        assert said.isprintable()
        assert len(said) < 1500
        return said


def assert_sound(found: Settings) -> None:
    """Every field is of its type and in its range."""

    def whole(value: Any, least: int, most: float = math.inf) -> bool:
        return type(value) is int and least <= value <= most

    assert whole(found.max_new_tokens, 1, 90)
    assert whole(found.min_new_tokens, 0, found.max_new_tokens)
    assert type(found.do_sample) is bool
    assert whole(found.top_k, 0)
    assert whole(found.num_return_sequences, 1, 10_000)
    assert whole(found.seed, -math.inf)  # type: ignore[arg-type]
    assert whole(found.priority, -math.inf)  # type: ignore[arg-type]
    assert found.logprobs is None or whole(found.logprobs, 0, VOCAB)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                 "frequency_penalty"):  # fmt: skip
        value = getattr(found, name)
        assert type(value) is float
        assert abs(value) < 1e39
    assert found.temperature >= 0
    assert 0 < found.top_p <= 1
    assert 0 <= found.min_p <= 1
    assert found.repetition_penalty > 0
    assert found.deadline is None or (type(found.deadline) is float and found.deadline > 0)
    assert all(whole(token, 0, VOCAB - 1) for token in found.eos_token_ids)
    for ids, bias in found.sequence_bias.items():
        assert ids
        assert all(whole(token, 0, VOCAB - 1) for token in ids)
        assert type(bias) is float
        assert bias < 1e39
    assert all(type(text) is str and text for text in found.stop_strings)
    assert all(callable(f) for f in (*found.logits_processor, *found.stopping_criteria))
    found.cache_salt.encode()
    beams, drafts = found.beams, found.drafts
    assert beams.num_beams is None or whole(beams.num_beams, 2)
    assert beams.early_stopping in (None, True, False, "never")
    assert beams.num_beam_groups is None or whole(beams.num_beam_groups, 1)
    assert drafts.num_assistant_tokens is None or whole(drafts.num_assistant_tokens, 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(4)
def test_every_odd_value_of_every_field(name: str) -> None:
    honouring = [d for d in DECODINGS if name in d.capabilities.settings]
    decoding = honouring[0] if honouring else Sample
    for value in ODD:
        for asked, file in (
            ({name: value}, GenerationConfig()),
            ({"generation_config": config_with({name: value})}, GenerationConfig()),
            ({}, config_with({name: value})),
            ({"generation_config": config_with({name: value})}, config_with({name: value})),
        ):
            found = outcome(asked, file, decoding)
            if isinstance(found, Settings):
                assert_sound(found)
            else:
                assert name in found or ALIASES.get(name, name) in found
        notice_selectors(config_with({name: value}), frozenset(), "a model")
        assert isinstance(outcome({name: None}, config_with({name: value}), decoding), Settings)


@MANY
@given(
    asked=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    own=st.none() | st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    file=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    decoding=st.sampled_from(DECODINGS),
)
def test_odd_values_together(
    asked: dict[str, Any], own: dict[str, Any] | None, file: dict[str, Any], decoding: Any
) -> None:
    if own is not None:
        asked = {**asked, "generation_config": config_with(own)}
    found = outcome(asked, config_with(file), decoding)
    if isinstance(found, Settings):
        assert_sound(found)


@pytest.mark.parametrize("one", [np.int64(3), np.array(3), torch.tensor(3), Few(2)])
def test_scalars_are_numbers(one: Any) -> None:
    asked = {"max_new_tokens": one, "eos_token_id": [one], "top_k": one, "temperature": one}
    found = outcome(asked, GenerationConfig(), Sample)
    assert isinstance(found, Settings)
    assert found.max_new_tokens == found.top_k == int(one)
    assert found.eos_token_ids == (int(one),)
    assert isinstance(outcome({"max_new_tokens": np.bool_(True)}, GenerationConfig(), Sample), str)


def test_the_names_of_this_sweep_are_all_that_there_are() -> None:
    assert set(NAMES) >= VOCABULARY | OWN | FACTS | DRAFTING.keys() - {"transformers_version"}


@pytest.mark.parametrize("name", [3, None, "", "\n", Few.ONE])
def test_names_that_are_none(name: Any) -> None:
    assert isinstance(outcome({name: 1}, GenerationConfig(), Sample), str)
    assert isinstance(outcome({name: None}, GenerationConfig(), Sample), str)


@pytest.mark.filterwarnings("ignore")
def test_odd_values_in_a_file(tmp_path: Path) -> None:
    """Refused before weights are read, or read and then as any other config."""
    folder = tmp_path / "model"
    shutil.copytree(DRAFT_PATH, folder)
    refused = read = 0
    for name in sorted(VOCABULARY):
        for value in (True, -1, 2.5, "x", [], [[1]], {}, {"a": 1}, [None], math.nan):
            (folder / "generation_config.json").write_text(json.dumps({"top_p": 0.5, name: value}))
            try:
                find(folder, None)
            except CheckpointError as error:
                said = str(error)
            else:
                said = ""
            if said:
                assert f"generation_config.json says {name}=" in said
                refused += 1
                continue
            with quiet():
                config = GenerationConfig.from_pretrained(folder)
            found = outcome({}, config, Sample)
            if isinstance(found, Settings):
                assert_sound(found)
            else:
                assert ALIASES.get(name, name) in found
            read += 1
    assert refused > 60
    assert read > 400
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "num_return_sequences": 3})  # the one needs the other
    )
    find(folder, None)
