"""Models that read images, in an engine: what transformers generates of each chat alone."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import extras
import pytest
import torch
import transformers

import jackfield
from jackfield.bridge.image_encoder import ImageEncoder
from jackfield.bridge.image_reader import ImageReader, ImageRules
from jackfield.bridge.image_trial import tried_with_images
from jackfield.errors import CheckpointError, PromptError, SettingsError, UsageError

with extras.imports():
    from seeing import build, chat, generated, given, picture, published, sixteen

TYPES = (
    "llava", "idefics3", "internvl", "qwen2_5_vl", "qwen3_vl",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("llava_next", "qwen2_vl")),
)  # fmt: skip
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
PAGED = "paged?page_size=4"


def new(completions: list[Any]) -> list[list[int]]:
    assert [c.error for c in completions] == [None] * len(completions)
    return [c.token_ids for c in completions]


@pytest.fixture(scope="module", params=TYPES)
def seeing(request: pytest.FixtureRequest) -> Any:
    """A model, its processor, and what it says of each of the chats alone."""
    model, processor = build(request.param)
    return model, processor, [generated(model, processor, c, **GREEDY) for c in sixteen()]


@pytest.fixture(scope="module")
def llava() -> Any:
    return build("llava")


@pytest.mark.parametrize("model_type", ["llava_next", "llava_onevision", "qwen2_vl"])
def test_more_of_them_run_with_nothing_chosen(model_type: str) -> None:
    model, processor = build(model_type)
    chats = [chat("a ", picture(0), " b"), chat("no image"), chat("a ", picture(0), picture(1))]
    several = model_type != "llava_onevision"  # of which its processor makes other tokens
    expected = [generated(model, processor, c, **GREEDY) for c in chats[: 2 + several]]
    with jackfield.load(model, tokenizer=processor) as engine:
        assert new(engine.generate(chats[: 2 + several], **GREEDY)) == expected
        if not several:
            why = "message 0, part 2: a chat may have one image here: its processor makes other"
            with pytest.raises(PromptError, match=why):
                engine.generate([chats[2]], **GREEDY)


def test_a_processor_that_takes_no_chat_is_said() -> None:
    """GOT-OCR2's refuses what `apply_chat_template` hands it; its text runs."""
    model, processor = build("got_ocr2")
    ids = [5, 6, 7, 8]
    expected = model.generate(torch.tensor([ids]), **GREEDY)[0, 4:].tolist()
    with pytest.raises(ValueError, match="Nested images"):
        given(processor, chat("a ", picture(0)))
    with jackfield.load(model, tokenizer=processor) as engine:
        assert new(engine.generate([ids], **GREEDY)) == [expected]
        why = "images are not read here: a small model of its kind could not be tried with images"
        with pytest.raises(PromptError, match=f"{why}: Nested images are only supported with"):
            engine.generate([chat("a ", picture(0))], **GREEDY)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static", PAGED])
@pytest.mark.one_in(4)
def test_sixteen_mixed_requests_are_what_each_gets_alone(
    seeing: Any, cache: str, chunk: int | None
) -> None:
    model, processor, expected = seeing
    assert expected[0] != expected[1]  # the same two images, in the other order
    assert len(set(map(tuple, expected))) > 12
    how: dict[str, Any] = {"cache_implementation": cache, "prefill_chunk_size": chunk}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        assert new(engine.generate(sixteen(), **GREEDY)) == expected


def test_what_runs_out_of_pages_is_read_again(seeing: Any) -> None:
    model, processor, expected = seeing
    longest = max(len(ids) for ids in expected) + 160
    how = {"cache_implementation": f"paged?page_size=4&num_tokens={4 * longest}"}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        assert new(engine.generate(sixteen(), **GREEDY)) == expected


@pytest.fixture(scope="module")
def folder(llava: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, processor = llava
    found = tmp_path_factory.mktemp("llava")
    model.save_pretrained(found)
    processor.save_pretrained(found)
    return found


def test_equal_images_are_computed_once(
    llava: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = llava
    expected = [generated(model, processor, c, **GREEDY) for c in sixteen()]
    read: list[Any] = []
    own = ImageEncoder.read
    with jackfield.load(folder) as engine:
        monkeypatch.setattr(
            ImageEncoder, "read", lambda self, fields: read.append(fields) or own(self, fields)
        )
        assert new(engine.generate(sixteen(), **GREEDY)) == expected
        assert len(read) == 3  # of eighteen
        file = io.BytesIO()
        picture(0).save(file, "PNG")
        again = chat("first ", picture(0))
        again[0]["content"][1]["image"] = file.getvalue()
        engine.generate([again], **GREEDY)
        assert len(read) == 3


def test_what_layers_say_is_told_of_texts_without_images() -> None:
    model, processor = build("llava")
    ids = torch.tensor([[5, 6, 7, 8]])
    with jackfield.load(model, tokenizer=processor) as engine:
        (text,) = engine.generate(ids, **GREEDY, output_hidden_states=True)
        with pytest.raises(SettingsError, match="a text with images is not computed once more"):
            engine.generate([chat("a ", picture(0))], **GREEDY, output_hidden_states=True)
    due = model.generate(
        ids, **GREEDY, output_hidden_states=True, return_dict_in_generate=True
    ).hidden_states
    last = torch.cat([step[-1][0] for step in due])
    torch.testing.assert_close(text.hidden_states[-1], last, rtol=1e-3, atol=1e-4)


def test_weights_of_a_live_model_may_change_between_requests() -> None:
    model, processor = build("llava")
    one = chat("a ", picture(0))
    with jackfield.load(model, tokenizer=processor) as engine:
        before = engine.generate([one], **GREEDY, output_logits=True)[0].logits
        with torch.no_grad():
            model.model.multi_modal_projector.linear_2.weight.mul_(-1)
        after = engine.generate([one], **GREEDY, output_logits=True)[0].logits
    assert not torch.equal(before[0], after[0])


def test_pages_are_shared_by_prompts_with_equal_images_only(llava: Any, folder: Any) -> None:
    model, processor = llava
    first, other = chat(picture(0), "a b c d e f"), chat(picture(5), "a b c d e f")
    expected = [generated(model, processor, c, **GREEDY) for c in (first, other)]
    with jackfield.load(folder, cache_implementation=PAGED) as engine:
        found = [engine.generate([c], **GREEDY)[0] for c in (first, other, first, other)]
    assert new(found) == [*expected, *expected]
    cached = [c.usage.cached_tokens for c in found]
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 8


@pytest.mark.parametrize("cache", ["dynamic", PAGED])
def test_samples_beams_streams_and_drafts(llava: Any, cache: str) -> None:
    model, processor = llava
    both = chat("what is ", picture(0), " and ", picture(1), " here")
    text = chat("no image at all")
    drawn = {"temperature": 2.0, "seed": 7, "max_new_tokens": 8, "eos_token_id": None}
    beams = {"max_new_tokens": 6, "eos_token_id": None, "num_beams": 3}
    expected = generated(model, processor, both, **GREEDY)
    searched = generated(model, processor, both, **beams)
    decoding = {"sample": "sample", "beam": "beam", "lookup": "prompt_lookup"}
    how: dict[str, Any] = {"cache_implementation": cache, "decoding": decoding}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        alone = new(engine.generate([both], **drawn, num_return_sequences=3))
        together = new(engine.generate([both, text], **drawn, num_return_sequences=3))
        assert together[:3] == alone
        assert len(set(map(tuple, alone))) == 3
        assert new(engine.generate([both], **beams)) == [searched]
        pieces = [token for d in engine.stream(both, **GREEDY) for token in d.token_ids]
        assert pieces == expected
        assert new(engine.generate([both, text], **GREEDY, decoding="lookup"))[0] == expected


def test_cancelled_requests_harm_nobody(llava: Any) -> None:
    model, processor = llava
    chats = sixteen()
    expected = [generated(model, processor, c, **GREEDY) for c in chats[:4]]
    with jackfield.load(model, tokenizer=processor, prefill_chunk_size=3) as engine:
        gone = [engine.submit(c, **GREEDY) for c in chats[4:8]]
        kept = [engine.submit(c, **GREEDY) for c in chats[:4]]
        for request in gone:
            request.cancel()
        assert new([request.result() for request in kept]) == expected


@pytest.mark.parametrize("cache", ["dynamic", PAGED])
def test_a_token_of_images_that_a_text_has_is_text(llava: Any, cache: str) -> None:
    """Also in a step that feeds another's images."""
    model, processor = llava
    token = model.config.image_token_id
    text = chat("no image at all, and more words")
    says_it = {**GREEDY, "sequence_bias": [[[token], 100.0]]}
    expected = generated(model, processor, text, **says_it)
    assert expected == [token] * 10
    after = generated(model, processor, chats := chat(picture(0), picture(1), "x"), **GREEDY)
    how: dict[str, Any] = {"cache_implementation": cache, "prefill_chunk_size": 3}
    named = chat("one <image> two <image>")
    alone = generated(model, processor, named, **GREEDY)
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        settings = [says_it, GREEDY, GREEDY]
        found = engine.generate([text, chats, named], settings=settings)
    assert new(found) == [expected, after, alone]


def test_what_a_processor_returns_of_an_image_is_answered_with_a_chat(llava: Any) -> None:
    """Never with what drops the image: it would run, and say another text."""
    model, processor = llava
    messages = chat(picture(0), "what")
    inputs = given(processor, messages)
    assert "pixel_values" in inputs
    ids = inputs["input_ids"]
    form = (
        r"images are given in a chat: \[\{'role': 'user', 'content': \[\{'type': 'image', 'image'"
    )
    with jackfield.load(model, tokenizer=processor) as engine:
        for call in (
            lambda: engine.generate(inputs, **GREEDY),
            lambda: engine.generate(**inputs, **GREEDY),
            lambda: engine.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY),
            lambda: engine.generate(ids[0].tolist(), **GREEDY),
            lambda: list(engine.stream(ids[0].tolist(), **GREEDY)),
            lambda: engine.submit(ids[0], **GREEDY),
        ):
            with pytest.raises(PromptError, match=form) as caught:
                call()
            assert "drop" not in str(caught.value)
        assert new(engine.generate([messages], **GREEDY))[0]
    unread = "stands for an image, and images are not read here"
    with jackfield.load(model, tokenizer=None) as engine, pytest.raises(PromptError, match=unread):
        engine.generate(ids[0].tolist(), **GREEDY)


def test_a_step_of_texts_is_what_it_was(llava: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = llava
    seen: Counter[str] = Counter()
    with jackfield.load(model, tokenizer=processor) as engine:
        loop = engine._loop
        images = loop.images
        assert images is not None
        own = images.put_into

        def put_into(step: Any, inputs: Any) -> Any:
            found = own(step, inputs)
            seen["same" if found is inputs else "other"] += 1
            return found

        monkeypatch.setattr(images, "put_into", put_into)
        engine.generate([chat("no image"), chat("none here either")], **GREEDY)
        assert seen == {"same": 10}
        engine.generate([chat("one ", picture(0))], **GREEDY)
        assert seen == {"same": 19, "other": 1}
    with jackfield.load("demo") as engine:
        assert engine._loop.images is None


def test_an_image_that_the_model_cannot_read_ends_its_own_request(
    llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = llava
    chats = [chat("a ", picture(0)), chat("a ", picture(9)), chat("no image")]
    expected = [generated(model, processor, c, **GREEDY) for c in (chats[0], chats[2])]
    own, calls = ImageEncoder.read, []

    def read(self: ImageEncoder, fields: Any) -> Any:
        calls.append(fields)
        if len(calls) == 2:
            raise RuntimeError("no such image")
        return own(self, fields)

    with jackfield.load(model, tokenizer=processor) as engine:
        monkeypatch.setattr(ImageEncoder, "read", read)
        found = engine.generate(chats, **GREEDY)
        assert new([found[0], found[2]]) == expected
        assert found[1].finish_reason == "error"
        assert found[1].error == "its image failed: RuntimeError: no such image"
        assert new(engine.generate(chats[1:2], **GREEDY))[0]


def test_control_tokens_in_a_text_are_no_places(llava: Any) -> None:
    model, processor = llava
    said = chat("what is <image> ", picture(0))
    with jackfield.load(model, tokenizer=processor) as engine:
        with pytest.raises(PromptError, match="2 places for 1 images: a message writes '<image>'"):
            engine.generate([said], **GREEDY)
        (found,) = engine.generate([said], **GREEDY, sanitize_control_tokens=True)
        assert found.error is None


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"tokenizer": None}, "the model's processor is not known; give jackfield.load tokenizer="),
        ({"verify": True}, "verify computes the model again from tokens alone"),
        ({"adapters": {}}, "what the model says of an image is kept for all requests"),
    ],
)
def test_what_images_do_not_go_with_is_said(llava: Any, how: dict[str, Any], why: str) -> None:
    model, processor = llava
    refused = f"images are not read here: {why}"
    given = {"tokenizer": processor, **how}
    with jackfield.load(model, **given) as engine, pytest.raises(PromptError, match=refused):
        engine.generate([chat("a ", picture(0))], **GREEDY)


def test_a_model_for_text_says_so(llava: Any) -> None:
    _, processor = llava
    with pytest.raises(UsageError, match=r"is a processor, and the model reads text only"):
        jackfield.load("demo", tokenizer=processor)
    with jackfield.load("demo") as engine, pytest.raises(PromptError, match="part of type 'image'"):
        engine.generate([chat("a ", picture(0))], **GREEDY)


def test_a_folder_has_its_processor(llava: Any, folder: Any) -> None:
    model, processor = llava
    messages = chat("what is ", picture(0))
    expected = generated(model, processor, messages, **GREEDY)
    with jackfield.load(folder) as engine:
        assert isinstance(engine.model, transformers.LlavaForConditionalGeneration)
        assert new(engine.generate([messages], **GREEDY)) == [expected]


@pytest.mark.parametrize(
    "model_type",
    [
        "llava",
        "qwen2_5_vl",
        "qwen3_vl",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma3", "internvl")),
    ],
)
def test_models_of_published_sizes_can_be_tried(model_type: str) -> None:
    config, processor = published(model_type)
    cls = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
    for packed in (False, True) if model_type == "gemma3" else (False,):
        reader = ImageReader(processor)
        found = tried_with_images(config, cls, reader, ragged=True, packed=packed)
        assert isinstance(found, ImageRules)
        assert bool(found.blocks_in) == packed
        assert reader.rules == ImageRules()


@pytest.mark.parametrize("cache", ["dynamic", PAGED])
def test_positions_along_several_axes_count(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the texts are others, and the trial says why."""
    model, processor = build("qwen2_5_vl")
    one = chat("a ", picture(1, 60, 30), " b")
    expected = generated(model, processor, one, **GREEDY)
    how: dict[str, Any] = {"cache_implementation": cache, "prefill_chunk_size": 4}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        assert new(engine.generate([one, chat("text")], **GREEDY))[0] == expected
        monkeypatch.setattr(ImageEncoder, "positions", lambda *_: None)
        assert new(engine.generate([one], **GREEDY))[0] != expected
    with jackfield.load(model, tokenizer=processor) as engine:
        axes = "it numbers the tokens of an image along several axes"
        with pytest.raises(PromptError, match=axes):
            engine.generate([one], **GREEDY)


def test_bits_are_the_same_whatever_else_runs(llava: Any) -> None:
    model, processor = llava
    how: dict[str, Any] = {**GREEDY, "output_logits": True}
    with jackfield.load(model.float(), tokenizer=processor, deterministic=True) as engine:
        together = engine.generate(sixteen(), **how)
        for messages, found in zip(sixteen(), together, strict=True):
            (alone,) = engine.generate([messages], **how)
            assert all(map(torch.equal, alone.logits, found.logits))
    model.double()


def test_a_processor_that_pads_leaves_no_padding_on(
    llava: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = llava
    expected = [generated(model, processor, c, **GREEDY) for c in sixteen()]
    defaults = type(processor).valid_processor_kwargs._defaults["text_kwargs"]
    monkeypatch.setitem(defaults, "padding", True)
    with jackfield.load(model, tokenizer=processor) as engine:
        assert new(engine.generate(sixteen(), **GREEDY)) == expected
    assert processor.tokenizer.backend_tokenizer.padding is None


@pytest.mark.parametrize("model_type", ["blip", "blip-2", "idefics", "pix2struct"])
def test_what_generates_in_a_way_of_its_own_is_refused(model_type: str) -> None:
    with pytest.raises(CheckpointError, match=f"of type '{model_type}'"):
        jackfield.plan(transformers.AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ m['content'] | selectattr('text') | map(attribute='text') | join }}",
         "the chat template has places for 0 of the chat's 2 images"),
        ("{{ '<image>' if loop.first }}{{ m['content'][-1]['text'] }}",
         "the chat template has places for 1 of the chat's 2 images"),
        ("<image><image>", r"message 0 \(role 'user'\): the chat template leaves out its text"),
        ("{{ raise_exception('no images today') }}", "refuses these messages: no images today"),
    ],
)  # fmt: skip
def test_a_template_without_a_place_is_said(template: str, why: str) -> None:
    model, processor = build("llava")
    processor.chat_template = "{% for m in messages %}" + template + "{% endfor %}"
    with jackfield.load(model, tokenizer=processor) as engine:
        with pytest.raises(PromptError, match=why):
            engine.generate([chat(picture(0), picture(1), "what")], **GREEDY)
        assert len(engine.generate([[5, 6, 7]], **GREEDY)[0].token_ids) == 10


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "audio", "audio": b"RIFF"}, "nothing here reads a part of type 'audio'; drop it"),
        ({"type": "video", "video": "a.mp4"}, "nothing here reads a part of type 'video'; drop it"),
        ({"type": "text", "text": b"x"}, "'text' must be a string"),
        ("a text", "a part is like"),
    ],
)
def test_what_else_a_message_has_is_refused_by_its_type(llava: Any, part: Any, why: str) -> None:
    model, processor = llava
    messages = chat(picture(0), "what")
    messages[0]["content"].append(part)
    with jackfield.load(model, tokenizer=processor) as engine:
        with pytest.raises(PromptError, match=f"message 0, part 2: {why}"):
            engine.generate([messages], **GREEDY)
        assert new(engine.generate([chat(picture(0), "what")], **GREEDY))[0]


def test_a_conversation_goes_on_behind_its_images(llava: Any, folder: Any) -> None:
    """What was read of the turns before is found in the cache."""
    model, processor = llava
    first = chat("what is ", picture(0), " this thing here")
    with jackfield.load(folder, cache_implementation=PAGED) as engine:
        (said,) = engine.generate([first], **GREEDY)
        turns = [*first, {"role": "assistant", "content": "a b c"}, *chat("and why?")]
        (found,) = engine.generate([turns], **GREEDY)
    assert found.token_ids == generated(model, processor, turns, **GREEDY)
    assert found.usage.cached_tokens >= said.usage.prompt_tokens // 4 * 4 - 4
