"""A model's own heads as its draft model: what is asked, refused, counted and held."""

from __future__ import annotations

import copy
import logging
import re
import shutil
from typing import Any

import pytest
import torch
import transformers
from families import build, config_of, prompts
from heads import HEADED, checkpoint, headed_config, known, live

import jackfield
from jackfield.bridge import mtp
from jackfield.contracts import Decoding, DecodingCapabilities
from jackfield.errors import (
    CheckpointError,
    ExecutionError,
    JackfieldError,
    OptionError,
    PlanError,
    SettingsError,
    UsageError,
)
from jackfield.planning import planning

MTP = "mtp?min_acceptance_rate=0&min_speedup=0"
PROMPTS = prompts((3, 17, 8))
HAS_HEADS = mtp._Mtp is not None
needs_heads = pytest.mark.skipif(not HAS_HEADS, reason="this transformers makes no heads")


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)


def assert_wrong(error: type[JackfieldError], text: str, call: Any) -> None:
    with pytest.raises(error) as caught:
        call()
    assert re.search(text, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def other(kind: str) -> Any:
    """A model whose heads cannot be had, or what else is said of one that has some."""
    if kind == "no weights":
        return checkpoint("glm4-moe", None, heads=False)
    if kind == "folder":
        return checkpoint("glm4-moe")
    if kind == "unsaved":
        return transformers.AutoModelForCausalLM.from_config(headed_config("glm4-moe"))
    if kind == "fast experts":
        config = headed_config("mellum")
        config._experts_implementation = None
        return config
    if kind == "odd layers":
        config = headed_config("mellum")
        config.mtp_layer_types = None
        return config
    return config_of(kind)


NONE = (
    r"cannot run LlamaForCausalLM here: mtp \(needs heads for multi-token prediction: the "
    r"config of LlamaForCausalLM has none \(num_mtp_layers=None\)\)"
)
PLANS: list[tuple[str, dict[str, Any], type[JackfieldError], str]] = [
    ("llama", {}, PlanError, NONE),
    ("no weights", {}, PlanError, "this Glm4MoeForCausalLM has no weights of heads .*; choose an"),
    ("unsaved", {}, PlanError, "this live Glm4MoeForCausalLM came from none that is here; give"),
    ("odd layers", {}, PlanError, "transformers makes no heads .* MellumForCausalLM: .*; choose"),
    ("fast experts", {"compile": "inductor", "dtype": "float32"}, PlanError,
     "compiled steps do not show the hidden states that heads read"),
    ("folder", {"tp_size": 2}, PlanError, "tp_size=2 shares them among processes"),
    ("folder", {"device_map": {"": "cpu", "lm_head": "disk"}}, PlanError,
     "heads are read to one device, and weights go to cpu, disk"),
    ("folder", {"quantization": "int8-cpu", "dtype": "float32"}, PlanError,
     "decoding 'mtp': heads are read as they are stored, .* 'int8-cpu' .*; drop quantization, or"),
    ("folder", {"deterministic": True}, PlanError, "deterministic=True"),
    ("folder", {"cache_implementation": "static"}, PlanError, "cannot take back tokens"),
    ("folder", {"assistant_model": "demo-draft"}, UsageError, "used by none of the decodings"),
    ("folder", {"decoding": "mtp?min_acceptance_rate=2"}, OptionError, "from 0 to 1, not 2"),
    ("folder", {"decoding": "mtp?min_speedup=-1"}, OptionError, "0 or more, not -1"),
]  # fmt: skip


@needs_heads
@pytest.mark.parametrize(("model", "arguments", "error", "text"), PLANS)
@pytest.mark.one_in(4)
def test_before_any_weight_is_read(
    model: str, arguments: dict[str, Any], error: type[JackfieldError], text: str
) -> None:
    arguments = {"decoding": "mtp", **arguments}
    assert_wrong(error, text, lambda: jackfield.plan(other(model), **arguments))


@needs_heads
@pytest.mark.parametrize("name", ["adapter", "adapters"])
def test_an_adapter_changes_what_heads_read(name: str, tmp_path: Any) -> None:
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    config = peft.LoraConfig(target_modules=["q_proj"])
    peft.get_peft_model(other("unsaved"), config).save_pretrained(tmp_path)
    given = {name: str(tmp_path) if name == "adapter" else {"a": str(tmp_path)}}
    text = "heads were trained without .*, which changes what they read"
    assert_wrong(PlanError, text, lambda: jackfield.plan(other("folder"), decoding="mtp", **given))


def test_a_transformers_that_makes_no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "_Mtp", None)
    text = f"transformers {re.escape(transformers.__version__)} makes none .5.20 does"
    model = headed_config("glm4-moe")
    model.num_mtp_layers = 1
    assert_wrong(PlanError, text, lambda: jackfield.plan(model, decoding="mtp"))


@needs_heads
def test_a_model_whose_weights_of_heads_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "_keys_to_ignore_on_load_unexpected"
    for cls in (transformers.Glm4MoeForCausalLM, transformers.Glm4MoeModel):
        monkeypatch.setattr(cls, where, [])
    text = "transformers does not know which weights of Glm4MoeForCausalLM they are"
    assert_wrong(PlanError, text, lambda: jackfield.plan(other("folder"), decoding="mtp"))


@needs_heads
def test_heads_that_attend_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.Glm4MoeForCausalLM, "_supports_sdpa", False)
    text = "heads of this Glm4MoeForCausalLM attend in another way .*; choose another decoding"
    assert_wrong(PlanError, text, lambda: jackfield.plan(headed_config("glm4-moe"), decoding="mtp"))


@needs_heads
def test_weights_of_which_one_is_missing(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    folder = checkpoint("glm4-moe")
    weights = load_file(f"{folder}/model.safetensors")
    del weights["model.layers.3.eh_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(f"{folder}/config.json", tmp_path)
    text = f"cannot read the heads in {re.escape(str(tmp_path))}: .*missing"
    assert_wrong(CheckpointError, text, lambda: jackfield.load(tmp_path, decoding="mtp"))


@needs_heads
@pytest.mark.parametrize("family", HEADED)
def test_a_plan_counts_the_heads(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, count = checkpoint(family), HEADED[family][2]
    plain, plan = jackfield.plan(folder), jackfield.plan(folder, decoding="mtp")
    heads = plan.heads
    assert heads.layers == count
    assert plan.to_dict()["heads"] == {
        "layers": count, "weight_bytes": heads.weight_bytes, "token_bytes": heads.token_bytes
    }  # fmt: skip
    assert f"heads: {count} head" in str(plan)
    assert plain.to_dict()["heads"] is None
    # A thin layer each, and the matrix that joins what it reads.
    made = jackfield.load(folder, decoding=MTP)
    with made:
        own = made._loop.heads._heads._made
        shared = {id(p) for p in made.model.parameters()}
        read = [p for p in own.parameters() if id(p) not in shared]
        assert sum(p.numel() * p.element_size() for p in read) == heads.weight_bytes
        assert own.embed_tokens is made.model.get_input_embeddings()
        assert own.shared_head is made.model.get_output_embeddings()
        assert made._loop.decoding.drafting == {"mtp"}
        text = [7] * 40
        made.generate(text, max_new_tokens=3)
    steps, share = plan.room()
    assert plain.room()[1] == 1
    assert share == pytest.approx(plan.token_bytes() / (plan.token_bytes() + heads.token_bytes))
    assert steps >= plain.step_bytes()
    monkeypatch.setattr(planning, "free_bytes", lambda _: 1 << 34)  # others take and give some
    if plain.memory() is not None:
        assert plan.memory().requests(64) < plain.memory().requests(64)


@needs_heads
def test_what_a_text_takes_in_the_heads_is_what_the_plan_says() -> None:
    folder = checkpoint("glm4-moe")
    with jackfield.load(folder, decoding=MTP) as engine:
        heads, seen = engine._loop.heads, []
        release = heads.release

        def look(sequences: Any) -> None:
            for text in heads._texts.values():
                layers = text.cache.layers
                tensors = [t for layer in layers for t in (layer.keys, layer.values)]
                seen.append((sum(t.numel() * t.element_size() for t in tensors), text.read))
            release(sequences)

        heads.release = look
        engine.generate([7] * 40, max_new_tokens=9)
        (size, read), *_ = seen
        assert size == read * engine.plan.heads.token_bytes
        assert read > 40


@needs_heads
def test_an_estimate_says_what_it_leaves_out() -> None:
    text = "does not count a model's own heads; ask without the decoding"
    assert_wrong(
        UsageError, text, lambda: jackfield.estimate(checkpoint("glm4-moe"), decoding="mtp")
    )


@pytest.fixture(scope="module")
def offering() -> Any:
    if not HAS_HEADS:
        pytest.skip("this transformers makes no heads")
    with pytest.MonkeyPatch.context() as monkeypatch:
        known(monkeypatch)
        offered = {"plain": "sample", "heads": MTP}
        with jackfield.load(checkpoint("glm4-moe"), decoding=offered) as engine:
            yield engine


def test_a_request_that_asks_for_heads_gets_them(offering: jackfield.Engine) -> None:
    def chosen(**asked: Any) -> str:
        (found,) = offering.generate(PROMPTS[0], max_new_tokens=4, **asked)
        return found.report["decoding"].name

    assert chosen() == "plain"
    assert chosen(use_mtp=False) == "plain"
    assert chosen(use_mtp=True) == "heads"
    assert chosen(decoding="heads", use_mtp=True) == "heads"
    config = transformers.GenerationConfig(use_mtp=True)
    assert chosen(generation_config=config) == "heads"
    assert chosen(generation_config=config, use_mtp=None) == "plain"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"use_mtp": "yes"}, "^use_mtp must be True or False, not 'yes'$"),
        ({"use_mtp": 1}, "^use_mtp must be True or False, not 1$"),
        ({"use_mtp": True, "decoding": "plain"}, "'plain' does not honour use_mtp.*g='heads'"),
        ({"use_mtp": False, "decoding": "heads"}, "'heads' drafts with the model's heads; drop"),
    ],
)
def test_a_request_that_cannot_have_them_is_told(
    offering: jackfield.Engine, asked: dict[str, Any], text: str
) -> None:
    assert_wrong(SettingsError, text, lambda: offering.generate(PROMPTS[0], **asked))


@needs_heads
def test_loading_by_transformers_name_for_it() -> None:
    folder = checkpoint("glm4-moe")
    assert jackfield.plan(folder, use_mtp=True)["decoding"].registered.name == "mtp"
    with jackfield.load(folder, decoding="mtp") as engine:
        (found,) = engine.generate(PROMPTS[0], max_new_tokens=4, use_mtp=False)
        assert found.report["decoding"].name == "sample"


@needs_heads
def test_an_engine_that_has_none_says_how_to_have_one(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    model.generation_config.use_mtp = True  # data never selects code
    with caplog.at_level(logging.WARNING), jackfield.load(model) as engine:
        text = r"does not honour use_mtp=True; .*: jackfield.load\(decoding='mtp'\) drafts with a"
        assert_wrong(SettingsError, text, lambda: engine.generate(PROMPTS[0], use_mtp=True))
        engine.generate(PROMPTS[0], max_new_tokens=2)
    assert "ignored use_mtp=True" in caplog.text


@needs_heads
def test_heads_that_fail_say_whose_they_are() -> None:
    def fail(*_: Any) -> None:
        raise KeyError("gone")

    with jackfield.load(checkpoint("glm4-moe"), decoding=MTP) as engine:
        made = engine._loop.heads._heads._made
        made.layers[1].register_forward_pre_hook(fail)
        text = "a draft by the heads of Glm4MoeForCausalLM raised KeyError: 'gone'; mend it, or"
        with pytest.raises(ExecutionError, match=text):
            engine.generate(PROMPTS, max_new_tokens=4)
        heads = engine._loop.heads
    assert heads._texts == {}


@needs_heads
def test_a_live_model_that_was_cast() -> None:
    model = live("glm4-moe")
    cast = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("glm4-moe"), dtype=torch.float32, experts_implementation="eager"
    ).double()
    found = []
    for one in (model, cast):
        with jackfield.load(one, decoding=MTP) as engine:
            assert engine._loop.heads._heads._made.layers[0].eh_proj.weight.dtype == torch.float64
            found.append([c.token_ids for c in engine.generate(PROMPTS, max_new_tokens=6)])
    assert len(found[0]) == len(found[1]) == len(PROMPTS)


def test_a_plugin_that_drafts_with_heads_takes_nothing_else_for_it() -> None:
    class Odd(Decoding):
        name = "odd"
        bind = None  # type: ignore[assignment]

    for own in ({"assistant": True, "rollback": True}, {}):
        Odd.capabilities = DecodingCapabilities(heads=True, **own)
        assert any("heads=True" in flaw for flaw in Odd.flaws(object.__new__(Odd)))


@needs_heads
def test_what_others_do_with_the_model_is_not_kept() -> None:
    """Their calls, with gradients, and copies of the model."""
    model = live("glm4-moe")
    with jackfield.load(model, decoding=MTP, cache_implementation="dynamic") as engine:
        first = engine.generate(PROMPTS, max_new_tokens=6)
        heads = engine._loop.heads
        assert heads is not None
        assert heads._states._states is None
        with torch.enable_grad():
            engine.model(torch.tensor([[1, 2, 3]]))
        assert heads._states._states is None
        copied = copy.deepcopy(model)
        again = engine.generate(PROMPTS, max_new_tokens=6)
        assert [one.token_ids for one in again] == [one.token_ids for one in first]
        copied(torch.tensor([[1, 2, 3]]))
        hooks = [h for m in copied.modules() for h in m._forward_hooks.values()]
        assert [getattr(h, "__self__", h)._states for h in hooks] == [None]
    assert heads._heads._made is None
    assert not [h for m in model.modules() for h in m._forward_hooks.values()]


@needs_heads
@pytest.mark.parametrize("swap", ["true", "false"])
def test_heads_hold_what_runs(swap: str) -> None:
    """What was preempted has no room in the plan."""
    with jackfield.load(
        live("glm4-moe"), decoding=MTP,
        cache_implementation=f"paged?page_size=4&num_tokens=72&swap={swap}",
    ) as engine:  # fmt: skip
        loop, held = engine._loop, []
        assert loop.heads is not None
        take = loop.heads.take

        def watched(*args: Any) -> None:
            take(*args)
            running = {one.id for one in loop.running}
            held.append(set(loop.heads._texts) - running)

        loop.heads.take = watched
        engine.generate(prompts((9, 14, 20, 11, 16, 8)), max_new_tokens=12)
        assert engine.statistics().preemptions > 0
    assert len(held) > 10
    assert not set().union(*held)
