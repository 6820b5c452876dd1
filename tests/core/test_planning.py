"""From selections to a plan, with made-up backends: who is chosen, who is refused, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest

from jackfield.contracts import (
    Attention,
    AttentionCapabilities,
    Backend,
    Cache,
    CacheCapabilities,
    Compiler,
    CompilerCapabilities,
    Decoding,
    DecodingCapabilities,
    Quantizer,
    QuantizerCapabilities,
    Requirements,
    Scheduler,
)
from jackfield.errors import OptionError, PlanError, SelectionError
from jackfield.planning.planning import Plan
from jackfield.planning.selecting import decide
from jackfield.registry.backends import Registered, Registry

NEEDS = Requirements(
    architecture="TinyForCausalLM",
    dtype="float32",
    device="cpu",
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dims=(16,),
    layer_types=("full_attention", "full_attention"),
    windows=(None, None),
)


class FakeAttention(Attention):
    capabilities = AttentionCapabilities()

    def bind(self, context: Any) -> Any: ...


class FakeCache(Cache):
    capabilities = CacheCapabilities(layout="padded", layer_types=frozenset({"full_attention"}))

    def bind(self, context: Any) -> Any: ...


class FakeCompiler(Compiler):
    capabilities = CompilerCapabilities()
    compiles = False

    def bind(self, context: Any) -> Any: ...


class FakeDecoding(Decoding):
    capabilities = DecodingCapabilities()

    def bind(self, context: Any) -> Any: ...


class FakeQuantizer(Quantizer):
    capabilities = QuantizerCapabilities()

    def rank(self, requirements: Requirements) -> int | None:
        return self.auto_rank

    def make_config(self, context: Any) -> Any: ...

    def converted(self, module: Any) -> bool:
        return False


class FakeScheduler(Scheduler):
    def bind(self, context: Any) -> Any: ...


BASES: dict[str, type[Backend]] = {
    "attention": FakeAttention,
    "cache": FakeCache,
    "compiler": FakeCompiler,
    "decoding": FakeDecoding,
    "quantizer": FakeQuantizer,
    "scheduler": FakeScheduler,
}


def fake(kind: str, name: str, **members: Any) -> Backend:
    members.setdefault("auto_rank", 0)
    return type(name.title(), (BASES[kind],), {"name": name, **members})()


PLAIN = (
    fake("attention", "plain"),
    fake("cache", "grow"),
    fake("compiler", "none"),
    fake("decoding", "sample"),
    fake("quantizer", "none"),
    fake("scheduler", "fifo"),
)


def socket(*backends: Backend, of: str = "outside") -> Registry:
    """A registry of PLAIN and `backends`; flaws in the fakes would make a test prove nothing."""
    made = Registry()
    for distribution, several in (("jackfield", PLAIN), (of, backends)):
        for backend in several:
            assert backend.flaws() == []
            registered = Registered(backend, distribution, "1.0", backend.name)
            made.backends[backend.kind].append(registered)
    return made


def choose(registry: Registry, needs: Requirements = NEEDS, **selections: Any) -> Plan:
    return decide(registry, needs, selections)


def refused(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {r.registered.name: r.reasons for r in plan.refusals}


def chosen(plan: Plan) -> tuple[str, ...]:
    return tuple(plan[kind].registered.name for kind in ("decoding", "cache", "attention"))


def why_not(registry: Registry, needs: Requirements = NEEDS, **selections: Any) -> str:
    with pytest.raises(PlanError) as caught:
        choose(registry, needs, **selections)
    return str(caught.value)


def declares(**capabilities: Any) -> dict[str, Any]:
    return {"capabilities": AttentionCapabilities(**capabilities)}


def holds(**capabilities: Any) -> dict[str, Any]:
    common = {"layout": "padded", "layer_types": frozenset({"full_attention"})}
    return {"capabilities": CacheCapabilities(**{**common, **capabilities})}


PACKED = holds(layout="packed")
REWINDS = holds(rollback=frozenset({"full_attention"}))


def test_auto_takes_the_highest_rank(caplog: pytest.LogCaptureFixture) -> None:
    registry = socket(
        fake("attention", "fast", auto_rank=10),
        fake("attention", "faster", auto_rank=30, **declares(devices=frozenset({"cuda"}))),
        fake("attention", "as-fast", auto_rank=10),
        fake("attention", "only-named", auto_rank=None),
    )
    with caplog.at_level(logging.INFO, "jackfield"):
        plan = choose(registry)
    assert chosen(plan) == ("sample", "grow", "fast")
    assert {choice.how for choice in plan.choices.values()} == {"auto"}
    assert refused(plan) == {"faster": ("does not run with device cpu (only cuda)",)}
    assert "auto chose attention 'fast' of outside 1.0" in caplog.messages
    assert (
        "passed over attention 'faster' of outside 1.0: does not run with device cpu (only cuda)"
        in caplog.messages
    )


def test_a_named_backend_is_not_logged_as_a_choice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jackfield"):
        plan = choose(
            socket(),
            attention="plain",
            cache=["grow"],
            compiler="none",
            decoding="plugin:sample",
            quantizer="none",
            scheduler="fifo",
        )
    assert {choice.how for choice in plan.choices.values()} == {"named"}
    assert caplog.messages == []


def test_a_named_backend_is_never_swapped() -> None:
    registry = socket(fake("attention", "half", **declares(dtypes=frozenset({"float16"}))))
    assert why_not(registry, attention="half") == (
        "attn_implementation='half' cannot run TinyForCausalLM here: half (does not run with dtype "
        "float32 (only float16)); use 'plain'"
    )


def test_fallbacks_are_tried_in_their_order(caplog: pytest.LogCaptureFixture) -> None:
    registry = socket(
        fake("attention", "first", available=lambda self: ["no GPU in this machine"]),
        fake("attention", "second", auto_rank=None),
        fake("attention", "third", auto_rank=99),
    )
    with caplog.at_level(logging.INFO, "jackfield"):
        plan = choose(registry, attention=["first", "plugin:outside/second", "third"])
    assert plan["attention"].registered.name == "second"
    assert plan["attention"].how == "fallback"
    assert "fallback chose attention 'second' of outside 1.0" in caplog.messages
    assert "passed over attention 'first' of outside 1.0: no GPU in this machine" in caplog.messages


def test_all_fallbacks_refused_is_one_error_with_every_reason() -> None:
    registry = socket(
        fake("attention", "one", available=lambda self: ["a is missing", "b is missing"]),
        fake("attention", "two", refuse=lambda self, needs, options: ["not this model"]),
    )
    assert why_not(registry, attention=["one", "two"]) == (
        "attn_implementation=['one', 'two'] cannot run TinyForCausalLM here: one (a is missing; "
        "b is missing), two (not this model); use 'plain'"
    )


def test_a_fallback_list_may_end_in_auto() -> None:
    registry = socket(fake("attention", "one", available=lambda self: ["gone"]))
    plan = choose(registry, attention=["one", "auto"])
    assert (plan["attention"].registered.name, plan["attention"].how) == ("plain", "auto")


def test_an_unknown_name_in_a_list_is_not_passed_over() -> None:
    with pytest.raises(SelectionError, match=r"no attention 'plian' .*did you mean 'plain'"):
        choose(socket(), attention=["plain", "plian"])


def test_advice_is_unambiguous() -> None:
    registry = socket(
        fake("attention", "plain", auto_rank=50),
        fake("attention", "gone", available=lambda self: ["x"]),
    )
    assert choose(registry)["attention"].registered.distribution == "outside"
    assert why_not(registry, attention="gone").endswith(
        "use 'plugin:jackfield/plain' or 'plugin:outside/plain'"
    )


@dataclass(frozen=True)
class PageOptions:
    page_size: int = 16


@dataclass(frozen=True)
class HubOptions:
    repo: str


def test_options_reach_the_backend() -> None:
    seen = []
    registry = socket(
        fake(
            "cache",
            "paged",
            options=PageOptions,
            refuse=lambda self, needs, options: seen.append(options) or [],
        )
    )
    plan = choose(registry, cache="paged?page_size=64")
    assert plan["cache"].options == PageOptions(64)
    assert seen == [PageOptions(64)]
    assert plan.to_dict()["chosen"]["cache"] == {
        "name": "paged",
        "distribution": "outside",
        "version": "1.0",
        "options": {"page_size": 64},
        "how": "named",
    }
    with pytest.raises(
        OptionError, match=r"cache 'paged' of outside 1.0 has no option 'pagesize'.*'page_size'"
    ):
        choose(registry, cache="paged?pagesize=64")
    with pytest.raises(OptionError, match="must be of type int"):
        choose(registry, cache=["grow", "paged?page_size=big"])


def test_options_in_slots_are_recorded() -> None:
    @dataclass(frozen=True, slots=True)
    class Slots:
        size: int = 3

    plan = choose(socket(fake("cache", "slim", options=Slots)), cache="slim")
    assert plan.to_dict()["chosen"]["cache"]["options"] == {"size": 3}


def test_the_same_backend_with_two_options_keeps_both_reasons() -> None:
    def refuse(self: Backend, needs: Requirements, options: PageOptions) -> list[str]:
        return [f"cannot do pages of {options.page_size}"]

    registry = socket(fake("cache", "paged", options=PageOptions, refuse=refuse))
    error = why_not(registry, cache=["paged?page_size=1", "paged?page_size=2"])
    assert "pages of 1" in error
    assert "pages of 2" in error


def test_advice_passes_over_a_backend_that_needs_an_option() -> None:
    """What a backend that was not asked for needs must not hide why the asked one is refused."""
    registry = socket(
        fake("attention", "hub", auto_rank=None, options=HubOptions),
        fake("attention", "half", **declares(dtypes=frozenset({"float16"}))),
    )
    assert "half (does not run with dtype float32" in why_not(registry, attention="half")


@pytest.mark.parametrize("reason", ["no CUDA device", "no cache fits with me"])
def test_the_blame_does_not_depend_on_the_words_of_a_reason(reason: str) -> None:
    registry = socket(fake("cache", "paged", available=lambda self: [reason]))
    assert why_not(registry, cache="paged") == (
        f"cache_implementation='paged' cannot run TinyForCausalLM here: paged ({reason}); "
        "use 'grow'"
    )


def test_auto_passes_over_a_cache_whose_layout_no_attention_takes() -> None:
    registry = socket(
        fake("cache", "paged", auto_rank=90, **PACKED),
        fake("attention", "fussy", auto_rank=80, available=lambda self: ["not today"]),
    )
    plan = choose(registry)
    assert chosen(plan) == ("sample", "grow", "plain")
    assert plan.requirements.layout == "padded"
    unpacked = "does not run with layout packed (only padded)"
    assert refused(plan) == {
        "paged": (f"no attention fits with it: fussy (not today; {unpacked}), plain ({unpacked})",),
        "fussy": ("not today",),
    }
    text = str(plan)
    assert "attention: plain (auto), jackfield 1.0" in text
    assert "passed over: attention plain" not in text


def test_auto_takes_that_cache_once_an_attention_does() -> None:
    registry = socket(
        fake("cache", "paged", auto_rank=90, **PACKED),
        fake("attention", "varlen", auto_rank=None, **declares(layouts=frozenset({"packed"}))),
    )
    plan = choose(registry, attention="varlen")
    assert chosen(plan) == ("sample", "paged", "varlen")
    assert plan.requirements.layout == "packed"
    assert choose(registry)["cache"].registered.name == "grow"


def test_two_named_backends_that_do_not_fit() -> None:
    registry = socket(
        fake("cache", "paged", auto_rank=None, **PACKED),
        fake("attention", "varlen", auto_rank=None, **declares(layouts=frozenset({"packed"}))),
    )
    assert why_not(registry, cache="paged", attention="plain") == (
        "attn_implementation='plain' cannot run TinyForCausalLM here with "
        "cache_implementation='paged': plain (does not run with layout packed (only padded)); "
        "use 'varlen'"
    )


def test_a_named_cache_that_no_attention_fits() -> None:
    registry = socket(fake("cache", "paged", **PACKED))
    assert why_not(registry, cache="paged") == (
        "attn_implementation='auto' cannot run TinyForCausalLM here with "
        "cache_implementation='paged': plain (does not run with layout packed (only padded)); "
        "no other attention can either"
    )


def test_caches_refused_for_different_reasons_are_all_named() -> None:
    registry = socket(
        fake("cache", "paged", **PACKED), fake("cache", "slow", available=lambda self: ["closed"])
    )
    assert why_not(registry, cache=["paged", "slow"]) == (
        "cache_implementation=['paged', 'slow'] cannot run TinyForCausalLM here: paged (no "
        "attention fits with it: plain (does not run with layout packed (only padded))), slow "
        "(closed); use 'grow'"
    )


def test_a_strategy_that_takes_tokens_back_needs_a_cache_that_can() -> None:
    drafting = fake("decoding", "drafts", capabilities=DecodingCapabilities(rollback=True))
    registry = socket(drafting)
    reason = "cannot take back tokens (rollback), which the decoding strategy needs"
    assert why_not(registry, decoding="drafts") == (
        "cache_implementation='auto' cannot run TinyForCausalLM here with decoding='drafts': "
        f"grow ({reason}); no other cache can either"
    )
    registry = socket(drafting, fake("cache", "truncate", **REWINDS))
    plan = choose(registry, decoding="drafts")
    assert chosen(plan) == ("drafts", "truncate", "plain")
    assert plan.requirements.rollback is True
    assert refused(plan) == {"grow": (reason,)}


def test_what_is_compiled_asks_the_quantizer_and_the_cache() -> None:
    compiler = fake("compiler", "fuse", auto_rank=None, compiles=True)
    traced = QuantizerCapabilities(compiles=True)
    assert choose(socket(compiler)).requirements.compiled is False
    assert why_not(socket(compiler), compiler="fuse") == (
        "quantization='auto' cannot run TinyForCausalLM here with compile='fuse': none (has layers "
        "that are not known to compile (compiles)); no other quantizer can either"
    )
    plain = fake("quantizer", "plain", capabilities=traced)
    assert why_not(socket(compiler, plain), compiler="fuse") == (
        "cache_implementation='auto' cannot run TinyForCausalLM here with compile='fuse': grow (is "
        "not known to work with steps that are compiled); no other cache can either"
    )
    keeps = fake("cache", "keeps", **holds(compiles=True))
    plan = choose(socket(compiler, plain, keeps), compiler="fuse")
    assert plan.requirements.compiled is True
    assert (plan["quantizer"].registered.name, *chosen(plan)) == (
        "plain", "sample", "keeps", "plain",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"device": "cuda"}, "does not run on cuda (only cpu)"),
        ({"dtype": "float64"}, "does not run with dtype float64"),
        ({"batch_invariant": True}, "is not batch-invariant, which deterministic=True needs"),
        ({"irregular": "a layer is called twice"}, "here a layer is called twice"),
        ({"layer_types": ("linear_attention",)}, "the state of linear-attention layers"),
        ({"features": {"own_mask": "it does"}}, "cannot make the mask that the model makes itself"),
        ({"features": {"position_bias": "alibi"}}, "compile anew for every bias"),
    ],
)
def test_what_a_compiler_refuses(needs: dict[str, Any], reason: str) -> None:
    can = CompilerCapabilities(dtypes=frozenset({"float32"}), devices=frozenset({"cpu"}))
    compiler = fake("compiler", "fuse", auto_rank=None, compiles=True, capabilities=can)
    assert reason in why_not(socket(compiler), replace(NEEDS, **needs), compiler="fuse")


def broken(*args: Any) -> Any:
    raise OSError("driver gone")


def exits(*args: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("member", "value", "reason"),
    [
        ("available", broken, "available raised OSError: driver gone"),
        ("refuse", broken, "refuse raised OSError: driver gone"),
        ("imply", broken, "imply raised OSError: driver gone"),
        ("refuse", exits, "refuse raised SystemExit: 3"),
        ("available", lambda self: None,
         "available must return a list of reasons, got None"),
        ("refuse", lambda self, needs, options: "no GPU",
         "refuse must return a list of reasons, got 'no GPU'"),
        ("refuse", lambda self, needs, options: [OSError("x")],
         "refuse must return a list of reasons, got [OSError('x')]"),
        ("imply", lambda self, needs, options: None,
         "imply must return Requirements, got None"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["attention", "cache", "compiler", "decoding", "quantizer"])
def test_a_backend_whose_check_breaks_is_refused_with_the_error(
    kind: str, member: str, value: Any, reason: str
) -> None:
    def check(self: Any, *args: Any) -> Any:
        return value(self, *args)

    check.__name__ = member
    registry = socket(fake(kind, "bad", auto_rank=99, **{member: check}))
    reason = f"{kind} 'bad' of outside 1.0: {reason}"
    assert refused(choose(registry)) == {"bad": (reason,)}
    assert f"bad ({reason}); use " in why_not(registry, **{kind: "bad"})


def test_what_is_missing_is_told_even_where_the_other_check_breaks() -> None:
    members = {"available": lambda self: ["pip install jackfield[x]"], "refuse": broken}
    error = why_not(socket(fake("attention", "bad", **members)), attention="bad")
    assert "bad (pip install jackfield[x]; attention 'bad' of outside 1.0: refuse raised" in error


def test_nothing_to_choose_from() -> None:
    registry = socket()
    registry.backends["cache"].clear()
    assert why_not(registry) == (
        "cache_implementation='auto' finds no cache backend: no plugin offers one that may be "
        "chosen by itself; the built-in ones come with `pip install jackfield` (see `jackfield "
        "doctor`)"
    )


@pytest.mark.parametrize("answer", ["raises", "high"])
def test_auto_says_that_it_passes_over_a_backend_whose_rank_breaks(
    answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    def rank(self: Backend, requirements: Requirements) -> Any:
        return 1 / 0 if answer == "raises" else answer

    plan = choose(socket(fake("attention", "odd", auto_rank=50, rank=rank)))
    assert chosen(plan) == ("sample", "grow", "plain")
    assert "auto passes over attention 'odd'" in caplog.text
