"""Whisper: the tokens that a text begins with, by language and task, as transformers makes them."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import extras
import pytest
import torch
import transformers

import jackfield
from jackfield.demo import MODEL_PATH
from jackfield.errors import PromptError, SettingsError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Cli

with extras.imports():
    from feature_models import EOS, START, build, prompts

BOTH = {"sample": "sample", "beam": "beam"}
LANGUAGES = {"<|en|>": 60, "<|de|>": 61, "<|fr|>": 62}
TASKS = {"transcribe": 70, "translate": 71}
PLAIN = 96  # what says that there are no timestamps; those would be behind it
TOLD = {
    "lang_to_id": LANGUAGES, "task_to_id": TASKS, "no_timestamps_token_id": PLAIN,
    "is_multilingual": True, "return_timestamps": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "old": {},
    "told": TOLD,
    "found": {**TOLD, "forced_decoder_ids": [[1, None], [2, 70]]},
    "forced": {**TOLD, "forced_decoder_ids": [[1, 61], [2, 71], [3, PLAIN]]},
    "forced-only": {"forced_decoder_ids": [[1, 5], [2, 6]]},
    "in-german": {**TOLD, "language": "de"},
    "translating": {**TOLD, "task": "translate"},
    "suppressing": {
        **TOLD, "suppress_tokens": [*range(3, 40)], "begin_suppress_tokens": [*range(40, 58)],
    },
    "english": {"no_timestamps_token_id": PLAIN, "is_multilingual": False},
}  # fmt: skip
ASKED: list[dict[str, Any]] = [
    {}, {"language": "german"}, {"language": "<|fr|>"}, {"language": "EN", "task": "translate"},
    {"task": "translate"}, {"max_length": 9}, {"num_beams": 3}, {"return_timestamps": False},
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return build("whisper")


def configured(model: Any, **own: Any) -> Any:
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=START, pad_token_id=0, eos_token_id=EOS, max_length=64, **own
    )
    return model


def whole(model: Any, prompt: dict[str, Any], **asked: Any) -> list[int] | str:
    """All tokens of the decoder in transformers, those that it begins with too; or an error."""
    asked = {"do_sample": False, "return_dict_in_generate": True, **copy.deepcopy(asked)}
    try:
        found: list[int] = model.generate(**prompt, **asked)["sequences"][0].tolist()
    except ValueError as error:
        return str(error)
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("found", "in-german") else pytest.mark.long)
     for n in CONFIGS],
)  # fmt: skip
def test_texts_begin_as_in_transformers(model: Any, name: str) -> None:
    given = prompts(configured(model, **CONFIGS[name]))
    with jackfield.load(model, decoding=BOTH) as engine:
        for more in ASKED:
            asked = {
                "eos_token_id": None,
                **({} if "max_length" in more else {"max_new_tokens": 8}),
            }
            asked |= more
            right = [whole(model, prompt, **asked) for prompt in given]
            if isinstance(right[0], str):
                with pytest.raises(SettingsError, match=next(iter(more))):
                    engine.generate(given, **asked)
                continue
            found = engine.generate(given, **asked)
            for completion, text in zip(found, right, strict=True):
                begun = completion.usage.prompt_tokens
                assert completion.token_ids == text[begun:], more
                assert text[0] == START


def test_what_a_text_begins_with_changes_it(model: Any) -> None:
    """Else the test above would show nothing."""
    given = prompts(configured(model, **TOLD))[0]
    asked = {"eos_token_id": None, "max_new_tokens": 8}
    rows = [{"language": "de"}, {"language": "fr"}, {"language": "fr", "task": "translate"}, {}]
    with jackfield.load(model) as engine:
        found = engine.generate([given] * 4, settings=rows, **asked)
        assert [c.usage.prompt_tokens for c in found] == [4, 4, 4, 3]  # not all run together
        assert len({tuple(c.token_ids) for c in found}) == 4
        alone = [engine.generate(given, **row, **asked)[0].token_ids for row in rows]
    assert [c.token_ids for c in found] == alone


def test_a_language_is_found_for_each_sound(model: Any) -> None:
    """Also of samples and beams; a streamer is put the tokens that were found."""
    given = prompts(configured(model, **CONFIGS["found"]), 6)
    asked = {"eos_token_id": None, "max_new_tokens": 4}
    right = [whole(model, prompt, **asked)[1] for prompt in given]
    assert len({*right}) > 1, "all are in one language"
    seen: list[int] = []

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            seen.extend(tokens.flatten().tolist())

        def end(self) -> None:
            pass

    with jackfield.load(model, decoding=BOTH) as engine:
        for prompt in given:
            seen.clear()
            (found,) = engine.generate(prompt, streamer=Streamer(), **asked)
            assert seen == whole(model, prompt, **asked)
            assert seen[4:] == found.token_ids
        drawn = {"temperature": 2.0, "seed": 3}
        told = [{"language": {v: k for k, v in LANGUAGES.items()}[token]} for token in right]
        several = engine.generate(given, **asked, **drawn, num_return_sequences=2)
        same = engine.generate(given, settings=told, **asked, **drawn, num_return_sequences=2)
        assert [c.token_ids for c in several] == [c.token_ids for c in same]
        beams = engine.generate(given, **asked, num_beams=3)
    assert [c.token_ids for c in beams] == [
        whole(model, p, **asked, num_beams=3)[4:] for p in given
    ]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"language": "klingon"}, "language='klingon' is none of the model's 3; .* de, en, fr"),
    ({"language": "spanish"}, "language='spanish' is none of the model's 3"),
    ({"language": ["de", "fr"]}, r"language must be a string.*settings=\[\{'language': …\}"),
    ({"language": 7}, "language must be a string, not 7"),
    ({"task": "sing"}, "task='sing' is none of the model's; give one of transcribe, translate"),
    ({"return_timestamps": True}, "return_timestamps=True is not built here"),
    ({"return_token_timestamps": True}, "return_token_timestamps .*timestamps are not built here"),
    ({"return_segments": True}, "return_segments .*timestamps are not built here"),
    ({"temperature": (0.0, 0.2)}, "temperature"),
    ({"compression_ratio_threshold": 1.35}, "a sound is read once, at one temperature"),
    ({"logprob_threshold": -1.0}, "a sound is read once, at one temperature"),
    ({"no_speech_threshold": 0.6}, "a sound is read once, at one temperature"),
    ({"condition_on_prev_tokens": True}, "give decoder_input_ids with the features"),
    ({"prompt_ids": [5, 6]}, "give decoder_input_ids with the features"),
    ({"is_multilingual": False}, "is_multilingual"),
    ({"decoder_start_token_id": 97}, "no token id"),
]  # fmt: skip


def test_what_is_not_built_is_refused_by_name(model: Any) -> None:
    given = prompts(configured(model, **TOLD))[0]
    with jackfield.load(model) as engine:
        for asked, words in WRONG:
            with pytest.raises(SettingsError, match=words) as caught:
                engine.generate(given, **asked)
            assert "\n" not in str(caught.value)
        beside = {**given, "decoder_input_ids": [[START, 60]]}
        with pytest.raises(SettingsError, match="there are decoder_input_ids and task"):
            engine.generate(beside, task="translate")
        neutral = {"return_timestamps": False, "return_segments": False, "language": None}
        (found,) = engine.generate(given, max_new_tokens=3, **neutral)
        own = copy.deepcopy(model.generation_config)  # an object with all that the model says
        own.max_new_tokens = 3
        (same,) = engine.generate(given, generation_config=own)
    assert same.token_ids == found.token_ids


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"return_timestamps": True}, "return_timestamps=True is not built here"),
    ({"lang_to_id": [1, 2]}, "lang_to_id in the model's generation config is no mapping"),
    ({"lang_to_id": {"<|de|>": 970}}, "970 in the model's generation config is no token id"),
    ({"lang_to_id": {"<|de|>": "x"}}, "'x' in the model's generation config is no token id"),
    ({"task_to_id": {"transcribe": None}}, "None in the model's generation config is no token"),
    ({"no_timestamps_token_id": -1}, "-1 in the model's generation config is no token id"),
    ({"forced_decoder_ids": 5}, "forced_decoder_ids=5 .* set language and task"),
    ({"forced_decoder_ids": [[2, 5]]}, "do not say a token for each place from 1 on"),
    ({"language": 5}, "language must be a string, not 5"),
]  # fmt: skip


@pytest.mark.parametrize(("own", "words"), HOSTILE, ids=lambda case: str(case)[:30])
def test_a_generation_config_that_is_wrong(model: Any, own: dict[str, Any], words: str) -> None:
    given = prompts(configured(model, **own))[0]
    with jackfield.load(model) as engine, pytest.raises(SettingsError, match=words):
        engine.generate(given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer and its feature extractor, of windows of a second."""
    where = tmp_path_factory.mktemp("whisper")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_PATH)
    model = configured(build("whisper", vocab_size=len(tokenizer), max_source_positions=50))
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, hop_length=160, chunk_length=1)
    extractor.save_pretrained(where)
    return where


def test_a_sound_is_heard(folder: Path) -> None:
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    sound = torch.sin(torch.arange(8000) / 5.0)
    features = extractor(sound.numpy(), sampling_rate=16000, return_tensors="pt")
    asked = {"max_new_tokens": 6, "eos_token_id": None}
    with jackfield.load(folder) as engine:
        (right,) = engine.generate(**features, **asked)
        for samples in (sound, sound.numpy(), sound.tolist(), sound.double()):
            (found,) = engine.generate({"audio": samples, "sampling_rate": 16000}, **asked)
            assert found.token_ids == right.token_ids
            assert found.text == right.text
        heard = {"audio": sound, "sampling_rate": 16000}
        (held,) = engine.generate(heard, max_new_tokens=40, regex="[a-z]{3,5}")
        assert re.fullmatch("[a-z]{3,5}", str(held.text))
        two = [{"audio": sound, "sampling_rate": 16000}, {"audio": -sound, "sampling_rate": 16000}]
        assert engine.generate(two, **asked)[0].token_ids == right.token_ids
        for prompt, words in (
            ({"audio": sound}, "has sampling_rate=None, and the model hears 16000"),
            ({"audio": sound, "sampling_rate": 8000}, "hears 16000 samples a second; resample it"),
            ({"audio": sound.long(), "sampling_rate": 16000}, "int64; give the floating-point"),
            ({"audio": torch.stack([sound] * 2), "sampling_rate": 16000}, "samples of one channel"),
            ({"audio": sound * torch.nan, "sampling_rate": 16000}, "audio has a NaN"),
            ({"audio": torch.zeros(16001), "sampling_rate": 16000}, "1 s at most; cut it"),
            ({"audio": torch.zeros(0), "sampling_rate": 16000}, r"audio has the shape \[0\]"),
            ({"audio": "a.wav", "sampling_rate": 16000}, "the prompt cannot be read"),
        ):
            with pytest.raises(PromptError, match=words) as caught:
                engine.generate(prompt)
            assert "\n" not in str(caught.value)


def test_a_processor_is_the_tokenizer_of_a_live_model(folder: Path) -> None:
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    parts = [c.from_pretrained(folder) for c in (transformers.AutoFeatureExtractor,
                                                 transformers.AutoTokenizer)]  # fmt: skip
    processor = transformers.WhisperProcessor.__new__(transformers.WhisperProcessor)
    processor.feature_extractor, processor.tokenizer = parts
    sound = {"audio": torch.sin(torch.arange(8000) / 5.0), "sampling_rate": 16000}
    with jackfield.load(folder) as engine:
        (right,) = engine.generate(sound, max_new_tokens=6)
    with jackfield.load(model, tokenizer=processor) as engine:
        (found,) = engine.generate(sound, max_new_tokens=6)
    assert (found.text, found.token_ids) == (right.text, right.token_ids)
    with pytest.raises(UsageError, match="is a processor, and the model reads text only"):
        jackfield.load("demo", tokenizer=processor)


def test_the_command_line_has_texts_only(cli: Cli, folder: Path) -> None:
    done = cli("generate", "hello", "--model", str(folder))
    done.assert_failed(2, "the prompt is a text, and WhisperForConditionalGeneration reads")
