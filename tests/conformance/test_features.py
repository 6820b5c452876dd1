"""Models that read features of sounds and images: what transformers generates of each alone."""

from __future__ import annotations

from typing import Any

import extras
import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES

import jackfield
from jackfield.bridge import requirements
from jackfield.bridge.features import MOST_NUMBERS, shape_of
from jackfield.errors import (
    CheckpointError,
    JackfieldError,
    PlanError,
    PromptError,
    SettingsError,
    UsageError,
)

with extras.imports():
    from feature_models import EOS, KINDS, START, build, generated, prompts

FEW = ("whisper", "speech_to_text", "moonshine", "vit-trocr")
ALL = [pytest.param(kind, marks=() if kind in FEW else pytest.mark.long) for kind in KINDS]
#: Random weights say one token for ever, where nobody keeps them from it.
VARIED = {"no_repeat_ngram_size": 1, "eos_token_id": None}
BOTH = {"sample": "sample", "beam": "beam"}
NAMES = {"whisper": "input_features", "moonshine": "input_values"}


@pytest.fixture(scope="module")
def moonshine() -> Any:
    return build("moonshine")


@pytest.fixture(scope="module")
def whisper() -> Any:
    return build("whisper")


def tried(model: Any) -> None:
    """Skip where the installed transformers itself says NaN (5.17: Parakeet's encoder)."""
    try:
        jackfield.plan(model)
    except CheckpointError as error:
        if "its own forward call says NaN" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("attention", ["auto", pytest.param("sdpa", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.one_in(4)
def test_a_ragged_batch_is_what_each_prompt_gets_alone(kind: str, attention: str) -> None:
    model = build(kind)
    tried(model)
    given = prompts(model)
    greedy = {"max_new_tokens": 12, **VARIED}
    beams = {"max_new_tokens": 8, "eos_token_id": None, "num_beams": 3}
    expected = [generated(model, prompt, **greedy) for prompt in given]
    searched = [generated(model, prompt, **beams) for prompt in given]
    assert len({*map(tuple, expected)}) == len(given), "what is read changes nothing"
    try:
        engine = jackfield.load(model, attn_implementation=attention, decoding=BOTH)
    except PlanError:
        assert attention != "auto"
        return
    with engine:
        found = [c.token_ids for c in engine.generate(given, **greedy)]
        again = [c.token_ids for c in engine.generate(given, **beams)]
        alone = [engine.generate(prompt, **greedy)[0].token_ids for prompt in given]
    assert found == alone == expected
    assert again == searched


@pytest.mark.parametrize(
    "kind", ["whisper", pytest.param("speech_to_text", marks=pytest.mark.long)]
)
def test_in_float64_too(kind: str) -> None:
    model = build(kind, torch.float64)
    given = prompts(model)
    asked = {"max_new_tokens": 12, **VARIED}
    with jackfield.load(model) as engine:
        found = [c.token_ids for c in engine.generate(given, **asked)]
    assert found == [generated(model, prompt, **asked) for prompt in given]


@pytest.mark.parametrize("kind", ["canary", "donut", "whisper", "moonshine"])
def test_a_prompt_says_what_its_text_begins_with(kind: str) -> None:
    """As `generate` does it: some begin with the start token whatever is said."""
    model = build(kind)
    tried(model)
    given, asked = prompts(model), {"max_new_tokens": 6, **VARIED}
    begun = [torch.tensor([ids]) for ids in ([START, 9, 50, 7], [9, 50, 7], [33])]
    rows, expected = [], []
    for prompt, ids in zip(given, begun, strict=True):
        rows.append({**prompt, "decoder_input_ids": ids})
        expected.append(generated(model, rows[-1], **asked)[-6:])
    with jackfield.load(model) as engine:
        assert [c.token_ids for c in engine.generate(rows, **asked)] == expected
        assert engine.count_tokens(rows[0]) == 4
        for wrong in ([], [97], [-1], ["a"], torch.tensor([[1, 2], [3, 4]])):
            with pytest.raises(PromptError, match="decoder_input_ids"):
                engine.generate({**given[0], "decoder_input_ids": wrong})


def test_features_are_taken_in_every_form(whisper: Any) -> None:
    rows = prompts(whisper)
    batch = torch.cat([row["input_features"] for row in rows])
    asked = {"max_new_tokens": 5, **VARIED}
    forms: list[Any] = [
        batch, batch.numpy(), [*batch], {"input_features": batch}, rows,
        {"input_features": batch.tolist()}, [{"input_features": row} for row in batch],
        transformers.BatchFeature({"input_features": batch}), {"input_features": batch.double()},
    ]  # fmt: skip
    with jackfield.load(whisper) as engine:
        right = [c.token_ids for c in engine.generate(rows, **asked)]
        for form in forms:
            assert [c.token_ids for c in engine.generate(form, **asked)] == right
        named = engine.generate(input_features=batch, attention_mask=torch.ones(3, 60), **asked)
        assert [c.token_ids for c in named] == right
        assert [c.token_ids for c in engine.generate(inputs=batch, **asked)] == right
        one = engine.submit(batch[1], **asked).result()
        assert one.token_ids == engine.submit(rows[1], **asked).result().token_ids == right[1]
        (short,) = engine.generate(batch[0][:, :31], **asked)  # is filled up to a whole window
    assert (
        short.token_ids == generated(whisper, {"input_features": batch[:1, :, :31]}, **asked)[-5:]
    )


def test_rows_that_come_and_go_change_no_text(moonshine: Any) -> None:
    lengths, given = (3, 9, 1, 6), prompts(moonshine, 4)
    expected = [
        generated(moonshine, prompt, max_new_tokens=most, eos_token_id=None)
        for prompt, most in zip(given, lengths, strict=True)
    ]
    with jackfield.load(moonshine, max_batch_size=3) as engine:
        requests = [
            engine.submit(prompt, max_new_tokens=most, eos_token_id=None)
            for prompt, most in zip(given, lengths, strict=True)
        ]
        cancelled = engine.submit(given[0], max_new_tokens=40, eos_token_id=None)
        assert [request.result().token_ids for request in requests] == expected
        engine.cancel(cancelled)
        deltas = engine.stream(given[1], max_new_tokens=9, eos_token_id=None)
        assert [token for delta in deltas for token in delta.token_ids] == expected[1]


def test_features_are_read_once(moonshine: Any) -> None:
    read: list[int] = []
    handle = moonshine.get_encoder().register_forward_hook(
        lambda _module, _args, kwargs, _out: read.append(kwargs["input_values"].shape[1]),
        with_kwargs=True,
    )
    one, other, _ = given = prompts(moonshine)
    many = {"max_new_tokens": 4, "eos_token_id": None}
    try:
        with jackfield.load(moonshine, decoding=BOTH) as engine:
            found = engine.generate([*given, one, other], **many)
            assert sorted(read) == sorted(prompt["input_values"].shape[1] for prompt in given)
            assert found[3].token_ids == found[0].token_ids
            assert [c.usage.prompt_tokens for c in found] == [1] * 5
            read.clear()
            drawn = {"temperature": 2.0, "seed": 7}
            several = engine.generate(one, **many, **drawn, num_return_sequences=4)
            engine.generate(one, **many, num_beams=3)
            assert len(read) == 2
            beside = engine.generate(given, **many, **drawn)
        assert several[0].token_ids == beside[0].token_ids
        assert len({tuple(c.token_ids) for c in several}) > 1
    finally:
        handle.remove()


def test_what_cannot_be_read_harms_no_other(moonshine: Any) -> None:
    """Too short for the convolutions, which only the encoder itself can say."""
    given, asked = prompts(moonshine), {"max_new_tokens": 4, "eos_token_id": None}
    with jackfield.load(moonshine) as engine:
        right = [c.token_ids for c in engine.generate(given, **asked)]
        found = engine.generate([given[0], torch.ones(10), *given[1:]], **asked)
        assert [c.token_ids for c in found] == [right[0], [], *right[1:]]
        assert found[1].finish_reason == "error"
        assert "its features failed: RuntimeError" in str(found[1].error)
        assert "\n" not in str(found[1].error)
        assert engine.generate(given[0], **asked)[0].token_ids == right[0]


SHAPED = torch.zeros(8, 60)
NAN = SHAPED.clone()
NAN[3, 5] = torch.nan
MISTAKES: list[tuple[Any, str]] = [
    ("a text", "the prompt is a text, and WhisperForConditionalGeneration reads input_features"),
    ([5, 6], "the prompt is token ids, and Whisper.*give what its processor returns"),
    ([[{"role": "user", "content": "a"}]], "the prompt is a chat, and Whisper"),
    ({"input_values": torch.zeros(960)}, r"input_values, and .*\(8 mel bins x up to 60 frames\)"),
    ({"input_features": SHAPED[:7]}, r"the shape \[7, 60\], and .* reads 8 mel bins x up to 60"),
    ({"input_features": torch.zeros(8, 61)}, "cut it into pieces of that length"),
    ({"input_features": torch.zeros(8, 0)}, r"the shape \[8, 0\]"),
    ({"input_features": torch.zeros(2, 2, 8, 60)}, "has 4 dimensions; of one prompt it has 2"),
    ({"input_features": SHAPED.long()}, "floating-point numbers, .* not int64"),
    ({"input_features": SHAPED.bool()}, "floating-point numbers, .* not bool"),
    ({"input_features": NAN}, "has a NaN or an infinite number"),
    ({"input_features": -SHAPED - torch.inf}, "has a NaN or an infinite number"),
    ({"input_features": "abc"}, "has 0 dimensions"),
    ({"input_features": [["a"]]}, "the prompt cannot be read"),
    ({"input_features": [[1.0, 2.0], [3.0]]}, "the prompt cannot be read"),
    ({"input_features": SHAPED, "num_frames": 3}, "nothing here reads 'num_frames' of features"),
    ({"input_features": SHAPED, "attention_mask": torch.ones(59)}, r"attention_mask .*\[59\]"),
    ({"input_features": SHAPED, "attention_mask": torch.ones(60) * 2}, "must be of 0 and 1"),
    ({"input_features": SHAPED, "attention_mask": torch.zeros(60)}, "leaves nothing of"),
    ({"input_features": SHAPED, "attention_mask": torch.arange(60) > 3}, "padded at the right"),
    ({"input_features": SHAPED[None], "attention_mask": torch.ones(60)}, "must have 1 rows"),
    ({"input_features": SHAPED, "input_values": SHAPED[0]}, "give the one that the model reads"),
    ([{"input_features": SHAPED}, "a text"], "prompt 1 is no features, and others are"),
    ([{"input_features": torch.zeros(2, 8, 60)}], "prompt 0 has 2 rows"),
    ({"audio": torch.zeros(960), "sampling_rate": 16000}, "audio is not heard here: .* processor"),
]  # fmt: skip


def test_prompts_that_are_no_features(whisper: Any) -> None:
    given = prompts(whisper)[0]
    with jackfield.load(whisper) as engine:
        right = engine.generate(given, max_new_tokens=3, eos_token_id=None)[0].token_ids
        for prompt, words in MISTAKES:
            with pytest.raises(PromptError, match=words) as caught:
                engine.generate(prompt)
            assert "\n" not in str(caught.value)
        with pytest.raises(PromptError, match="there is a prompt and input_features beside it"):
            engine.generate("a text", input_features=SHAPED)
        again = engine.generate(given, max_new_tokens=3, eos_token_id=None)[0].token_ids
        assert again == right


def test_a_sound_may_be_so_long(moonshine: Any) -> None:
    shape = shape_of(moonshine.config)
    assert shape is not None
    assert shape.most == MOST_NUMBERS
    with (
        jackfield.load(moonshine) as engine,
        pytest.raises(PromptError, match=f"up to {MOST_NUMBERS} samples; cut it into pieces"),
    ):
        engine.generate(torch.zeros(MOST_NUMBERS + 1))


def test_frames_are_whole() -> None:
    model = build("moonshine_streaming")
    with (
        jackfield.load(model) as engine,
        pytest.raises(PromptError, match="a multiple of 80; pad it with zeros"),
    ):
        engine.generate(torch.zeros(4001))


def test_features_for_a_model_that_reads_text() -> None:
    with jackfield.load("demo") as engine:
        with pytest.raises(PromptError, match=r"is input_features, and .* reads text; give a"):
            engine.generate({"input_features": SHAPED})
        with pytest.raises(PromptError, match=r"is audio, and .* reads text"):
            engine.generate({"audio": SHAPED[0], "sampling_rate": 16000})
        with pytest.raises(SettingsError, match="language='de' is what Whisper is told"):
            engine.generate("hello", language="de")


def test_settings_that_look_at_tokens_are_refused(moonshine: Any) -> None:
    given = prompts(moonshine)[0]
    with jackfield.load(moonshine) as engine:
        for name, value in (("encoder_repetition_penalty", 2.0), ("task", "translate")):
            with pytest.raises(SettingsError, match=name):
                engine.generate(given, **{name: value})
        with pytest.raises(SettingsError, match="here an encoder reads prompts"):
            engine.generate(given, guidance_scale=2.0, negative_prompt=[6])
        with pytest.raises(PromptError, match="tools is about chat messages"):
            engine.generate(given, tools=[{"type": "function", "function": {"name": "f"}}])
        (same,) = engine.generate(given, encoder_repetition_penalty=1.0, max_new_tokens=2)
    assert same.error is None


def test_a_model_is_given_back_as_it_was(moonshine: Any) -> None:
    given, asked = prompts(moonshine), {"max_new_tokens": 6, "eos_token_id": None}
    expected = [generated(moonshine, prompt, **asked) for prompt in given]
    before = [m._forward_pre_hooks.copy() for m in moonshine.modules()]
    with jackfield.load(moonshine) as engine:
        assert [c.token_ids for c in engine.generate(given, **asked)] == expected
        assert engine.report()["attention"].calls > 0
        assert [m._forward_pre_hooks for m in moonshine.modules()] == before
    assert [generated(moonshine, prompt, **asked) for prompt in given] == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cache_implementation": "paged"}, "has no place for what an encoder said"),
    ({"cache_implementation": "static"}, "columns that are not written yet"),
    ({"decoding": "prompt_lookup"}, "cannot take back tokens"),
    ({"adapter": "somewhere"}, "adapters are put on decoders only"),
    ({"verify": True}, "from a decoder's tokens alone"),
    ({"image_hosts": ["example.org"]}, "reads no images"),
]


@pytest.mark.parametrize(("asked", "words"), REFUSED, ids=lambda case: str(case)[:30])
def test_what_does_not_go_with_features_is_refused(
    whisper: Any, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(JackfieldError, match=words) as caught:
        jackfield.load(whisper, **asked)
    assert isinstance(caught.value, PlanError | UsageError)


def test_what_cannot_be_tried_is_refused(moonshine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_model: Any) -> Any:
        raise RuntimeError("no small one")

    monkeypatch.setattr(requirements, "feature_trial", broken)
    with pytest.raises(CheckpointError, match=r"could not be tried: no small one.*another model"):
        jackfield.plan(moonshine)


#: Types of transformers' mapping that run: all that it has of encoder-decoder models but these.
ELSEWHERE = {
    "dia": "has an encoder that reads no text, and no features that are known here",
    "pop2piano": "has an encoder that reads no text, and no features that are known here",
    "seamless_m4t": "generates by code of its own",
    "seamless_m4t_v2": "generates by code of its own",
}


@pytest.mark.long
@pytest.mark.parametrize("model_type", MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)
def test_every_type_of_speech_runs_or_is_refused_by_name(model_type: str) -> None:
    """As published."""
    more = {"num_key_value_heads": 8} if model_type == "moonshine_streaming" else {}
    config: Any
    if model_type == "speech-encoder-decoder":
        config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.Wav2Vec2Config(), transformers.BartConfig()
        )
    else:
        config = transformers.AutoConfig.for_model(model_type, **more)
    if not config.is_encoder_decoder:
        return  # a decoder that is given features in its text
    if (words := ELSEWHERE.get(model_type)) is None:
        tried(config)
        assert jackfield.plan(config).requirements.encoder
        return
    with pytest.raises(CheckpointError, match=words):
        jackfield.plan(config)


def test_published_shapes() -> None:
    told = {
        kind: str(getattr(shape_of(transformers.AutoConfig.for_model(kind)), "told", str)())
        for kind in ("whisper", "speech_to_text", "moonshine", "t5", "llama")
    }
    assert told == {
        "whisper": "80 mel bins x up to 3000 frames",
        "speech_to_text": "up to 6000 frames x 80 mel bins",
        "moonshine": f"up to {MOST_NUMBERS} samples",
        "t5": "",
        "llama": "",
    }


def test_the_end_of_a_text(moonshine: Any) -> None:
    """EOS ends it, and a stop by length is one."""
    given = prompts(moonshine)[0]
    text = generated(moonshine, given, max_new_tokens=8, **VARIED)
    with jackfield.load(moonshine) as engine:
        asked = {"max_new_tokens": 8, **VARIED, "eos_token_id": text[3]}
        (found,) = engine.generate(given, **asked)
    assert (found.token_ids, found.finish_reason) == (text[:4], "stop")
    assert EOS not in text[:3]
