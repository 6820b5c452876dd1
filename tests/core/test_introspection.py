"""`output_hidden_states` and `output_attentions`: those of `generate`, in any company."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import encoder_decoders
import pytest
import torch
from families import build, prompts

import jackfield
from jackfield.bridge import layer_outputs
from jackfield.contracts import Settings
from jackfield.engine import introspection
from jackfield.engine.introspection import Introspection
from jackfield.engine.loop import Loop
from jackfield.errors import SettingsError, UsageError

PROMPTS = prompts((5, 13, 21, 1))
NEW = 9
BOTH = {"output_hidden_states": True, "output_attentions": True}
STATES = {"output_hidden_states": True}
#: Models have softmax, norms and states in float32, also those of float64.
NEAR = {"rtol": 1e-5, "atol": 1e-4}
LOOKUP = "prompt_lookup?min_acceptance_rate=0&max_matching_ngram_size=1"
#: How an engine is loaded -> that requests share its steps, its pages and its prompts' pieces.
WAYS: dict[str, dict[str, Any]] = {
    "paged": {"cache_implementation": "paged?page_size=4"},
    "rows": {"cache_implementation": "dynamic"},
    "pieces": {"prefill_chunk_size": 3, "max_batch_size": 4, "max_batch_tokens": 9},
    "swapped": {"cache_implementation": "paged?page_size=4&num_tokens=104&swap=True"},
    "guesses": {"decoding": LOOKUP},
    "compiled": {"compile": "inductor?backend=eager"},
    "verified": {"verify": True},
    "ahead": {"cache_implementation": "paged?page_size=4", "max_batch_size": 3},
}


def right(model: Any, prompt: list[int], **asked: Any) -> Any:
    ids = torch.tensor([prompt])
    both = STATES if model.config.model_type == "falcon" else BOTH
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True,
        **{"max_new_tokens": NEW, "do_sample": False, **both, **asked},
    )  # fmt: skip


def whole_states(due: Any, rows: list[int] | None = None) -> torch.Tensor:
    """transformers' tuples of steps as one array; `rows` has the row of each step."""
    rows = rows or [0] * len(due.hidden_states)
    layers = range(len(due.hidden_states[0]))
    steps = list(zip(due.hidden_states, rows, strict=True))
    return torch.stack([torch.cat([step[i][row] for step, row in steps]) for i in layers])


def check_attentions(found: torch.Tensor, due: Any) -> None:
    """Each query's row; a window's keys are the last ones that transformers' cache has."""
    first = 0
    for step in due.attentions:
        assert len(step) == len(found)
        end = first + step[0].shape[2]
        for mine, layer in zip(found, step, strict=True):
            keys = layer.shape[3]
            torch.testing.assert_close(mine[:, first:end, end - keys : end], layer[0], **NEAR)
            assert not mine[:, first:end, : end - keys].any()
            assert not mine[:, first:end, end:].any()
        first = end
    assert found.shape[2:] == (first, first)


def check(model: Any, prompt: list[int], one: Any, **asked: Any) -> None:
    due = right(model, prompt, **asked)
    assert one.error is None
    assert one.token_ids == due.sequences[0, len(prompt) :].tolist()
    if one.hidden_states is not None:
        torch.testing.assert_close(one.hidden_states, whole_states(due), **NEAR)
    if one.attentions is not None:
        check_attentions(one.attentions, due)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.one_in(4)
def test_they_are_those_of_generate_beside_requests_that_do_not_ask(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, following = [], Loop._following
    monkeypatch.setattr(
        Loop, "_following", lambda *given: begun.append(following(*given)) or begun[-1]
    )
    settings = [BOTH, {}, {"output_attentions": True}, {"output_hidden_states": True}]
    with jackfield.load(build("llama"), **WAYS[way]) as engine:
        if way == "ahead":  # as on a GPU: a step is begun before the texts of the last are told
            engine._loop.overlaps = True
        found = engine.generate(
            [prompt for prompt in PROMPTS for _ in settings],
            settings=settings * len(PROMPTS), max_new_tokens=NEW,
        )  # fmt: skip
        assert bool(begun) == (way == "ahead")
    model = build("llama")
    for number, one in enumerate(found):
        asked = settings[number % len(settings)]
        assert (one.hidden_states is not None) == ("output_hidden_states" in asked)
        assert (one.attentions is not None) == ("output_attentions" in asked)
        prompt = PROMPTS[number // len(settings)]
        check(model, prompt, one)
        for array in (one.hidden_states, one.attentions):
            assert array is None or (array.dtype, array.device.type) == (torch.float64, "cpu")


@pytest.mark.parametrize(
    "name",
    ["gemma2", "gpt2", "mixtral", "gpt-oss", "opt", "falcon-alibi", "bloom", "diffllama",
     "qwen3-next", "llama4"],
)  # fmt: skip
@pytest.mark.parametrize("block", [4, 512])
@pytest.mark.one_in(4)
def test_families(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, softcaps, sinks, experts, states, attentions that are a model's own code."""
    monkeypatch.setattr(layer_outputs, "BLOCK", block)
    model = build(name)
    with jackfield.load(build(name)) as engine:
        asked = STATES if name == "falcon-alibi" else BOTH
        found = engine.generate(PROMPTS, max_new_tokens=NEW, **asked)
        if name == "falcon-alibi":
            with pytest.raises(SettingsError, match="adds its ALiBi twice"):
                engine.generate(PROMPTS[0], output_attentions=True)
    for prompt, one in zip(PROMPTS, found, strict=True):
        check(model, prompt, one)


def test_drawn_samples_of_one_prompt_stops_and_guidance() -> None:
    model = build("llama")
    free = right(model, PROMPTS[1]).sequences[0, len(PROMPTS[1]) :].tolist()
    with jackfield.load(build("llama"), decoding=LOOKUP) as engine:
        (stopped,) = engine.generate(PROMPTS[1], max_new_tokens=NEW, eos_token_id=free[3], **BOTH)
        (led,) = engine.generate(PROMPTS[1], max_new_tokens=NEW, guidance_scale=1.5, **BOTH)
        drawn = engine.generate(
            PROMPTS[2], max_new_tokens=NEW, num_return_sequences=3, temperature=1.0, seed=1, **BOTH
        )
        *_, last = engine.stream(PROMPTS[0], max_new_tokens=1, **BOTH)
    check(model, PROMPTS[1], stopped, eos_token_id=free[3])
    check(model, PROMPTS[1], led, guidance_scale=1.5)
    for one in drawn:  # a text is a prompt for its last token
        text = [*PROMPTS[2], *one.token_ids]
        due = right(model, text[:-1], max_new_tokens=1)
        torch.testing.assert_close(one.hidden_states, whole_states(due), **NEAR)
        check_attentions(one.attentions, due)
    assert last.completion is not None
    check(model, PROMPTS[0], last.completion, max_new_tokens=1)
    stored = last.completion.to_dict()
    assert torch.tensor(stored["hidden_states"]).shape == (3, 5, 32)
    assert torch.tensor(stored["attentions"]).shape == (2, 4, 5, 5)


def test_of_beams_it_is_the_text_that_won() -> None:
    """transformers has those of all beams, and says which of them each token was in."""
    model = build("llama")
    with jackfield.load(build("llama"), decoding="beam") as engine:
        found = engine.generate(PROMPTS[:3], max_new_tokens=NEW, num_beams=3, **BOTH)
    for prompt, one in zip(PROMPTS, found, strict=False):
        due = right(model, prompt, num_beams=3)
        assert one.token_ids == due.sequences[0, len(prompt) :].tolist()
        rows = due.beam_indices[0].tolist()
        torch.testing.assert_close(one.hidden_states, whole_states(due, rows), **NEAR)
        assert one.attentions is not None
        size = len(prompt) + NEW - 1
        assert one.attentions.shape == (2, 4, size, size)


def test_each_adapter_has_its_own(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", init_lora_weights=False, target_modules=["q_proj", "up_proj"], r=4
    )
    torch.manual_seed(0)
    adapted = peft.get_peft_model(build("llama"), config).eval()
    adapted.save_pretrained(tmp_path)
    with jackfield.load(build("llama"), adapters={"own": tmp_path}) as engine:
        found = engine.generate(
            [PROMPTS[1]] * 2, settings=[{"adapter": "own"}, {}], max_new_tokens=NEW, **BOTH
        )
        steps = engine.report().adapters
    check(adapted, PROMPTS[1], found[0])
    check(build("llama"), PROMPTS[1], found[1])
    assert steps == {"own": NEW}  # it is no step


def state(model: Any) -> Any:
    modules = list(model.modules())
    return (
        model.config._attn_implementation_internal,
        [vars(module).get("forward") for module in modules],
        [[*module._forward_hooks] for module in modules],
        ["_output_capturing_hooks_installed" in vars(module) for module in modules],
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"cache_implementation": "dynamic"},
        {"kernels": "cpu-rms-norm"},
        {"compile": "inductor?backend=eager"},
    ],
    ids=str,
)
def test_the_model_and_the_report_are_as_they_were(arguments: dict[str, Any]) -> None:
    reports = []
    for asked in (BOTH, {}):
        model = build("llama", torch.float32)
        before = state(model)
        with jackfield.load(model, **arguments) as engine:
            running = state(model)
            found = engine.generate(PROMPTS[:3], max_new_tokens=5, **asked)
            assert state(model) == running
            reports.append([(o.name, o.calls) for o in engine.report().observations])
        assert state(model) == before
        due = whole_states(right(build("llama", torch.float32), PROMPTS[0], max_new_tokens=5))
        for one in found[:1] if asked else ():
            torch.testing.assert_close(one.hidden_states, due, rtol=1e-3, atol=1e-3)
    assert reports[0] == reports[1]


def test_whoever_hooked_the_layers_finds_the_hooks_again() -> None:
    model: Any = build("llama")
    model(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    before = state(model)
    with jackfield.load(model) as engine:
        (one,) = engine.generate(PROMPTS[0], max_new_tokens=NEW, **BOTH)
    assert state(model) == before
    check(model, PROMPTS[0], one)


def test_they_can_be_written_into_and_trained_with() -> None:
    with jackfield.load(build("llama", torch.float32)) as engine:
        (one,) = engine.generate(PROMPTS[0], max_new_tokens=3, **BOTH)
    for array in (one.hidden_states, one.attentions):
        assert array is not None
        assert array.dtype == torch.float32
        array.mul_(2)
        weight = torch.ones((), requires_grad=True)
        (array * weight).sum().backward()
        assert weight.grad is not None


def test_who_does_not_ask_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introspection, "LayerReader", None)
    with jackfield.load(build("llama")) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=3, output_hidden_states=False)


def test_a_failure_is_its_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with jackfield.load(build("llama")) as engine:
        monkeypatch.setattr(introspection, "free_bytes", lambda _: 1000)
        asked, plain = engine.generate(PROMPTS[:2], max_new_tokens=3, settings=[BOTH, {}])
        assert asked.finish_reason == "error"
        assert asked.error == (
            "its output_hidden_states and output_attentions failed: ExecutionError: it takes "
            "17.0 kB, and 1.0 kB are free"
        )
        assert asked.hidden_states is None
        assert len(asked.token_ids) == 3
        assert plain.finish_reason == "length"
        monkeypatch.undo()

        def failing(*_: Any, **__: Any) -> Any:
            raise MemoryError("no room")

        monkeypatch.setattr(layer_outputs.LayerReader, "_arguments", failing)
        asked, plain = engine.generate(PROMPTS[:2], max_new_tokens=3, settings=[BOTH, {}])
        assert str(asked.error).endswith("failed: MemoryError: no room")
        assert plain.finish_reason == "length"
        monkeypatch.undo()
        (again,) = engine.generate(PROMPTS[0], max_new_tokens=3, **BOTH)
        assert again.hidden_states is not None


def test_what_a_model_does_not_have_is_its_requests_error() -> None:
    """Gemma 3n keeps four states of each token."""
    with jackfield.load(build("gemma3n")) as engine:
        found = engine.generate(
            PROMPTS[:2], max_new_tokens=3, settings=[{"output_hidden_states": True}, {}]
        )
    assert "Gemma3nForCausalLM has no hidden_states of 7 tokens and one shape" in str(
        found[0].error
    )
    assert found[1].finish_reason == "length"


def test_of_a_request_that_is_cancelled_nothing_is_computed() -> None:
    began, go_on = threading.Event(), threading.Event()

    def waits(ids: Any, scores: Any) -> Any:
        began.set()
        go_on.wait(60)
        return scores

    with jackfield.load(build("llama")) as engine:
        request = engine.submit(PROMPTS[0], max_new_tokens=50, logits_processor=[waits], **BOTH)
        assert began.wait(60)
        request.cancel()
        go_on.set()
        found = request.result(60)
        late = engine.generate(PROMPTS[0], max_new_tokens=50, deadline=1e-9, **BOTH)[0]
    for one in (found, late):
        assert one.finish_reason == "cancelled"
        assert one.hidden_states is one.attentions is None


def refusal(engine: Any, **asked: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        engine.generate(PROMPTS[0], **{"max_new_tokens": NEW, **asked})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_more_than_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asking = build("llama"), {"output_attentions": True}
    model.generation_config.output_attentions = True  # which nobody asked for
    monkeypatch.setattr(introspection, "MOST_BYTES", 10_000)
    with jackfield.load(model) as engine:
        text = refusal(engine, **asking, max_new_tokens=10)  # 2 layers of 4 heads of 14² in float64
        assert text.startswith(
            "output_attentions=True takes 12.5 kB for 14 tokens, and 10.0 kB are the most for one "
            "request: shorten the prompt or lower max_new_tokens, to 12 tokens together"
        )
        assert engine.generate(PROMPTS[0], max_new_tokens=10)[0].attentions is None
        asked = {"max_new_tokens": 8, "output_attentions": True, "output_hidden_states": True}
        found = engine.generate(PROMPTS[0], **asked)[0]
        assert found.attentions is not None
        assert found.attentions.shape == (2, 4, 12, 12)
        text = refusal(engine, max_new_tokens=10, output_hidden_states=True, output_attentions=None)
        assert "output_hidden_states=True takes 10.8 kB for 14 tokens" in text
        assert "to 13 tokens together" in text
        drawn = {**asking, "max_new_tokens": 8, "do_sample": True, "num_return_sequences": 2}
        text = refusal(engine, **drawn)  # each of which would fit by itself
        assert "takes 18.4 kB for 12 tokens of each of 2 texts, and 10.0 kB" in text
        assert engine.generate(PROMPTS[0], max_new_tokens=90, output_attentions=None)
        for name in BOTH:
            assert name in refusal(engine, **{"output_attentions": None, name: [1]})


def test_what_cannot_be_told_is_refused() -> None:
    with (
        jackfield.load(encoder_decoders.build("t5")) as engine,
        pytest.raises(SettingsError, match="an encoder and a decoder have layers apart"),
    ):
        engine.generate([5, 6, 7], max_new_tokens=NEW, output_hidden_states=True)
    with jackfield.load(build("hrm-text")) as engine:
        assert "in both directions" in refusal(engine, output_attentions=True)
    with jackfield.load(build("llama")) as engine:
        bound, needs = engine._bound, engine.plan.requirements
        shared = SimpleNamespace(requirements=dataclasses.replace(needs, tp_size=2))
        one = Introspection(SimpleNamespace(model=bound.model, plan=shared))  # type: ignore[arg-type]
        asked = Settings(max_new_tokens=2, output_attentions=True)
        with pytest.raises(SettingsError, match="each of the 2 processes that share this model"):
            one.check(asked, 5, images=False)
        bare = SimpleNamespace(requirements=dataclasses.replace(needs, num_attention_heads=0))
        one = Introspection(SimpleNamespace(model=bound.model, plan=bare))  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="no layer of this model attends"):
            one.check(asked, 5, images=False)
        with pytest.raises(SettingsError, match="a text with images is not computed once more"):
            Introspection(bound).check(asked, 5, images=True)


def test_plain_transformers_code_is_answered_by_name() -> None:
    """`generate` would want tuples of them, and a decoding of ours returns tokens alone."""
    model: Any = build("llama", torch.float32)
    for name in BOTH:
        with pytest.raises(UsageError, match=name):
            model.generate(
                torch.tensor([PROMPTS[0]]), max_new_tokens=3,
                custom_generate=jackfield.decoding("sample"), **{name: True},
            )  # fmt: skip
