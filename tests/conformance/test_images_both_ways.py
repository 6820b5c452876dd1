"""Models whose tokens of an image see one another: their prompts are read whole, in rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import extras
import pytest
import torch

import jackfield
from jackfield.engine.engine import Engine
from jackfield.errors import ExecutionError, PromptError
from jackfield_plugins.attention.sdpa import SdpaAttention

with extras.imports():
    from seeing import _MADE, build, chat, generated, given, picture, sixteen

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
ROWS: dict[str, Any] = {"cache_implementation": "dynamic"}
WHY = "the tokens of an image look at one another in both directions"


def new(completions: list[Any]) -> list[list[int]]:
    assert [c.error for c in completions] == [None] * len(completions)
    return [c.token_ids for c in completions]


def of_its_own(model: Any, processor: Any, messages: Any) -> tuple[list[int], torch.Tensor]:
    """The new tokens of transformers' `generate`, and their logits, `[tokens, vocab]`."""
    inputs = given(processor, messages)
    how = {**GREEDY, "output_logits": True, "return_dict_in_generate": True}
    found = model.generate(**inputs, **how)
    return found.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(found.logits)


def apart(completion: Any, own: tuple[list[int], torch.Tensor]) -> float:
    """How far logits are from those of its own; a model of Gemma's has norms in float32."""
    assert completion.token_ids == own[0]
    rows = torch.stack([row.flatten() for row in completion.logits])
    return float((rows - own[1]).abs().max())


@pytest.fixture(scope="module")
def gemma() -> Any:
    return build("gemma3")


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def looking(request: pytest.FixtureRequest) -> Any:
    """A model, its processor, and what it says of each of the chats alone."""
    model, processor = build(request.param)
    return model, processor, [of_its_own(model, processor, c) for c in sixteen()]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"cache_implementation": "static"},
        {"attn_implementation": "eager", "max_batch_size": 3},
        {"attn_implementation": "flex_attention"},
    ],
    ids=str,
)
@pytest.mark.one_in(4)
def test_sixteen_mixed_requests_are_what_each_gets_alone(looking: Any, how: dict[str, Any]) -> None:
    """Images have more tokens than a window, and texts of several lengths are rows of a batch."""
    model, processor, expected = looking
    with jackfield.load(model, tokenizer=processor, **{**ROWS, **how}) as engine:
        found = engine.generate(sixteen(), **GREEDY, output_logits=True)
        assert max(map(apart, found, expected)) < 1e-4
    assert len({tuple(ids) for ids, _ in expected}) > 12


@pytest.mark.parametrize(
    ("compiler", "cache"),
    [
        ("native", "dynamic"),
        *(pytest.param("inductor", c, marks=pytest.mark.long) for c in ("dynamic", "static")),
    ],
)
def test_compiled_steps_come_after_them(gemma: Any, compiler: str, cache: str) -> None:
    model, processor = gemma
    own = [of_its_own(model, processor, c) for c in sixteen()]
    how: dict[str, Any] = {"compile": compiler, "cache_implementation": cache}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        found = engine.generate(sixteen(), **GREEDY, output_logits=True)
        assert max(map(apart, found, own)) < 1e-4
        assert engine._bound.compiled.steps == 9


def test_what_is_not_told_gives_other_texts(looking: Any) -> None:
    """So that the tests here see a difference."""
    model, processor, expected = looking
    named = {name: v for name, v in given(processor, sixteen()[0]).items() if "type_ids" in name}
    assert len(named) == 1
    causal = []
    for messages in sixteen():
        inputs = {n: v for n, v in given(processor, messages).items() if n not in named}
        ids = model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
        causal.append(ids.tolist())
    assert sum(ids != own for ids, (own, _) in zip(causal, expected, strict=True)) > 5


def test_samples_beams_and_streams(gemma: Any) -> None:
    model, processor = gemma
    both = chat("what is ", picture(0), " and ", picture(1), " here")
    text = chat("no image at all")
    drawn = {"temperature": 2.0, "seed": 7, "max_new_tokens": 8, "eos_token_id": None}
    beams = {"max_new_tokens": 6, "eos_token_id": None, "num_beams": 3}
    expected = generated(model, processor, both, **GREEDY)
    searched = [generated(model, processor, c, **beams) for c in (both, text)]
    how: dict[str, Any] = {**ROWS, "decoding": {"sample": "sample", "beam": "beam"}}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        alone = new(engine.generate([both], **drawn, num_return_sequences=3))
        together = new(engine.generate([both, text], **drawn, num_return_sequences=3))
        assert together[:3] == alone
        assert len(set(map(tuple, alone))) == 3
        assert new(engine.generate([both, text], **beams)) == searched
        pieces = [token for d in engine.stream(both, **GREEDY) for token in d.token_ids]
        assert pieces == expected


def test_drafts_are_verified_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of this layout take tokens back where no layer has a window."""
    config, processor = _MADE["gemma3"]()
    config.text_config.layer_types = ["full_attention"] * 3
    monkeypatch.setitem(_MADE, "gemma3", lambda: (config, processor))
    model, processor = build("gemma3")
    longer = {**GREEDY, "max_new_tokens": 24}
    repeated = {**longer, "sequence_bias": [[[processor.tokenizer.image_token_id], 20.0]]}
    for asked in (longer, repeated):
        own = [generated(model, processor, c, **asked) for c in sixteen()]
        with jackfield.load(model, tokenizer=processor, **ROWS, decoding="prompt_lookup") as engine:
            assert new(engine.generate(sixteen(), **asked)) == own


def test_an_image_may_be_several_pictures(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pan and scan: crops, with texts between them, stand beside it."""
    model, processor = gemma
    defaults = processor.valid_processor_kwargs._defaults["images_kwargs"]
    monkeypatch.setitem(defaults, "do_pan_and_scan", True)
    monkeypatch.setitem(defaults, "pan_and_scan_min_crop_size", 8)
    chats = [chat("a ", picture(3, 90, 30), " b"), chat("no image"), chat(picture(0), "x")]
    own = [of_its_own(model, processor, c) for c in chats]
    assert given(processor, chats[0])["pixel_values"].shape[0] > 2
    with jackfield.load(model, tokenizer=processor, **ROWS) as engine:
        found = engine.generate(chats, **GREEDY, output_logits=True)
        assert max(map(apart, found, own)) < 1e-4


@pytest.fixture
def calls(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], list[set[str]]]:
    """The names of all arguments of each step from now on."""

    def noted(engine: Engine) -> list[set[str]]:
        found: list[set[str]] = []
        own = engine._loop.forward

        def forward(inputs: Any) -> Any:
            found.append(set(inputs.kwargs))
            return own(inputs)

        monkeypatch.setattr(engine._loop, "forward", forward)
        return found

    return noted


def test_steps_of_texts_are_called_as_ever(
    gemma: Any, calls: Callable[[Engine], list[set[str]]]
) -> None:
    model, processor = gemma
    with jackfield.load(model, **ROWS) as engine:  # reads text only
        found = calls(engine)
        engine.generate([[5, 6, 7]], **GREEDY)
        plain = found[0]
    with jackfield.load(model, tokenizer=processor, **ROWS) as engine:
        found = calls(engine)
        engine.generate([chat("no image"), chat("none here either")], **GREEDY)
        assert found == [plain] * 10
        found.clear()
        engine.generate([chat("one ", picture(0)), chat("no image")], **GREEDY)
        images = {"mm_encoder_outputs", "token_type_ids"}
        assert found == [plain | images, *[plain] * 9]


def test_a_token_of_images_that_is_said_or_written_is_a_token(gemma: Any) -> None:
    """It sees what is before it: to `generate` of transformers, too, where ids are given."""
    model, processor = gemma
    token = model.config.image_token_id
    text, one = chat("no image at all"), chat(picture(0), "x")
    says_it = {**GREEDY, "sequence_bias": [[[token], 1000.0]]}
    own = [generated(model, processor, c, **says_it) for c in (text, one)]
    assert own == [[token] * 10] * 2
    own.append(generated(model, processor, text, **GREEDY))
    ids = processor.tokenizer("one two")["input_ids"] + [token, token, 7, token]
    with jackfield.load(model, tokenizer=processor, **ROWS) as engine:
        found = engine.generate([text, one, text], settings=[says_it, says_it, GREEDY])
        assert new(found) == own
        with pytest.raises(PromptError, match="stands for an image, and images are given in"):
            engine.generate(ids, **GREEDY)
        # In a chat with an image nobody could tell them apart.
        written = chat("a <soft> ", picture(0))
        why = "the prompt has 17 tokens of images, and its images have 16: a message writes such"
        with pytest.raises(PromptError, match=why):
            engine.generate([written], **GREEDY)
        (found,) = engine.generate([written], **GREEDY, sanitize_control_tokens=True)
        assert found.error is None


def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SdpaAttention.capabilities
    less = replace(own, features=own.features - {"bidirectional_prefix"})
    monkeypatch.setattr(SdpaAttention, "capabilities", less)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({**ROWS, "prefill_chunk_size": 64}, "prefill_chunk_size=64 cuts prompts; drop it, or"),
        (
            {**ROWS, "attn_implementation": "sdpa"},
            r"the attention 'sdpa' looks back only \(bidirectional_prefix\); load it",
        ),
    ],
)
def test_what_cannot_read_them_whole_says_so_and_text_runs(
    gemma: Any, how: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = gemma
    if "attn_implementation" in how:
        lacking(monkeypatch)
    text = chat("no image at all")
    expected = generated(model, processor, text, **GREEDY)
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        assert new(engine.generate([text], **GREEDY)) == [expected]
        with pytest.raises(PromptError, match=f"images are not read here: {WHY}, and {why}"):
            engine.generate([chat("a ", picture(0))], **GREEDY)


@pytest.mark.parametrize("chats", [[chat(picture(0))], [chat("a b " * 40), chat(picture(0))]])
def test_a_scheduler_that_cuts_them_is_an_error(
    gemma: Any, chats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it cuts a longer text, so that the image comes with a later step."""
    model, processor = gemma
    with jackfield.load(model, tokenizer=processor, **ROWS) as engine:
        schedule = engine._loop.scheduler._inner

        def few(running: Any, uncached: list[int], *_: Any) -> list[int]:
            return [min(count, 12) for count in uncached]

        with monkeypatch.context() as patch:
            patch.setattr(schedule, "schedule", few)
            with pytest.raises(ExecutionError, match="a step cuts one; select another scheduler"):
                engine.generate(chats, **GREEDY)
        assert new(engine.generate(chats, **GREEDY)) == [
            generated(model, processor, c, **GREEDY) for c in chats
        ]
