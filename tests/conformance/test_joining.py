"""Continuous batching of encoder-decoder models: who joins others says what it says alone."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import encoder_decoders
import extras
import pytest
import torch
import transformers
from driven import Arrival, Gate, drive
from storming import held_closely

import jackfield
from jackfield.bridge import batch_trial, joining_trial
from jackfield.bridge.encoder_trial import BY_COLUMN
from jackfield.demo import MODEL_PATH
from jackfield.engine.joining import JoiningKVCache
from jackfield.engine.loop import Loop
from jackfield.errors import ExecutionError, PlanError
from jackfield.requests.features import features_in

if TYPE_CHECKING:
    from pathlib import Path

    from command_line import Cli

with extras.imports():
    import feature_models

BOTH = {"sample": "sample", "beam": "beam"}
TEXTS = [t for t in encoder_decoders.TYPES if not t.startswith("seamless")]
KINDS = feature_models.KINDS
#: Their decoders give padding a place: FSMT's and LED's hide no column from a single token,
#: ProphetNet's numbers and counts distances by column.
ALONE = {"fsmt", "led", "prophetnet"}
FEW = ("bart", "t5", "t5gemma", "m2m_100", "whisper", "fsmt")
MODELS = [pytest.param(t, marks=() if t in FEW else pytest.mark.long) for t in (*TEXTS, *KINDS)]
OPEN = {"eos_token_id": None}


def built(name: str, **changes: Any) -> Any:
    made = feature_models if name in KINDS else encoder_decoders
    return made.build(name, **changes)


def prompts_of(model: Any, name: str) -> list[Any]:
    """Six prompts of several lengths."""
    if name in KINDS:
        return feature_models.prompts(model, 6)
    drawn = random.Random(3)
    return [[drawn.randrange(5, 90) for _ in range(n)] for n in (5, 3, 8, 14, 1, 6)]


def generated(model: Any, name: str, prompt: Any, **settings: Any) -> list[int]:
    made: Any = feature_models if name in KINDS else encoder_decoders
    found: list[int] = made.generated(model, prompt, **settings)
    return found


class Seen:
    """What is seen after every step of a loop."""

    def __init__(self) -> None:
        self.joined = 0  # sequences that came while others were further
        self.left = 0  # of those, such that had been left by others before
        self.together = 0  # steps in which rows of different lengths ran
        self._known: set[int] = set()
        self._gone = False

    def __call__(self, loop: Loop) -> None:
        running = {s.id: s for s in loop.running if s.group is None or s is s.members[0]}
        new = running.keys() - self._known
        old = running.keys() & self._known
        if new and any(running[number].num_new > 1 for number in old):
            self.joined += len(new)
            self.left += self._gone
        self._gone = self._gone or bool(self._known - running.keys() and old)
        self._known |= running.keys()
        self.together += len({s.num_cached for s in loop.running}) > 1


def asked_of(prompts: list[Any]) -> list[Arrival]:
    varied = {"no_repeat_ngram_size": 1, **OPEN}
    drawn = {"temperature": 1.5, "do_sample": True, **OPEN}
    return [
        Arrival(0, prompts[0], max_new_tokens=14, **varied),
        Arrival(0, prompts[1], max_new_tokens=4, **varied),
        Arrival(3, prompts[2], max_new_tokens=9, **varied),
        Arrival(4, prompts[3], max_new_tokens=3, num_beams=3, **OPEN),
        Arrival(5, prompts[4], max_new_tokens=6, seed=11, **drawn),
        Arrival(9, prompts[5], max_new_tokens=7, seed=12, **drawn),
        Arrival(9, prompts[1], max_new_tokens=5, num_beams=2, **OPEN),
        Arrival(12, prompts[3], max_new_tokens=8, **varied),
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(4)
def test_who_joins_says_what_it_says_alone(name: str) -> None:
    model = built(name)
    arrivals = asked_of(prompts_of(model, name))
    right = [
        generated(model, name, one.prompt, **one.settings)
        for one in arrivals
        if "seed" not in one.settings
    ]
    seen = Seen()
    with jackfield.load(model, decoding=BOTH) as engine:
        solo = [
            engine.generate(one.prompt, **one.settings)[0].token_ids
            for one in arrivals
            if "seed" in one.settings
        ]
        found = drive_all(engine, arrivals, seen)
        joins = isinstance(engine._loop.cache.inner.inner, JoiningKVCache)  # type: ignore[attr-defined]
    plain = [text for text, one in zip(found, arrivals, strict=True) if "seed" not in one.settings]
    drawn = [text for text, one in zip(found, arrivals, strict=True) if "seed" in one.settings]
    assert plain == right
    assert drawn == solo
    assert joins == (name not in ALONE)
    if joins:
        assert seen.joined >= 5
        assert seen.left
        assert seen.together > 5
    else:
        assert not seen.joined


def drive_all(engine: Any, arrivals: list[Arrival], seen: Any = None) -> list[list[int]]:
    """The new tokens of each; of beams those of the text."""
    given = [Arrival(one.at, as_read(one.prompt), **one.settings) for one in arrivals]
    return [group[0].new_tokens for group in drive(engine, given, seen)]


def as_read(prompt: Any) -> Any:
    """A prompt as `generate` hands it on."""
    return prompt if isinstance(prompt, list) else features_in([prompt], {}, None)[0]  # type: ignore[index]


#: What a model's small copy shows of it, before weights are read.
DIFFERS = "a row that joins others says something else"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*TEXTS, *KINDS])
def test_the_plan_says_who_waits(name: str) -> None:
    if name in ("canary", "cohere_asr") and transformers.__version__.startswith("5.17."):
        pytest.skip("of padded prompts it says NaN there, and is refused")
    plan = jackfield.plan(built(name))
    assert plan.requirements.waits == (DIFFERS if name in ALONE else None)
    assert plan.requirements.holes == BY_COLUMN
    line = f"requests wait until a batch has ended: {DIFFERS}"
    assert (line in str(plan)) == (name in ALONE)


def test_the_command_line_says_who_waits(cli: Cli, tmp_path: Path) -> None:
    built("fsmt").save_pretrained(tmp_path)
    done = cli("explain", "--model", str(tmp_path))
    words = " ".join(done.out.split())
    assert f"requests wait until a batch has ended: {DIFFERS}" in words


def test_so_many_join() -> None:
    """Counted, so that none of them falls silently: 20 types that read text, all of features."""
    assert set(TEXTS) > ALONE
    others = "encoder-decoder" in TEXTS  # not with transformers 5.17
    assert (len(TEXTS) - len(ALONE), len(KINDS)) == (19 + others, 11)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "cpu_decode", "flex_attention"])
@pytest.mark.parametrize("name", ["bart", "whisper", "t5gemma"])
@pytest.mark.one_in(4)
def test_with_every_attention(name: str, attention: str) -> None:
    model = built(name)
    try:
        jackfield.plan(model, attn_implementation=attention)
    except PlanError:
        return
    arrivals = [one for one in asked_of(prompts_of(model, name)) if "seed" not in one.settings]
    right = [generated(model, name, one.prompt, **one.settings) for one in arrivals]
    seen = Seen()
    with jackfield.load(model, attn_implementation=attention, decoding=BOTH) as engine:
        assert drive_all(engine, arrivals, seen) == right
    assert seen.joined >= 3


@pytest.mark.parametrize("size", [3, 5, 16])
@pytest.mark.parametrize("name", ["bart", "t5", "t5gemma", "whisper"])
@pytest.mark.one_in(4)
def test_a_storm(name: str, size: int) -> None:
    """Requests of all kinds come at any step, end, and are cancelled; looked at closely."""
    model, chance = built(name), random.Random(size)
    prompts = [as_read(prompt) for prompt in prompts_of(model, name)]
    kinds: list[dict[str, Any]] = [
        {"no_repeat_ngram_size": 1}, {"num_beams": 3}, {"do_sample": True, "temperature": 2.0},
    ]  # fmt: skip
    asked = []
    for number in range(60):
        settings = {**chance.choice(kinds), **OPEN, "max_new_tokens": chance.randint(1, 12)}
        if "do_sample" in settings:
            settings |= {"seed": number, "num_return_sequences": chance.randint(1, 3)}
        asked.append((chance.choice(prompts), settings))
    with held_closely(), jackfield.load(model, decoding=BOTH, max_batch_size=size) as engine:
        alone = [tokens_of(drive(engine, [Arrival(0, p, **s)])[0]) for p, s in asked]
        clock, arrivals = 0, []
        for prompt, settings in asked:
            clock += chance.choice((0, 0, 1, 2, 5))
            arrivals.append(Arrival(clock, prompt, **settings))
        checked = Checked(engine, chance)
        found = drive(engine, arrivals, checked)
    assert checked.cancelled > 5
    ends = {s.finish_reason for group in found for s in group if s.answer is s}
    assert ends == {"length", "cancelled"}
    for group, right in zip(found, alone, strict=True):
        if group[0].group is not None:
            if group[0].finish_reason == "length":
                assert tokens_of(group) == right
            continue
        for sequence, text in zip(group, right, strict=True):
            assert sequence.new_tokens == text[: sequence.num_new]
            assert sequence.finish_reason == "cancelled" or sequence.new_tokens == text


def tokens_of(group: Any) -> list[list[int]]:
    return [sequence.new_tokens for sequence in group if sequence.answer is sequence]


class Checked:
    """Cancels somebody now and then; after every step, nothing is held that nobody uses."""

    def __init__(self, engine: Any, chance: random.Random, often: float = 0.1) -> None:
        self.engine, self.chance, self.often = engine, chance, often
        self.cancelled, self.most = 0, 0

    def __call__(self, loop: Loop) -> None:
        cache: Any = loop.cache
        rows = cache._running
        held = [] if rows is None else [row.num_cached for row in rows.sequences]
        if held:
            past = rows.past
            assert past.get_seq_length() == max(held)
            longest = max(len(cache._said[row.id].states) for row in rows.sequences)
            for layer in past.cross_attention_cache.layers:
                assert layer.keys.shape[0] == len(held)
                self.most = max(self.most, layer.keys.shape[2])
                assert layer.keys.shape[2] >= longest
        running = {s.id for s in loop.running}
        assert set(cache._said) <= running
        known = [*(rows.sequences if rows else ()), *cache._waiting]
        assert {s.id for s in known} == running
        candidates = [s for s in (*loop.running, *loop.waiting) if s.answer is s]
        if candidates and self.chance.random() < self.often:
            self.cancelled += len(loop.cancel(self.chance.choice(candidates)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["t5gemma", "m2m_100"])
def test_a_batch_that_never_ends_has_a_bound(name: str) -> None:
    """A hundred come one after another, and some runs all the time: columns go with their rows."""
    model, chance = built(name), random.Random(1)
    prompts = prompts_of(model, name)
    arrivals = [
        Arrival(2 * n, chance.choice(prompts), max_new_tokens=chance.randint(2, 12), **OPEN)
        for n in range(120)
    ]
    most, empty = 0, []

    def look(loop: Loop) -> None:
        nonlocal most
        cache: Any = loop.cache
        most = max(most, cache.held_bytes() or 0)
        empty.append(cache._running is None)
        if not empty[-1]:
            held = [row.num_cached for row in cache._running.sequences]
            assert cache._running.past.get_seq_length() == max(held) <= 12
            assert cache._batch["encoder_attention_mask"].shape[1] <= 14

    with jackfield.load(model, max_batch_size=4) as engine:
        found = drive_all(engine, arrivals, look)
        assert engine._loop.cache.held_bytes() == 0
        right: dict[str, list[int]] = {}
        for one in arrivals:
            key = str(one.prompt)
            right.setdefault(
                key, drive_all(engine, [Arrival(0, one.prompt, max_new_tokens=12, **OPEN)])[0]
            )
    assert sum(empty) == 1, "the batch ended on the way"
    for one, text in zip(arrivals, found, strict=True):
        assert text == right[str(one.prompt)][: one.settings["max_new_tokens"]]


def test_who_comes_all_the_time_holds_up_nobody() -> None:
    """Of two steps in a row one decodes."""
    model = built("bart")
    prompts = prompts_of(model, "bart")
    arrivals = [Arrival(0, prompts[0], max_new_tokens=20, **OPEN)]
    arrivals += [Arrival(n, prompts[n % 6], max_new_tokens=1, **OPEN) for n in range(1, 60)]
    steps: list[int] = []

    def look(loop: Loop) -> None:
        first = next((s for s in loop.running if s.settings.max_new_tokens == 20), None)
        steps.append(20 if first is None else first.num_new)

    with jackfield.load(model, max_batch_size=8) as engine:
        drive_all(engine, arrivals, look)
    assert steps.index(20) <= 2 * 20


def test_a_structure_runs_while_others_join() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_PATH)
    model = built("bart", vocab_size=len(tokenizer))
    prompts = prompts_of(model, "bart")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    held: list[dict[str, Any]] = [
        {"regex": "[a-z]{6}[0-9]{3}"}, {"json_schema": schema}, {"regex": "(ab|cd){2}"},
    ]  # fmt: skip
    plain = {"max_new_tokens": 5, **OPEN}
    with jackfield.load(model, tokenizer=tokenizer) as engine:
        alone = [engine.generate(prompts[0], max_new_tokens=60, **one)[0] for one in held]
        right = [engine.generate(prompt, **plain)[0].token_ids for prompt in prompts]
        seen = Seen()
        arrivals = [
            *(Arrival(3 * n, prompts[0], max_new_tokens=60, **one) for n, one in enumerate(held)),
            *(Arrival(2 + 2 * n, prompt, **plain) for n, prompt in enumerate(prompts)),
        ]
        found = drive_all(engine, arrivals, seen)
    assert seen.joined >= 5
    assert found == [*(one.token_ids for one in alone), *right]
    assert re.fullmatch("[a-z]{6}[0-9]{3}", str(alone[0].text))
    assert json.loads(str(alone[1].text))["a"] in (1, 2)


def test_whisper_begins_with_and_without_a_language() -> None:
    """Rows of three and of four first tokens run together, and who has many more joins them."""
    model = built("whisper")
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=2, pad_token_id=0, eos_token_id=1, max_length=64,
        lang_to_id={"<|en|>": 60, "<|de|>": 61}, task_to_id={"transcribe": 70, "translate": 71},
        no_timestamps_token_id=96, is_multilingual=True, return_timestamps=False,
    )  # fmt: skip
    prompts = prompts_of(model, "whisper")
    begun = {**prompts[3], "decoder_input_ids": torch.tensor([[2, 60, 70, 96, 8, 9, 10, 11, 12]])}
    rows: list[tuple[Any, dict[str, Any]]] = [
        (prompts[0], {}), (prompts[1], {"language": "de"}), (prompts[2], {"task": "translate"}),
        (begun, {}), (prompts[4], {"language": "en", "num_beams": 2}), (prompts[5], {}),
    ]  # fmt: skip
    lengths: set[int] = set()

    def look(loop: Loop) -> None:
        seen(loop)
        if len(loop.running) == 3 and not lengths:
            lengths.update(s.prompt_length for s in loop.running)

    asked = {"max_new_tokens": 8, **OPEN}
    for more in ({}, {"prefill_chunk_size": 2}, {"prefill_chunk_size": 1}):
        seen = Seen()
        with jackfield.load(model, decoding=BOTH, **more) as engine:
            arrivals = [Arrival(n // 3 * 4, p, **asked, **s) for n, (p, s) in enumerate(rows)]
            found = drive_all(engine, arrivals, look)
            solo = [engine.generate(p, **asked, **s)[0].token_ids for p, s in rows]
        assert found == solo
        assert seen.joined >= 3
    own = [
        model.generate(**p, do_sample=False, return_dict_in_generate=True, **asked, **s)
        for p, s in rows[:3]
    ]
    assert [out["sequences"][0].tolist()[-8:] for out in own] == found[:3]
    assert lengths == {3, 4}


def test_features_of_one_are_read_before_each_step() -> None:
    """While others run; of those that come together all, where nobody does."""
    model = built("moonshine")
    prompts = prompts_of(model, "moonshine")
    read: list[int] = []
    handle = model.get_encoder().register_forward_hook(lambda *_: read.append(1))
    counts: list[int] = []
    asked = {"max_new_tokens": 6, **OPEN}
    try:
        with jackfield.load(model, max_batch_size=5) as engine:
            arrivals = [Arrival(0 if n < 2 else 2, p, **asked) for n, p in enumerate(prompts)]
            drive_all(engine, arrivals, lambda _loop: counts.append(len(read)))
    finally:
        handle.remove()
    assert counts[:6] == [2, 2, 3, 4, 5, 5]
    assert counts[-1] == 6


def test_streams_go_on_while_others_join() -> None:
    """Through the engine's own thread: each delta is one of the text, and who joins ends before."""
    model = built("bart")
    prompts = prompts_of(model, "bart")
    with jackfield.load(model, decoding=BOTH) as engine:
        (right,) = engine.generate(prompts[0], max_new_tokens=60, **OPEN)
        short = [engine.generate(p, max_new_tokens=4, **OPEN)[0].token_ids for p in prompts]
        (beams,) = engine.generate(prompts[2], max_new_tokens=4, num_beams=3, **OPEN)
        gate, stream, seen = Gate(engine), engine.submit(prompts[0], max_new_tokens=60, **OPEN), []
        gate.inside()
        gate.let()
        coming = [engine.submit(p, max_new_tokens=4, **OPEN) for p in prompts]
        searched = engine.submit(prompts[2], max_new_tokens=4, num_beams=3, **OPEN)
        late = engine.submit(prompts[1], max_new_tokens=40, deadline=1e-6, **OPEN)
        gone = engine.submit(prompts[1], max_new_tokens=40, **OPEN)
        for _ in range(20):
            gate.let()
        gone.cancel()
        assert [request.result(60).token_ids for request in coming] == short
        assert searched.result(60).token_ids == beams.token_ids
        assert not stream.done
        gate.lift()
        seen = [token for delta in stream for token in delta.token_ids]
        assert late.result(60).finish_reason == "cancelled"
        part = gone.result(60)
        assert part.finish_reason == "cancelled"
        assert 4 < len(part.token_ids) < 40
    assert seen == right.token_ids


def test_samples_that_join_share_what_was_read() -> None:
    model = built("bart")
    read: list[int] = []
    handle = model.get_encoder().register_forward_hook(lambda *_: read.append(1))
    try:
        with jackfield.load(model, max_batch_size=2) as engine:
            drawn = {"do_sample": True, "seed": 3, "num_return_sequences": 5}
            several = engine.generate([5, 6, 7], max_new_tokens=5, **drawn, **OPEN)
    finally:
        handle.remove()
    assert len({tuple(c.token_ids) for c in several}) == 5
    assert len(read) < 5


def test_the_model_is_its_own_between_steps_and_afterwards() -> None:
    model = built("m2m_100")
    prompts = prompts_of(model, "m2m_100")
    right = generated(model, "m2m_100", prompts[0], max_new_tokens=6)
    parts = [dict(vars(module)) for module in model.modules()]
    between: list[bool] = []

    def look(loop: Loop) -> None:
        between.append(any("forward" in vars(module) for module in model.modules()))

    with jackfield.load(model, decoding=BOTH) as engine:
        drive_all(engine, asked_of(prompts), look)
    assert not any(between)
    assert [set(vars(m)) for m in model.modules()] == [set(part) for part in parts]
    assert generated(model, "m2m_100", prompts[0], max_new_tokens=6) == right


def test_a_step_that_fails_leaves_a_cache_for_the_next() -> None:
    model = built("bart")
    prompts = prompts_of(model, "bart")
    asked = {"max_new_tokens": 6, **OPEN}
    with jackfield.load(model) as engine:
        right = engine.generate(prompts, **asked)
        inner, left = engine._loop.forward, [4]

        def forward(inputs: Any) -> Any:
            left[0] -= 1
            found = inner(inputs)
            if not left[0]:
                raise RuntimeError("no more")
            return found

        engine._loop.forward = forward
        failing = [engine.submit(prompt, **asked) for prompt in prompts]
        for request in failing:
            with pytest.raises(ExecutionError, match="no more"):
                request.result(60)
        found = engine.generate(prompts, **asked)
    assert [c.token_ids for c in found] == [c.token_ids for c in right]


@pytest.mark.parametrize("cache", ["quantized", "dynamic"])
def test_only_plain_tensors_join(cache: str) -> None:
    model = built("bart", d_model=64, decoder_attention_heads=2, encoder_attention_heads=2)
    try:
        engine = jackfield.load(model, cache_implementation=cache)
    except PlanError:
        assert cache == "quantized"  # without its package
        return
    with engine:
        assert engine._loop.cache.continuous == (cache == "dynamic")


def test_what_cannot_be_tried_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that fails is evidence: the engine runs as it did without joining."""

    def broken(*_: Any) -> None:
        raise RuntimeError("no such rows")

    monkeypatch.setattr(joining_trial, "join", broken)
    tried_before = batch_trial._tried
    tried_before.cache_clear()
    model = built("t5")
    try:
        with jackfield.load(model) as engine:
            assert "fails where rows join others: no such rows" in str(engine.plan)
            assert not engine._loop.cache.continuous
            (found,) = engine.generate([5, 6, 7], max_new_tokens=5)
    finally:
        tried_before.cache_clear()
    assert found.token_ids == generated(model, "t5", [5, 6, 7], max_new_tokens=5)


@pytest.mark.parametrize("name", ["t5", "bart", "fsmt"])
def test_an_encoder_that_fails_on_a_prompt_ends_its_request_alone(name: str) -> None:
    model = built(name)
    prompts = prompts_of(model, name)
    bad, settings = prompts[2], {"max_new_tokens": 6, **OPEN}

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].tolist() == [bad]:
            raise RuntimeError("bad prompt")

    model.get_encoder().register_forward_pre_hook(refuse, with_kwargs=True)
    asked = [{}, {"num_beams": 2}, {"num_beams": 2}, {}, {"do_sample": True, "seed": 1}, {}]
    with jackfield.load(model, decoding=BOTH, max_batch_size=3) as engine:
        arrivals = [
            Arrival(at, prompt, **settings, **own)
            for at, (prompt, own) in enumerate(zip(prompts, asked, strict=True))
        ]
        arrivals.append(Arrival(3, bad, **settings))
        found = drive(engine, arrivals)
        again = engine.generate(prompts[0], **settings)[0].token_ids
        figures = engine.statistics()
    for at, own in enumerate([*asked, {}]):
        (said, *_) = found[at]
        if at in (2, 6):
            assert (said.finish_reason, said.error) == (
                "error", "its encoder failed: RuntimeError: bad prompt",
            )  # fmt: skip
        elif not own.get("do_sample"):
            assert said.new_tokens == generated(model, name, prompts[at], **settings, **own)
    assert again == generated(model, name, prompts[0], **settings)
    assert (figures.running, figures.waiting) == (0, 0)
