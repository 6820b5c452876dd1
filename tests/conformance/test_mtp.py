"""Drafts of a model's own heads are transformers' own, and change no text."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from typing import Any

import pytest
import torch
import transformers
from drafting import draft_of, repetitive
from driven import Arrival, drive, tokens
from families import WINDOW, character_tokenizer, oracle, prompts
from heads import HEADED, checkpoint, known, live
from transformers import modeling_layers
from transformers.generation import candidate_generator

import jackfield
from jackfield.engine import mtp
from jackfield.engine.mtp import HeadDrafts

MTP = "mtp?min_acceptance_rate=0&min_speedup=0"
COUNT = 2 * WINDOW
LENGTHS = (3, WINDOW + 1, 3 * WINDOW, 5)
SAMPLED = {"temperature": 1.1, "seed": 8, "top_p": 0.9}
CACHES = {"deepseek-v3": "dynamic", "glm4-moe": "dynamic", "mellum": "paged?page_size=2"}
#: Models whose next token hangs on the last one, so that drafts are often right.
FAINT = 0.02


pytestmark = pytest.mark.skipif(
    not hasattr(getattr(modeling_layers, "MtpModel", None), "get_mtp_weights_regex"),
    reason="this transformers makes no heads that can be read",
)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)


def load(family: str, share: float | None = FAINT, **arguments: Any) -> jackfield.Engine:
    arguments = {"decoding": {"heads": MTP, "plain": "sample"}, **arguments}
    return jackfield.load(checkpoint(family, share), **arguments)


def said(found: list[jackfield.Completion]) -> list[list[int]]:
    return [one.token_ids for one in found]


def held(engine: jackfield.Engine) -> dict[int, Any]:
    return engine._loop.heads._texts


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """text -> what heads guess behind it: those of transformers, and ours."""
    theirs: dict[Any, Any] = {}
    ours: dict[Any, Any] = {}
    generator = candidate_generator.MTPCandidateGenerator
    inner, own = generator.get_candidates, HeadDrafts.draft

    def get_candidates(self: Any, ids: torch.Tensor, *given: Any, **named: Any) -> Any:
        found = inner(self, ids, *given, **named)
        if drafts := found[0][0, ids.shape[1] :].tolist():
            theirs[tuple(ids[0].tolist())] = drafts
        return found

    def draft(self: Any, sequences: Any, *given: Any) -> Any:
        found = own(self, sequences, *given)
        ours.update({tuple(s.tokens): d for s, d in zip(sequences, found, strict=True)})
        return found

    monkeypatch.setattr(generator, "get_candidates", get_candidates)
    monkeypatch.setattr(HeadDrafts, "draft", draft)
    return theirs, ours


@pytest.mark.one_in(2)
@pytest.mark.parametrize("share", [None, FAINT])
@pytest.mark.parametrize("family", HEADED)
def test_texts_and_drafts_are_those_of_transformers(
    family: str, share: float | None, drafted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = drafted
    model, texts = live(family, share), prompts(LENGTHS)
    for prompt in texts:
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, use_mtp=True
        )
        assert whole[0, len(prompt) :].tolist() == oracle(model, prompt, COUNT)
    heads = HEADED[family][2]
    for cache in ("paged?page_size=4", CACHES[family]):
        for piece, chunk in ((None, 512), (7, 4)):
            monkeypatch.setattr(mtp, "CHUNK", chunk)
            ours.clear()
            with load(
                family, share, cache_implementation=cache, prefill_chunk_size=piece
            ) as engine:
                found = engine.generate(texts, max_new_tokens=COUNT)
            assert said(found) == [oracle(model, prompt, COUNT) for prompt in texts]
            assert len(ours) > COUNT
            assert all(drafts == theirs[text][: len(drafts)] for text, drafts in ours.items())
            assert max(map(len, ours.values())) == heads


def test_heads_that_read_states_before_the_norm(drafted: Any) -> None:
    theirs, ours = drafted
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("glm4-moe"), dtype=torch.float64, experts_implementation="eager"
    )
    model.config.tie_last_hidden_states = False
    model.generation_config.pad_token_id = 0
    (prompt,) = prompts((WINDOW,))
    model.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, use_mtp=True)
    with jackfield.load(model, decoding=MTP) as engine:
        engine.generate(prompt, max_new_tokens=COUNT)
    assert len(ours) > 5
    assert all(drafts == theirs[text][: len(drafts)] for text, drafts in ours.items())


@pytest.mark.parametrize("family", HEADED)
def test_drawn_texts_are_the_plain_ones_and_guessed_too(family: str) -> None:
    texts = prompts((*LENGTHS, 11, 6))
    with load(family) as engine:
        right = engine.generate(texts, max_new_tokens=COUNT, decoding="plain", **SAMPLED)
        found = engine.generate(texts, max_new_tokens=COUNT, **SAMPLED)
        (alone,) = engine.generate(texts[1], max_new_tokens=COUNT, **SAMPLED)
        figures = engine.report().speculation
        assert held(engine) == {}
    assert said(found) == said(right)
    assert alone.token_ids == right[1].token_ids
    assert 0.1 < figures.acceptance_rate < 1


def test_heads_that_are_right_save_steps() -> None:
    """Layers that add nothing leave each token to the one before, for the model and the heads."""
    model, texts = live("glm4-moe", 0.0), prompts(LENGTHS)
    with load("glm4-moe", 0.0) as engine:
        found = engine.generate(texts, max_new_tokens=COUNT + 1)
        assert engine.report().speculation.acceptance_rate == 1
    assert said(found) == [oracle(model, prompt, COUNT + 1) for prompt in texts]
    assert found[0].report.speculation.tokens_per_step > 3


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("family", ["glm4-moe", "mellum"])
@pytest.mark.one_in(4)
def test_requests_that_come_and_are_preempted(family: str, swap: bool) -> None:
    texts, model = repetitive(12, WINDOW), live(family, FAINT)
    cache = f"paged?page_size=4&num_tokens=72&swap={swap}"
    arrivals = [Arrival(n // 2, text, max_new_tokens=COUNT) for n, text in enumerate(texts)]
    with load(family, cache_implementation=cache, prefill_chunk_size=5) as engine:
        found = tokens(drive(engine, arrivals))
        figures, drafts = engine.statistics(), engine.report().speculation
        assert held(engine) == {}
    assert found == [oracle(model, text, COUNT) for text in texts]
    assert figures.preemptions > 0
    assert drafts.accepted > 10


def test_prompts_that_begin_alike_are_read_by_the_heads_from_where_they_part() -> None:
    (common,) = prompts((4 * WINDOW,))
    texts = [[*common, *own] for own in prompts((3, 4, 5))]
    model = live("glm4-moe", FAINT)
    begun: list[int] = []
    with load("glm4-moe", cache_implementation="paged?page_size=4") as engine:
        heads = engine._loop.heads
        inner = heads._add

        def add(item: Any, states: Any) -> None:
            if item.sequence.id not in heads._texts:
                begun.append(item.start)
            inner(item, states)

        heads._add = add
        found = [engine.generate(text, max_new_tokens=COUNT)[0] for text in texts]
        figures = engine.report().speculation
    assert said(found) == [oracle(model, text, COUNT) for text in texts]
    assert begun == [0, len(common), len(common)]
    assert all(one.report.speculation.accepted for one in found)
    assert figures.proposed > 0


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 2.0, "seed": 4, "top_p": 0.9, "top_k": 50},
    {"repetition_penalty": 1.7, "decoding": "lookup"},
    {"temperature": 1.5, "seed": 8, "num_return_sequences": 3},
    {"stop": ["a", "e", "xy"], "temperature": 2.0, "seed": 9},
    {"logprobs": 3, "use_mtp": True},
    {"guidance_scale": 1.5, "negative_prompt": [5, 6, 7]},
]
if importlib.util.find_spec("llguidance"):
    MIXED.append({"regex": "[ -k]{3,6}[x-z]{0,9}", "eos_token_id": 119})


def test_every_setting_gives_what_it_gives_without_drafts() -> None:
    texts = repetitive(len(MIXED), WINDOW)
    offered = {"heads": MTP, "lookup": "prompt_lookup"}
    with load("deepseek-v3", decoding=offered, tokenizer=character_tokenizer()) as engine:
        drafted = engine.generate(texts, settings=MIXED, max_new_tokens=COUNT)
        own = [{k: v for k, v in one.items() if k != "use_mtp"} for one in MIXED]
        plain = [{**one, "decoding": "sample"} for one in own]
        alone = engine.generate(texts, settings=plain, max_new_tokens=COUNT)
        assert engine.report().speculation.accepted > 10
        assert held(engine) == {}
    assert [(c.token_ids, c.text, c.finish_reason) for c in drafted] == [
        (c.token_ids, c.text, c.finish_reason) for c in alone
    ]


def test_nothing_is_kept_of_who_has_ended_or_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "CHUNK", 4)
    texts = prompts((5, 9, 40))
    with load("mellum", prefill_chunk_size=8) as engine:
        arrivals = [Arrival(n, text, max_new_tokens=COUNT) for n, text in enumerate(texts)]
        most, left = [], []

        def look(loop: Any) -> None:
            most.extend(text.states.shape[1] for text in held(engine).values())
            assert held(engine).keys() <= {s.id for s in loop.running}
            if loop.steps == 6:
                left.append(weakref.ref(held(engine)[loop.running[0].id].cache))
                loop.cancel(loop.running[0])

        made = drive(engine, arrivals, look)
        assert made[0][0].finish_reason == "cancelled"
        assert held(engine) == {}
        gc.collect()
        assert left[0]() is None
    assert max(most) < 4 + 4  # what is read at once, and what a step with a draft or two adds


def test_heads_that_rest_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong drafts are none for a while; what waits to be read does not grow with the text."""
    monkeypatch.setattr(mtp, "CHUNK", 4)
    (prompt,) = prompts((9,))
    most: list[int] = []
    with load("glm4-moe", None, decoding="mtp?min_acceptance_rate=1&min_speedup=0") as engine:
        arrival = Arrival(0, prompt, max_new_tokens=60)
        looked = drive(
            engine,
            [arrival],
            lambda _: most.extend(text.states.shape[1] for text in held(engine).values()),
        )
        figures = engine.report().speculation
    assert tokens(looked) == [oracle(live("glm4-moe"), prompt, 60)]
    assert figures.cooldowns > 0
    assert max(most) < 2 * 4 + 3


@pytest.mark.parametrize("together", [1, 30, 8192])
@pytest.mark.parametrize("family", ["deepseek-v3", "mellum"])
@pytest.mark.one_in(4)
def test_texts_are_read_side_by_side_as_alone(
    family: str, together: int, drafted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp, "TOGETHER", together)
    _, ours = drafted
    texts, calls = prompts(LENGTHS), []
    with load(family) as engine:
        inner = engine._loop.heads._layer

        def layer(head: int, states: Any, ids: Any, rows: Any) -> Any:
            calls.append(len(rows))
            return inner(head, states, ids, rows)

        engine._loop.heads._layer = layer
        engine.generate(texts, max_new_tokens=COUNT)
        found, most = dict(ours), max(calls)
        ours.clear()
        for text in texts:
            engine.generate(text, max_new_tokens=COUNT)
    assert found == ours
    assert most == {1: 1, 30: 2, 8192: len(texts)}[together]


def test_a_draft_model_may_stand_beside() -> None:
    offered = {"heads": MTP, "small": "assisted?min_acceptance_rate=0&min_speedup=0"}
    texts, model = prompts(LENGTHS), live("mellum", FAINT)
    with load("mellum", decoding=offered, assistant_model=draft_of("llama")) as engine:
        settings = [{"decoding": name} for name in ("heads", "small", "sample", "heads")]
        found = engine.generate(texts, settings=settings, max_new_tokens=COUNT)
        assert engine.report()["assistant cache"].calls > 0
    assert said(found) == [oracle(model, text, COUNT) for text in texts]
    assert [one.report["decoding"].name for one in found] == ["heads", "small", "sample", "heads"]


def test_steps_that_are_verified_and_layers_that_are_asked_for() -> None:
    """Both call the model beside its steps, whose states are no step's."""
    (prompt,), model = prompts((WINDOW,)), live("deepseek-v3", FAINT)
    with load("deepseek-v3", verify=6) as engine:
        (found,) = engine.generate(prompt, max_new_tokens=COUNT, output_hidden_states=True)
        assert engine.report().verified.steps > 0
    assert found.token_ids == oracle(model, prompt, COUNT)
    assert found.hidden_states.shape[0] == 3


def test_a_live_model_is_given_back_as_it_was() -> None:
    model = live("glm4-moe", FAINT)
    before = {**vars(model.config)}, [dict(vars(m)) for m in model.modules()]
    texts = prompts(LENGTHS)
    right = [oracle(model, text, COUNT) for text in texts]
    with jackfield.load(model, decoding=MTP) as engine:
        assert said(engine.generate(texts, max_new_tokens=COUNT)) == right
        assert engine.report().speculation.accepted > 0
    assert ({**vars(model.config)}, [dict(vars(m)) for m in model.modules()]) == before
