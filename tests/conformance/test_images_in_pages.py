"""Models whose tokens of an image see one another, with prompts in pages: no step cuts an image."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import extras
import pytest
import torch

import jackfield
from jackfield.contracts import BindContext, Cache, CacheCapabilities, KVCache
from jackfield.engine.engine import Engine
from jackfield.errors import PromptError
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield_plugins.attention.sdpa import SdpaAttention
from jackfield_plugins.cache.paged.store import PagedKVCache

with extras.imports():
    from seeing import build, chat, generated, picture, sixteen

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
SMALL = "paged?page_size=4"
#: A test of Gemma 3 in every run, and of Gemma 4 in some.
FEW = pytest.mark.parametrize(
    "looking", ["gemma3", pytest.param("gemma4", marks=pytest.mark.long)], indirect=True
)


def new(completions: list[Any]) -> list[list[int]]:
    assert [c.error for c in completions] == [None] * len(completions)
    return [c.token_ids for c in completions]


class Watched:
    """The sizes of an engine's steps, and that none of them cuts an image."""

    def __init__(self, engine: Engine) -> None:
        self.tokens: list[int] = []
        self.cut = 0  # parts of a prompt that end behind an image and before its end
        self.within = 0  # parts that begin within an image, behind what was found of it
        self._prepare = engine._loop.cache.prepare
        engine._loop.cache.prepare = self.prepare  # type: ignore[method-assign]

    def prepare(self, step: Any) -> Any:
        self.tokens.append(sum(len(item.token_ids) for item in step.scheduled))
        for item in step.scheduled:
            end = item.start + item.num_tokens
            images = item.sequence.images
            for begin, behind in images.shown.blocks if images else ():
                self.cut += begin < end < behind
                self.within += begin < item.start < behind
        return self._prepare(step)


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def looking(request: pytest.FixtureRequest) -> Any:
    """A model in float64, its processor, and what it says of each of the chats alone."""
    model, processor = build(request.param)
    return model, processor, [generated(model, processor, c, **GREEDY) for c in sixteen()]


@pytest.fixture(scope="module")
def gemma() -> Any:
    return build("gemma3")


def test_sixteen_mixed_requests_are_what_each_gets_alone(looking: Any) -> None:
    """By what `auto` chooses: pages, in continuous batching."""
    model, processor, expected = looking
    with jackfield.load(model, tokenizer=processor) as engine:
        assert engine.plan["cache"].registered.name == "paged"
        assert new(engine.generate(sixteen(), **GREEDY)) == expected
    assert len(set(map(tuple, expected))) > 12


@pytest.mark.parametrize(
    "how",
    [
        {"cache_implementation": SMALL, "prefill_chunk_size": 80, "attn_implementation": "sdpa"},
        pytest.param(
            {"cache_implementation": "paged?page_size=4&num_tokens=320"}, marks=pytest.mark.long
        ),
        *(
            pytest.param({"attn_implementation": name, **more}, marks=pytest.mark.long)
            for name in ("sdpa", "eager", "cpu_decode")
            for more in (
                {"max_batch_tokens": 90, "max_batch_size": 5, "cache_implementation": SMALL},
                {"cache_implementation": "paged?page_size=1&prefix_sharing=false"},
                {"deterministic": True, "prefill_chunk_size": 80},
            )
        ),
    ],
    ids=str,
)
@FEW
def test_steps_cut_no_image(looking: Any, how: dict[str, Any]) -> None:
    model, processor, expected = looking
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        watched = Watched(engine)
        for _ in range(2):  # the second time much is found
            assert new(engine.generate(sixteen(), **GREEDY)) == expected
        assert watched.cut == 0
        if "max_batch_tokens" in how:
            assert max(watched.tokens) <= 90


@FEW
def test_an_image_is_longer_than_what_a_stream_waits_for(looking: Any) -> None:
    """Steps beside a stream feed few tokens of prompts, or one image."""
    model, processor, expected = looking
    how: dict[str, Any] = {"target_step_seconds": 1e-9, "cache_implementation": SMALL}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        watched = Watched(engine)
        asked = [engine.submit(c, **GREEDY) for c in sixteen()]
        assert [request.result().token_ids for request in asked] == expected
        assert watched.cut == 0
        assert len(watched.tokens) > 25


def test_prompts_that_begin_alike_share_pages_of_images(gemma: Any) -> None:
    """Also a part of an image, whose rest is fed with all that its tokens see."""
    model, processor = gemma
    tails = ["", "a", "b c", "what is it", "a longer tail of some words"]
    chats = [chat("a ", picture(0), " b ", picture(1), tail) for tail in tails]
    chats += [chat("a ", picture(1), " b ", picture(0), tails[1])]  # equal tokens, other images
    own = [generated(model, processor, c, **GREEDY) for c in chats]
    found, within = [], 0
    for size in (4, 16, 32):
        how: dict[str, Any] = {"cache_implementation": f"paged?page_size={size}"}
        with jackfield.load(model, tokenizer=processor, **how) as engine:
            watched = Watched(engine)
            keep = engine.submit(chat("hm"), **{**GREEDY, "max_new_tokens": 400})  # pages stay
            for one, due in zip(chats, own, strict=True):
                assert new(engine.generate([one], **GREEDY)) == [due]
            keep.cancel()
            found.append(engine._loop.cache.usage().prefix_tokens)
            assert watched.cut == 0
            within += watched.within
    assert min(found) > 4 * 16
    assert within > 2


@FEW
def test_what_is_evicted_is_read_again(looking: Any) -> None:
    model, processor, expected = looking
    how: dict[str, Any] = {"cache_implementation": "paged?page_size=4&num_tokens=400"}
    with jackfield.load(model, tokenizer=processor, prefill_chunk_size=80, **how) as engine:
        watched = Watched(engine)
        longer = {**GREEDY, "max_new_tokens": 40}
        found = new(engine.generate(sixteen(), **longer))
        assert [ids[:10] for ids in found] == expected
        assert engine._loop.metrics.preemptions > 3
        assert watched.cut == 0


class Careless(Cache):
    """A packed cache of another package, which knows nothing of images."""

    name = "careless"
    capabilities = CacheCapabilities(
        layout="packed", layer_types=frozenset({"full_attention", "sliding_attention"})
    )

    def bind(self, context: BindContext) -> KVCache:
        return PagedKVCache(
            context.requirements.windows, 4, None, context.device, prefix_sharing=True
        )


def test_a_cache_of_another_package_need_not_know_of_them(
    gemma: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps are checked as ever, and what it keeps."""
    model, processor = gemma
    mine = Registered(Careless(), "stranger", "1.0", "careless-ep")
    known = registry().backends["cache"]
    monkeypatch.setitem(registry().backends, "cache", [*known, mine])
    chats = sixteen()[:9]
    own = [generated(model, processor, c, **GREEDY) for c in chats]
    how: dict[str, Any] = {"cache_implementation": "plugin:careless", "prefill_chunk_size": 40}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        watched = Watched(engine)
        assert new(engine.generate(chats, **GREEDY)) == own
        assert watched.cut == 0


@pytest.mark.long
def test_compiled_steps_come_after_them(gemma: Any) -> None:
    model, processor = gemma
    own = [generated(model, processor, c, **GREEDY) for c in sixteen()]
    with jackfield.load(model, tokenizer=processor, compile="native") as engine:
        assert new(engine.generate(sixteen(), **GREEDY)) == own
        assert engine._bound.compiled.steps == 9


def drawn_chat(chance: random.Random) -> Any:
    """A few texts and images, of which there are few, so that chats begin alike."""
    words = ["a ", "what is ", "b c d e f ", "once upon a time there was a thing "]
    shapes = [(0, 50, 20), (1, 30, 45), (2, 33, 33)]
    parts: list[Any] = []
    for _ in range(chance.randint(1, 5)):
        image = chance.random() < 0.5
        parts.append(picture(*chance.choice(shapes)) if image else chance.choice(words))
    return chat(*parts)


def drawn_engine(chance: random.Random) -> dict[str, Any]:
    """Any sizes that one image of 70 tokens fits into."""
    pages = {"page_size": chance.choice((1, 3, 4, 8, 16, 32))}
    if chance.random() < 0.5:
        pages["num_tokens"] = chance.choice((420, 600))
    pages |= chance.choice(({}, {"prefix_sharing": "false"}, {"swap": "true"}))
    found = {"cache_implementation": "paged?" + "&".join(f"{k}={v}" for k, v in pages.items())}
    found |= chance.choice(({}, {"prefill_chunk_size": chance.choice((70, 75, 100))}))
    found |= chance.choice(
        ({}, {"max_batch_tokens": chance.choice((80, 130)), "max_batch_size": 8})
    )
    found |= chance.choice(({}, {"target_step_seconds": 1e-9}))
    found |= chance.choice(({}, {"decoding": "prompt_lookup"}))
    found |= {"attn_implementation": chance.choice(("sdpa", "eager", "cpu_decode", "cpu_decode"))}
    return found | {"scheduler": chance.choice(("fifo", "short-first"))}


@pytest.mark.long
def test_any_chats_in_any_engines(looking: Any) -> None:
    """Streams that come one after the other, and what `generate` says of each alone."""
    model, processor, _ = looking
    chance, known, shared, preempted = random.Random(3), dict[str, list[int]](), 0, 0
    for _ in range(25):
        how = drawn_engine(chance)
        with jackfield.load(model, tokenizer=processor, **how) as engine:
            watched, asked = Watched(engine), []
            for _ in range(12):
                one = drawn_chat(chance)
                asked.append((one, engine.submit(one, **GREEDY)))
            found = [(one, request.result().token_ids) for one, request in asked]
            assert watched.cut == 0
            shared += engine._loop.cache.usage().prefix_tokens
            preempted += engine._loop.metrics.preemptions
        for one, ids in found:
            key = str([getattr(p.get("image"), "size", p.get("text")) for p in one[0]["content"]])
            if key not in known:
                known[key] = generated(model, processor, one, **GREEDY)
            assert ids == known[key], how
    assert len(known) > 150
    assert shared > 100
    assert preempted > 0


def test_samples_beams_structures_and_streams(gemma: Any) -> None:
    model, processor = gemma
    both = chat("what is ", picture(0), " and ", picture(1), " here")
    text = chat("no image at all")
    drawn = {"temperature": 2.0, "seed": 7, "max_new_tokens": 8, "eos_token_id": None}
    beams = {"max_new_tokens": 6, "eos_token_id": None, "num_beams": 3}
    expected = generated(model, processor, both, **GREEDY)
    searched = [generated(model, processor, c, **beams) for c in (both, text)]
    how: dict[str, Any] = {"decoding": {"sample": "sample", "beam": "beam"}}
    rows: dict[str, Any] = {**how, "cache_implementation": "dynamic"}
    asked: list[dict[str, Any]] = [{**drawn, "num_return_sequences": 3}]
    asked.append({**GREEDY, "max_new_tokens": 12, "regex": "[a-f]{4,9}"})
    asked.append({**GREEDY, "guidance_scale": 1.5})
    with jackfield.load(model, tokenizer=processor, **rows) as engine:
        told = [new(engine.generate([both, text], **one)) for one in asked]
    how |= {"cache_implementation": SMALL, "prefill_chunk_size": 20}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        watched = Watched(engine)
        assert [new(engine.generate([both, text], **one)) for one in asked] == told
        assert new(engine.generate([both, text], **beams)) == searched
        pieces = [token for d in engine.stream(both, **GREEDY) for token in d.token_ids]
        assert pieces == expected
        assert watched.cut == 0


def test_a_token_of_images_that_is_said_is_a_token(looking: Any) -> None:
    """Also where it is fed beside an image of somebody else: Gemma 4 embeds another one for it."""
    model, processor, _ = looking
    token, one = model.config.image_token_id, chat("what is ", picture(0), picture(1))
    text, says_it = chat("one two"), {**GREEDY, "sequence_bias": [[[token], 1000.0]]}
    own = [
        generated(model, processor, text, **says_it),
        generated(model, processor, one, **GREEDY),
    ]
    assert own[0] == [token] * len(own[0])
    how: dict[str, Any] = {"cache_implementation": SMALL}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        assert new(engine.generate([text, one], settings=[says_it, GREEDY])) == own
        assert new(engine.generate([one, text], settings=[GREEDY, says_it])) == own[::-1]
        with pytest.raises(PromptError, match="stands for an image, and images are given in"):
            engine.generate([5, token, 7], **GREEDY)


def test_drafts_are_verified_behind_them(gemma: Any) -> None:
    """Also in layers with windows, which rows of padded columns cannot take back."""
    model, processor = gemma
    chats = sixteen()[:3]
    repeated = {**GREEDY, "sequence_bias": [[[processor.tokenizer.image_token_id], 20.0]]}
    for asked in (GREEDY, repeated):
        own = [generated(model, processor, c, **asked) for c in chats]
        with jackfield.load(model, tokenizer=processor, decoding="prompt_lookup") as engine:
            assert new(engine.generate(chats, **asked)) == own


def ending_in_images(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing around an image, and nothing behind a prompt."""
    monkeypatch.setattr(processor, "full_image_sequence", "<soft>" * 16)
    template = processor.chat_template.partition("{{- '<|end|>'")[0] + "{%- endfor -%}"
    monkeypatch.setattr(processor, "chat_template", template)


def test_a_prompt_may_end_with_an_image(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And two of them side by side are one block."""
    model, processor = gemma
    ending_in_images(processor, monkeypatch)
    chats = [chat("x", picture(0)), chat("no image"), chat("y", picture(1), picture(0))]
    own = [generated(model, processor, c, **GREEDY) for c in chats]
    drawn = {"temperature": 2.0, "seed": 7, "max_new_tokens": 6, "eos_token_id": None}
    how: dict[str, Any] = {"prefill_chunk_size": 32, "decoding": "prompt_lookup"}
    with jackfield.load(model, tokenizer=processor, cache_implementation=SMALL, **how) as engine:
        watched = Watched(engine)
        assert new(engine.generate(chats, **GREEDY)) == own
        several = new(engine.generate(chats, **drawn, num_return_sequences=2))
        assert several[::2] == new(engine.generate(chats, **drawn))
        assert watched.cut == 0
        found = engine._intake.sequences(chats[2], GREEDY, streams=False)[0].images
        assert [end - begin for begin, end in found.shown.blocks] == [32]


@pytest.mark.long
def test_an_image_may_be_several_pictures(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pan and scan: crops, with texts between them, stand beside it."""
    model, processor = gemma
    defaults = processor.valid_processor_kwargs._defaults["images_kwargs"]
    monkeypatch.setitem(defaults, "do_pan_and_scan", True)
    monkeypatch.setitem(defaults, "pan_and_scan_min_crop_size", 8)
    chats = [chat("a ", picture(3, 90, 30), " b"), chat("no image"), chat("x", picture(0))]
    own = [generated(model, processor, c, **GREEDY) for c in chats]
    how: dict[str, Any] = {"cache_implementation": SMALL, "prefill_chunk_size": 18}
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        assert new(engine.generate(chats, **GREEDY)) == own


def test_steps_of_texts_are_called_as_ever(gemma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more than in an engine that reads text only, and pages say nothing of blocks."""
    model, processor = gemma
    found: list[tuple[list[str], bool, bool]] = []

    def noted(engine: Engine) -> None:
        own = engine._loop.forward

        def forward(inputs: Any) -> Any:
            said = own(inputs)
            tables = [group.now for group in engine._loop.cache.inner.groups.values()]
            marked = any(one.blocks is not None for one in tables)
            found.append((sorted(inputs.kwargs), inputs.blocks is not None, marked))
            return said

        monkeypatch.setattr(engine._loop, "forward", forward)

    with jackfield.load(model) as engine:  # reads text only
        noted(engine)
        engine.generate([[5, 6, 7]], **GREEDY)
        plain = found[0]
        assert plain[1:] == (False, False)
        found.clear()
    with jackfield.load(model, tokenizer=processor) as engine:
        noted(engine)
        engine.generate([chat("no image"), chat("none here either")], **GREEDY)
        assert found == [plain] * 10
        found.clear()
        engine.generate([chat("one ", picture(0)), chat("no image")], **GREEDY)
        names = sorted([*plain[0], "mm_encoder_outputs"])
        assert found == [(names, True, True), *[plain] * 9]


def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SdpaAttention.capabilities
    less = replace(own, features=own.features - {"bidirectional_blocks"})
    monkeypatch.setattr(SdpaAttention, "capabilities", less)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            {"attn_implementation": "sdpa"},
            r"directions, and the attention 'sdpa' looks back only \(bidirectional_blocks\); load",
        ),
        (
            {"prefill_chunk_size": 15},
            "16 tokens .* and are fed in one step, and prefill_chunk_size is 15; load the model",
        ),
        (
            {"max_batch_tokens": 12, "max_batch_size": 2},
            "in one step, and max_batch_tokens is 12; load the model with 16 or more",
        ),
        ({"deterministic": True, "prefill_chunk_size": 8}, "prefill_chunk_size is 8; load the"),
        ({"guided": True}, "the prompt ends within an image"),
    ],
)
@pytest.mark.one_in(4)
def test_what_cannot_feed_them_says_so_and_text_runs(
    gemma: Any, how: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = gemma
    if "attn_implementation" in how:
        lacking(monkeypatch)
    asked = dict(GREEDY)
    if how.pop("guided", False):
        ending_in_images(processor, monkeypatch)
        asked["guidance_scale"] = 2.0
    text = chat("no image at all")
    expected = generated(model, processor, text, **GREEDY)
    with jackfield.load(model, tokenizer=processor, **how) as engine:
        assert new(engine.generate([text], **GREEDY)) == [expected]
        with pytest.raises(PromptError, match=why):
            engine.generate([chat("a ", picture(0))], **asked)


def test_a_pair_beside_an_image_is_not_parted(gemma: Any) -> None:
    """What waits for an image's step to have room may be the one half of a guided request."""
    model, processor = gemma
    shown = chat(picture(0), "x y z what is a thing of it")
    due = generated(model, processor, shown, **GREEDY)
    guided = {}
    for length in (53, 54, 58):
        ids = tuple(random.Random(length * 100 + n).randrange(20, 500) for n in range(length))
        said = model.generate(torch.tensor([ids]), guidance_scale=1.5, **GREEDY)
        guided[ids] = said[0, length:].tolist()
    limits = {"max_batch_tokens": 20, "max_batch_size": 4, "prefill_chunk_size": 16}
    cache = f"{SMALL}&prefix_sharing=false"
    with jackfield.load(model, tokenizer=processor, cache_implementation=cache, **limits) as engine:
        watched = Watched(engine)
        for ids, own in guided.items():
            text = engine.submit(list(ids), **GREEDY, guidance_scale=1.5)
            image = engine.submit(shown, **GREEDY)
            assert new([text.result(), image.result()]) == [own, due]
        assert (watched.cut, watched.within) == (0, 0)
