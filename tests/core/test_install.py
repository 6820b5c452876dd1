"""``attn_implementation="plugin:NAME"`` in plain transformers code, and transformers as it was."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import VOCAB, WINDOW, build, oracle, prompts
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    StaticCache,
)
from transformers.masking_utils import AttentionMaskInterface

import jackfield
from jackfield.contracts import AttentionCapabilities, BindContext, BoundAttention
from jackfield.errors import OptionError, PlanError, SelectionError, UsageError
from jackfield.in_transformers import attention as attention_module
from jackfield.in_transformers import cache as cache_module
from jackfield.in_transformers.attention import report
from jackfield.registry.backends import Registered
from jackfield.registry.discovery import registry
from jackfield_plugins.attention.sdpa import SdpaAttention, SdpaOptions, torch_attention

PROMPTS = prompts((3 * WINDOW, WINDOW - 1, WINDOW + 2))
METHODS = ("_check_and_adjust_attn_implementation", "set_attn_implementation")


def internals() -> Any:
    return (
        [vars(PreTrainedModel)[name] for name in METHODS],
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
    )


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    before = internals()
    jackfield.install()
    yield
    jackfield.uninstall()
    assert internals() == before


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for family in ("llama", "mistral", "gemma2", "gpt2", "falcon-alibi", "gpt-oss"):
        found[family] = tmp_path_factory.mktemp(family)
        build(family).save_pretrained(found[family])
    return found


@dataclass(frozen=True)
class Scaled(SdpaOptions):
    factor: float = 1.0


class FlashAttention(SdpaAttention):
    """Ours, under a name that transformers reads as its own."""

    name = "my-flash-sdpa-flex_attention"
    options = Scaled
    capabilities = AttentionCapabilities(
        features=frozenset({"grouped_query", "sliding_window"}), dtypes=frozenset({"float64"})
    )

    def bind(self, context: BindContext) -> BoundAttention:
        inner = super().bind(context)

        def forward(*args: Any, scaling: float, **kwargs: Any) -> Any:
            return inner.forward(*args, scaling=scaling * context.options.factor, **kwargs)

        return BoundAttention(forward, inner.mask)


@pytest.fixture(autouse=True)
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry().backends["attention"]
    mine = Registered(FlashAttention(), "mine", "1", "mine")
    monkeypatch.setitem(registry().backends, "attention", [*known, mine])


def from_folder(folder: Path, name: str | dict[str, str]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=name, dtype=torch.float64, experts_implementation="eager"
    )


@torch.inference_mode()
def left_padded(model: PreTrainedModel) -> list[torch.Tensor]:
    """The logits of each prompt in a left-padded batch, without those of the padding."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    return [row[-len(p) :] for row, p in zip(logits, PROMPTS, strict=True)]


@torch.inference_mode()
def through_a_static_cache(model: PreTrainedModel) -> list[torch.Tensor]:
    """The logits of each prompt, prefilled and then fed token by token into a static cache."""
    found = []
    for prompt in PROMPTS:
        cache = StaticCache(config=model.config, max_cache_len=32)
        ids = torch.tensor([prompt])
        parts = [model(ids[:, :2], past_key_values=cache).logits]
        for at in range(2, len(prompt)):
            positions = torch.tensor([[at]])
            step = model(ids[:, at : at + 1], past_key_values=cache, position_ids=positions)
            parts.append(step.logits)
        found.append(torch.cat(parts, 1)[0])
    return found


@torch.inference_mode()
def plain(family: str) -> list[torch.Tensor]:
    model = build(family)
    return [model(torch.tensor([p])).logits[0] for p in PROMPTS]


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Equal but for the softmax, which the models' own attention takes in float32."""
    return all(torch.allclose(f, e, atol=1e-5) for f, e in zip(found, expected, strict=True))


SERVED = [
    ("llama", "plugin:sdpa"),
    ("llama", "plugin:eager"),
    ("llama", "plugin:jackfield/sdpa"),
    ("llama", "plugin:my-flash-sdpa-flex_attention"),
    ("mistral", "plugin:sdpa"),
    ("mistral", "plugin:mine/my-flash-sdpa-flex_attention?factor=1"),
    ("gpt2", "plugin:sdpa"),
    ("gemma2", "plugin:eager"),
    ("gpt-oss", "plugin:eager"),
]


@pytest.mark.parametrize("way", ["from_pretrained", "set_attn_implementation"])
@pytest.mark.parametrize(("family", "name"), SERVED)
def test_a_plugin_serves_plain_transformers(
    folders: dict[str, Path], family: str, name: str, way: str
) -> None:
    if way == "from_pretrained":
        model = from_folder(folders[family], name)
    else:
        model = build(family)
        model.set_attn_implementation(name)
    assert close(left_padded(model), plain(family))
    seen = report(model)["attention"]
    assert seen.name == name.removeprefix("plugin:").partition("?")[0].rpartition("/")[2]
    assert (seen.prefill, seen.decode) == ({0: 1, 1: 1}, {})
    assert close(through_a_static_cache(model), plain(family))
    steps = sum(len(p) - 2 for p in PROMPTS)
    seen = report(model)["attention"]
    assert (seen.prefill, seen.decode) == ({0: 4, 1: 4}, {0: steps, 1: steps})
    assert oracle(model, PROMPTS[0], 6) == oracle(build(family), PROMPTS[0], 6)


def test_the_comparison_would_see_a_lost_mask() -> None:
    model = build("llama")
    AttentionInterface.register("unmasked", torch_attention().forward)
    try:
        model.set_attn_implementation("unmasked")
        assert not close(left_padded(model), plain("llama"))
    finally:
        del AttentionInterface._global_mapping["unmasked"]


def test_options_reach_the_backend() -> None:
    model = build("llama")
    model.set_attn_implementation("plugin:my-flash-sdpa-flex_attention?factor=0.5")
    assert not close(left_padded(model), plain("llama"))
    with pytest.raises(OptionError, match="factor"):
        model.set_attn_implementation("plugin:my-flash-sdpa-flex_attention?factor=much")


REFUSED = [
    ("gemma2", "plugin:sdpa", "softcap"),
    ("gpt-oss", "plugin:sdpa", "sinks"),
    ("falcon-alibi", "plugin:sdpa", "own_attention"),
]


@pytest.mark.parametrize(("family", "name", "feature"), REFUSED)
def test_a_plugin_that_cannot_is_refused_before_weights_load(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, family: str, name: str, feature: str
) -> None:
    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", opened)
    with pytest.raises(PlanError, match=f"does not support {feature}"):
        from_folder(folders[family], name)
    with pytest.raises(AssertionError):
        from_folder(folders[family], "eager")


@pytest.mark.parametrize(("family", "name", "feature"), REFUSED)
def test_a_refusal_leaves_a_live_model_as_it_was(family: str, name: str, feature: str) -> None:
    model = build(family)
    own = model.config._attn_implementation
    before = internals()
    with pytest.raises(PlanError, match=f"does not support {feature}"):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == own
    assert internals() == before


def test_the_dtype_in_which_a_model_is_loaded_counts(folders: dict[str, Path]) -> None:
    name = "plugin:my-flash-sdpa-flex_attention"
    with pytest.raises(PlanError, match="float32"):
        AutoModelForCausalLM.from_pretrained(
            folders["llama"], attn_implementation=name, dtype=torch.float32
        )
    assert from_folder(folders["llama"], name)


def test_names_nobody_has(folders: dict[str, Path]) -> None:
    with pytest.raises(SelectionError, match="did you mean 'sdpa'"):
        build("llama").set_attn_implementation("plugin:spda")
    with pytest.raises(SelectionError, match="did you mean 'sdpa'"):
        from_folder(folders["llama"], "plugin:spda")


def test_two_models_are_counted_apart(folders: dict[str, Path]) -> None:
    one, other = (from_folder(folders["llama"], "plugin:sdpa") for _ in range(2))
    one(torch.tensor([[1, 2]]))
    assert report(one)["attention"].calls == 2
    assert report(other)["attention"].calls == 0
    assert report(one)["attention"].distribution == "jackfield"


def test_every_other_name_goes_the_way_it_went(folders: dict[str, Path]) -> None:
    model = from_folder(folders["llama"], "sdpa")
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="nonsense"):
        model.set_attn_implementation("nonsense")
    with pytest.raises(UsageError, match="does not run an attention plugin"):
        report(model)


def test_a_model_may_change_its_plugin_and_leave_it() -> None:
    model = build("llama")
    expected = oracle(model, PROMPTS[0], 5)
    for name in ("plugin:sdpa", "plugin:eager", "plugin:sdpa", "sdpa", "plugin:sdpa", "eager"):
        model.set_attn_implementation(name)
        assert oracle(model, PROMPTS[0], 5) == expected


def test_what_is_saved_names_no_plugin(folders: dict[str, Path], tmp_path: Path) -> None:
    model = from_folder(folders["llama"], "plugin:sdpa")
    model.save_pretrained(tmp_path)
    assert "jackfield" not in (tmp_path / "config.json").read_text()
    jackfield.uninstall()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == VOCAB


def test_install_and_uninstall_twice() -> None:
    during = internals()
    jackfield.install()
    assert internals() == during
    jackfield.uninstall()
    after = internals()
    jackfield.uninstall()
    assert internals() == after
    with pytest.raises(ValueError, match="plugin:sdpa"):
        build("llama").set_attn_implementation("plugin:sdpa")


def test_a_model_whose_plugin_is_gone_fails_by_name() -> None:
    model = build("llama")
    model.set_attn_implementation("plugin:sdpa")
    expected = oracle(model, PROMPTS[0], 3)
    jackfield.uninstall()
    gone = r"^this model runs attn_implementation='plugin:sdpa', which jackfield.uninstall\(\) took"
    for run in (lambda: model(torch.tensor([[1, 2]])), lambda: oracle(model, PROMPTS[0], 2)):
        with pytest.raises(UsageError, match=gone):
            run()
    with jackfield.load(model, attn_implementation="eager") as engine:
        assert engine.generate(PROMPTS[0], max_new_tokens=3)[0].token_ids == expected
    with pytest.raises(UsageError, match=gone):
        copy.deepcopy(model)(torch.tensor([[1, 2]]))
    jackfield.install()
    for name in ("plugin:sdpa", "eager"):
        model.set_attn_implementation(name)
        assert oracle(model, PROMPTS[0], 3) == expected
    assert not model._forward_pre_hooks


def test_an_engine_gives_a_plugin_back_too() -> None:
    model = build("llama")
    model.set_attn_implementation("plugin:sdpa")
    with jackfield.load(model, attn_implementation="eager") as engine:
        engine.generate(PROMPTS[0], max_new_tokens=2)
        assert engine.report()["attention"].name == "eager"
    assert report(model)["attention"].calls == 0
    model(torch.tensor([[1, 2]]))
    assert report(model)["attention"].calls == 2


def test_choosing_again_and_again_adds_no_keys() -> None:
    model = build("llama")
    model.set_attn_implementation("plugin:sdpa")
    once = len(AttentionInterface._global_mapping)
    for name in ("plugin:sdpa", "eager", "plugin:sdpa", "plugin:sdpa?kernel=math", "plugin:sdpa"):
        model.set_attn_implementation(name)
    assert len(AttentionInterface._global_mapping) == once + 1  # for the other kernel


def test_keys_go_with_the_model() -> None:
    gc.collect()  # models of other tests, with keys of theirs
    before = internals()
    model = build("llama")
    model.set_attn_implementation("plugin:sdpa")
    assert internals() != before
    del model
    gc.collect()
    assert internals() == before


def test_parts_of_a_live_model_are_not_selected_one_by_one() -> None:
    with pytest.raises(UsageError, match=r"select one for all of it, .*'plugin:sdpa'"):
        build("llama").set_attn_implementation({"": "plugin:sdpa"})


def test_a_part_is_selected_while_a_model_loads(tmp_path: Path) -> None:
    text = {**build("gemma3").config.to_diff_dict(), "num_hidden_layers": 2}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).double().save_pretrained(tmp_path)
    model = from_folder(tmp_path, {"text_config": "plugin:sdpa"})
    model(torch.tensor([[1, 2]]))
    assert report(model)["attention"].calls == 2
    for name in ("plugin:sdpa", {"": "plugin:sdpa"}):
        with pytest.raises(UsageError, match=r"give {'text_config': 'plugin:sdpa'}"):
            from_folder(tmp_path, name)


FALLBACKS = [
    ("gpt-oss", ["plugin:sdpa", "plugin:eager"], "eager"),  # which has sinks
    ("llama", ["plugin:sdpa", "plugin:eager"], "sdpa"),
    ("llama", ("plugin:flash_attention_3", "plugin:sdpa?kernel=math"), "sdpa"),
]


@pytest.mark.parametrize("way", ["from_pretrained", "set_attn_implementation"])
@pytest.mark.parametrize(("family", "names", "wanted"), FALLBACKS)
def test_the_first_of_a_list_that_can_serve_is_taken(
    folders: dict[str, Path], family: str, names: Any, wanted: str, way: str
) -> None:
    if way == "from_pretrained":
        model = from_folder(folders[family], names)
    else:
        model = build(family)
        model.set_attn_implementation(names)
    model(torch.tensor([[1, 2]]))
    assert jackfield.report(model)["attention"].name == wanted
    assert jackfield.report(model)["attention"].calls == model.config.num_hidden_layers


def test_a_list_ends_with_transformers_own_names(folders: dict[str, Path]) -> None:
    model = from_folder(folders["gpt-oss"], ["plugin:sdpa", "eager"])
    assert model.config._attn_implementation == "eager"
    model = build("gpt-oss")
    model.set_attn_implementation(["plugin:sdpa", "eager"])
    assert model.config._attn_implementation == "eager"
    with pytest.raises(UsageError, match="does not run an attention plugin"):
        jackfield.report(model)


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["plugin:sdpa", "plugin:nope"], SelectionError, "no attention 'nope'"),
        (["plugin:sdpa", "sdpa"], PlanError, "none of .*sinks.*'sdpa'"),
        ([], UsageError, "an empty list"),
        ([3], UsageError, "3 is no name"),
    ],
)
def test_a_list_of_which_nothing_can_serve(
    folders: dict[str, Path], names: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        from_folder(folders["gpt-oss"], names)
    with pytest.raises(error, match=words):
        build("gpt-oss").set_attn_implementation(names)


@pytest.mark.parametrize("name", ["plugin:sdpa", "plugin:eager", ["plugin:sdpa", "plugin:eager"]])
@pytest.mark.parametrize("family", ["T5", "Bart"])
def test_an_encoder_decoder_is_refused_before_weights(
    family: str, name: Any, tmp_path: Path
) -> None:
    sizes = {"d_model": 16, "vocab_size": VOCAB, "decoder_start_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**sizes)
    cls = getattr(transformers, f"{family}ForConditionalGeneration")
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(PlanError, match="is an encoder-decoder model"):
        cls.from_pretrained(tmp_path, attn_implementation=name, dtype=torch.float32)
    with torch.device("meta"):
        model = cls(config)
    with pytest.raises(PlanError, match="is an encoder-decoder model"):
        model.set_attn_implementation(name)


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:1", "cuda"])
def test_what_is_plugged_into_plain_transformers_knows_its_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its number: tables of pages and kernels go there, not to the current one."""
    model, asked = build("llama"), []

    def noted(_: Any, needs: Any, __: Any) -> list[str]:
        asked.append((needs.device, needs.device_index))
        return ["of what it was asked"]

    for module, use in (
        (attention_module, lambda: model.set_attn_implementation("plugin:sdpa")),
        (cache_module, lambda: jackfield.cache("plugin:dynamic", model)),
    ):
        monkeypatch.setattr(module, "input_device", lambda _: torch.device(device))
        monkeypatch.setattr(module, "reasons_against", noted)
        with pytest.raises(PlanError, match="of what it was asked"):
            use()
    place = torch.device(device)
    assert asked == [(place.type, place.index)] * 2
