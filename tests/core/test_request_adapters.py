"""Several adapters in one engine: each request names one or none, and all run in one batch."""

from __future__ import annotations

import copy
import gc
import importlib
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, oracle, prompts
from safetensors.torch import load_file, save_file

import jackfield
from jackfield.bridge.adapters import hushed
from jackfield.errors import CheckpointError, PlanError, SettingsError, UsageError

peft = pytest.importorskip("peft", reason="needs jackfield[peft]")

PROMPTS = prompts((3, 17, 40, 8))
TARGETS: dict[str, list[str]] = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gemma3": ["q_proj", "v_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj"],
    "gpt-oss": ["q_proj", "v_proj"],
}
#: Adapters that differ in rank, factor and layers.
KINDS: dict[str, dict[str, Any]] = {
    "a": {"r": 4},
    "b": {"r": 2, "use_rslora": True},
    "c": {"r": 8, "lora_alpha": 3, "layers_to_transform": [1]},
    "d": {"r": 3, "rank_pattern": {"q_proj": 6}, "alpha_pattern": {"q_proj": 5}},
}


def adapted(family: str, name: str, **more: Any) -> Any:
    """A PeftModel with one of `KINDS`, of random weights, always the same ones."""
    given = {"target_modules": TARGETS.get(family), **KINDS[name], **more}
    if family == "gpt2":
        given.setdefault("fan_in_fan_out", True)
    with torch.random.fork_rng(), hushed():
        torch.manual_seed(ord(name))
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **given)
        return peft.get_peft_model(build(family), config).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: saved("llama", name, tmp_path_factory.mktemp(name)) for name in KINDS}


def saved(family: str, name: str, path: Path, **more: Any) -> Path:
    adapted(family, name, **more).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def right() -> dict[str | None, list[list[int]]]:
    """What each adapter, and none, says behind each prompt, by transformers and PEFT."""
    found: dict[str | None, list[list[int]]] = {None: _oracle(build("llama"))}
    return found | {name: _oracle(adapted("llama", name)) for name in KINDS}


def _oracle(model: Any) -> list[list[int]]:
    return [oracle(model, prompt, 6) for prompt in PROMPTS]


def mixed(engine: jackfield.Engine, names: list[str | None]) -> list[list[list[int]]]:
    """What each of `names` says behind each prompt, all in one call."""
    pairs = [(prompt, {"adapter": name}) for prompt in PROMPTS for name in names]
    found = engine.generate([p for p, _ in pairs], settings=[s for _, s in pairs], max_new_tokens=6)
    tokens = [c.token_ids for c in found]
    return [tokens[at :: len(names)] for at in range(len(names))]


NAMES: list[str | None] = [None, *KINDS]


@pytest.mark.parametrize("cache", ["paged", "dynamic", "static", "paged?page_size=4"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "cpu_decode"])
@pytest.mark.one_in(4)
def test_mixed_batch(
    model: Path, adapters: dict[str, Path], right: Any, attention: str, cache: str
) -> None:
    assert len({str(right[name]) for name in NAMES}) == len(NAMES)
    with jackfield.load(
        model, adapters=adapters, attn_implementation=attention, cache_implementation=cache,
        prefill_chunk_size=None if cache == "static" else 16,
    ) as engine:  # fmt: skip
        assert mixed(engine, NAMES) == [right[name] for name in NAMES]


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen3", "gpt-oss"])
@pytest.mark.one_in(4)
def test_families(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path / "model")
    names = ["a", "b"]
    given = {name: saved(family, name, tmp_path / name) for name in names}
    with jackfield.load(tmp_path / "model", adapters=given) as engine:
        said = mixed(engine, [None, *names])
    assert said == [_oracle(build(family)), *(_oracle(adapted(family, name)) for name in names)]


@pytest.fixture
def engine(model: Path, adapters: dict[str, Path]) -> Iterator[jackfield.Engine]:
    with jackfield.load(model, adapters=adapters, max_batch_size=8) as engine:
        yield engine


def test_reports(engine: jackfield.Engine, adapters: dict[str, Path]) -> None:
    assert {name: each.location for name, each in engine.adapters.items()} == {
        name: str(path) for name, path in adapters.items()
    }
    assert engine.plan.to_dict()["adapters"].keys() == adapters.keys()
    assert "adapter 'b' for requests that name it" in engine.explain()
    with_it, without = engine.generate(
        PROMPTS[:2], settings=[{"adapter": "a"}, {}], max_new_tokens=3
    )
    assert with_it.report.adapter is not None
    assert with_it.report.adapter.to_dict()["location"] == str(adapters["a"])
    assert without.report.adapter is None
    assert engine.report().adapters == {"a": 3, "b": 0, "c": 0, "d": 0}


@pytest.mark.parametrize(
    "more",
    [
        {"decoding": "prompt_lookup"},
        {"decoding": "beam"},
        {"max_batch_size": 2},
        {"cache_implementation": "paged?num_tokens=112&page_size=8"},  # preempts
        {"max_batch_tokens": 7, "max_batch_size": 5},
    ],
    ids=str,
)
def test_other_ways(
    model: Path, adapters: dict[str, Path], right: Any, more: dict[str, Any]
) -> None:
    with jackfield.load(model, adapters=adapters, **more) as engine:
        if more.get("decoding") != "beam":
            assert mixed(engine, NAMES) == [right[name] for name in NAMES]
            return
        together = engine.generate(
            [PROMPTS[1]] * len(NAMES), settings=[{"adapter": n} for n in NAMES], num_beams=3,
            max_new_tokens=6,
        )  # fmt: skip
        for name, one in zip(NAMES, together, strict=True):
            kind = build("llama") if name is None else adapted("llama", name)
            found = kind.generate(
                torch.tensor([PROMPTS[1]]), num_beams=3, max_new_tokens=6, do_sample=False
            )
            assert one.token_ids == found[0, len(PROMPTS[1]) :].tolist()


def test_come_and_go(model: Path, adapters: dict[str, Path], right: Any) -> None:
    """Also beside requests that run, whose layers then stand elsewhere."""
    with jackfield.load(model, adapters={}, max_adapters=2) as engine:
        before = {n: len(m._forward_hooks) for n, m in engine.model.named_modules()}
        long = engine.submit(PROMPTS[0], max_new_tokens=60)
        engine.load_adapter("x", adapters["d"])
        asked = engine.submit(PROMPTS[2], max_new_tokens=40, adapter="x")
        engine.load_adapter("y", adapters["a"])
        with pytest.raises(UsageError, match=r"'z': 2 are held, and max_adapters=2; unload one"):
            engine.load_adapter("z", adapters["b"])
        engine.unload_adapter("x")
        assert [*engine.adapters] == ["y"]
        with pytest.raises(SettingsError, match=r"adapter='x' is not loaded \(loaded: y\)"):
            engine.submit(PROMPTS[0], adapter="x")
        assert asked.result().token_ids[:6] == right["d"][2]
        assert long.result().token_ids[:6] == right[None][0]
        gc.collect()
        engine.load_adapter("x", adapters["b"])  # another one of that name finds none of its pages
        assert (
            engine.generate(PROMPTS[2], adapter="x", max_new_tokens=6)[0].token_ids
            == (right["b"][2])
        )
        assert mixed(engine, ["y", None, "x"]) == [right["a"], right[None], right["b"]]
        engine.unload_adapter("x")
        engine.unload_adapter("y")
        gc.collect()
        assert mixed(engine, [None]) == [right[None]]
        assert {n: len(m._forward_hooks) for n, m in engine.model.named_modules()} == before


def test_storm(model: Path, adapters: dict[str, Path], right: Any) -> None:
    """Threads ask for adapters that others load and unload: each text is its adapter's own."""
    stop, wrong, said = threading.Event(), [], []
    with jackfield.load(model, adapters={"a": adapters["a"]}, max_adapters=8) as engine:

        def churn(name: str) -> None:
            while not stop.is_set():
                engine.load_adapter(name, adapters[name])
                engine.unload_adapter(name)

        def ask(at: int) -> None:
            for turn in range(12):
                name = [None, "a", "b", "c"][(at + turn) % 4]
                try:
                    found = engine.submit(PROMPTS[turn % 4], adapter=name, max_new_tokens=6)
                except SettingsError:
                    continue  # it was unloaded at that moment
                said.append(name)
                if found.result().token_ids != right[name][turn % 4]:
                    wrong.append((name, turn))

        churning = [threading.Thread(target=churn, args=(name,)) for name in "bc"]
        asking = [threading.Thread(target=ask, args=(at,)) for at in range(3)]
        for thread in (*churning, *asking):
            thread.start()
        for thread in asking:
            thread.join()
        stop.set()
        for thread in churning:
            thread.join()
    assert not wrong
    assert {None, "a"} <= set(said)


def test_a_live_model_is_as_it_was(adapters: dict[str, Path], right: Any) -> None:
    live = build("llama")
    with jackfield.load(live, adapters={"a": adapters["a"]}) as engine:
        assert mixed(engine, ["a", None]) == [right["a"], right[None]]
    assert _oracle(live) == right[None]
    assert not any(module._forward_hooks for module in live.modules())
    with pytest.raises(UsageError, match="has an adapter of its own"):
        jackfield.load(_with_own(adapters["b"]), adapters={"a": adapters["a"]})


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", None]], ids=str)
@torch.no_grad()
def test_whoever_else_calls_a_live_model_is_given_it_bare(
    adapters: dict[str, Path], names: list[str | None]
) -> None:
    """Between steps, in another thread while one is computed, and as a copy."""
    live = build("llama")
    ids = torch.tensor([PROMPTS[1]])
    bare, layer = live(ids).logits, live.model.layers[0].self_attn.q_proj
    given = torch.randn(1, 3, 32, dtype=torch.float64)
    alone, meanwhile = layer(given), []

    def step(*_: Any) -> None:
        thread = threading.Thread(target=lambda: meanwhile.append(layer(given)))
        thread.start()
        thread.join()

    with jackfield.load(live, adapters=adapters, cache_implementation="dynamic") as engine:
        with live.model.norm.register_forward_hook(step):
            engine.generate(
                PROMPTS[: len(names)], settings=[{"adapter": n} for n in names], max_new_tokens=3
            )
        assert len(meanwhile) == 3
        assert all(torch.equal(one, alone) for one in meanwhile)
        torch.testing.assert_close(live(ids).logits, bare, rtol=0, atol=1e-4)
        assert torch.equal(copy.deepcopy(live.model.layers[0].self_attn.q_proj)(given), alone)


@pytest.mark.parametrize("ends", ["fails", "closed", "dropped"])
def test_nothing_is_left_of_an_engine(
    adapters: dict[str, Path], ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: Any = build("llama")
    left = weakref.ref(live)
    if ends == "fails":
        monkeypatch.setattr("jackfield.engine.assembly.Loop", _fails)
        with pytest.raises(UsageError, match="too late"):
            jackfield.load(live, adapters=adapters)
    else:
        engine = jackfield.load(live, adapters=adapters)
        engine.generate(PROMPTS[0], adapter="a", max_new_tokens=2)
        if ends == "closed":
            engine.close()
        del engine
    gc.collect()
    assert not any(module._forward_hooks for module in live.modules())
    del live
    gc.collect()
    assert left() is None


def _fails(*_: Any) -> None:
    raise UsageError("too late")


def _with_own(path: Path) -> Any:
    live = build("llama")
    live.load_adapter(str(path))
    return live


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"deterministic": True}, "deterministic does not go with adapters"),
        ({"verify": True}, "verify does not go with adapters"),
        ({"adapter": "x"}, "adapter does not go with adapters"),
        ({"adapters": ["x"]}, "adapters maps names to folders"),
        ({"adapters": {"": "x"}}, "the name of an adapter is a text"),
        ({"adapters": {"x": "/nowhere"}}, "/nowhere is not a folder"),
        ({"max_adapters": 0}, "max_adapters must be a whole number, at least 1"),
        ({"max_adapters": 1}, "max_adapters=1"),
    ],
    ids=str,
)
def test_what_does_not_go_together(
    model: Path, adapters: dict[str, Path], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        jackfield.load(model, **{"adapters": adapters, **more})


def test_compilers_are_refused(model: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(PlanError, match="all requests have the same adapter"):
        jackfield.plan(model, adapters=adapters, compile="native")


def test_requests_without(model: Path, adapters: dict[str, Path]) -> None:
    with jackfield.load(model) as engine:
        with pytest.raises(SettingsError, match=r"load it with adapters=\{'NAME': 'FOLDER'\}"):
            engine.generate(PROMPTS[0], adapter="a")
        with pytest.raises(UsageError, match=r"load it with adapters=\{\}"):
            engine.load_adapter("a", adapters["a"])
        assert engine.adapters == {}
    with jackfield.load(model, adapters=adapters) as engine:
        for name in ("e", "", 3):
            with pytest.raises(SettingsError, match="adapter"):
                engine.generate(PROMPTS[0], adapter=name)
        with pytest.raises(UsageError, match="there is an adapter 'a' already"):
            engine.load_adapter("a", adapters["b"])
        with pytest.raises(UsageError, match="no adapter 'e'"):
            engine.unload_adapter("e")
        with pytest.raises(UsageError, match="adapters of their own"):
            engine.disable_adapter()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_dora": True}, "is DoRA"),
        ({"bias": "all"}, "brings biases"),
        ({"modules_to_save": ["norm"]}, "brings whole modules"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "changes model.embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "changes lm_head"),
    ],
    ids=str,
)
def test_more_than_a_lora(model: Path, tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with hushed():
        adapted("llama", "a", **more).save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(CheckpointError, match=f"{said}.*give it alone, as adapter="):
        jackfield.plan(model, adapters={"a": tmp_path})


def test_numbers_that_are_not_finite(model: Path, tmp_path: Path) -> None:
    """Those of others would be a product with zero: no number."""
    saved("llama", "a", tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    state = load_file(file)
    key = next(key for key in state if "lora_B" in key)
    state[key][0, 0] = torch.inf
    save_file(state, file)
    with pytest.raises(CheckpointError, match="not finite"):
        jackfield.load(model, adapters={"a": tmp_path})


def _other_rank(state: dict[str, Any]) -> dict[str, Any]:
    return {k: (v[:2] if "lora_A" in k else v[:, :2]).contiguous() for k, v in state.items()}


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: {**state, "x.lora_A.weight": torch.ones(4, 32)}, r"no place for x\.lora_A"),
        (_other_rank, r"q_proj.lora_A.weight is \(2, 32\), and has to be \(4, 32\)"),
        (lambda state: dict([*state.items()][1:]), r"lacks .*lora_A.weight"),
    ],
    ids=["surplus", "rank", "lacking"],
)
@pytest.mark.one_in(4)
def test_files_that_do_not_fit(family: str, change: Any, said: str, tmp_path: Path) -> None:
    """Also for a model whose experts transformers fuses, of which PEFT has other names."""
    build(family).save_pretrained(tmp_path / "model")
    file = saved(family, "a", tmp_path / "a", target_modules=["q_proj"])
    file /= "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(CheckpointError, match=said):
        jackfield.plan(tmp_path / "model", adapters={"a": tmp_path / "a"})


def test_keys_without_a_prefix(model: Path, tmp_path: Path, right: Any) -> None:
    file = saved("llama", "a", tmp_path) / "adapter_model.safetensors"
    state = load_file(file)
    save_file({key.removeprefix("base_model.model."): t for key, t in state.items()}, file)
    with jackfield.load(model, adapters={"a": tmp_path}) as engine:
        assert mixed(engine, ["a", None]) == [right["a"], right[None]]


@pytest.mark.parametrize(
    ("field", "kind", "given"),
    [
        ("velora_config", "VeloraConfig", {}),
        ("use_bdlora", "BdLoraConfig", {"target_modules_bd_a": ["q_proj"], "nblocks": 2}),
    ],
)
def test_variants_are_refused(
    model: Path, tmp_path: Path, field: str, kind: str, given: dict[str, Any]
) -> None:
    """Whatever PEFT computes in another way than as two products."""
    if (made := getattr(importlib.import_module("peft.tuners.lora.config"), kind, None)) is None:
        pytest.skip(f"this PEFT has no {kind}")
    saved("llama", "a", tmp_path, target_modules=["q_proj"], **{field: made(**given)})
    with pytest.raises(CheckpointError, match=r"in a way of its own.*give it alone, as adapter="):
        jackfield.plan(model, adapters={"a": tmp_path})


@pytest.mark.parametrize("argument", ["adapter", "adapters"])
def test_what_cuts_the_weights_is_refused(model: Path, tmp_path: Path, argument: str) -> None:
    """It could not be switched off, nor be one of several."""
    config = importlib.import_module("peft.tuners.lora.config")
    if not hasattr(config, "KasaConfig"):
        pytest.skip("this PEFT has no KasaConfig")
    saved("llama", "a", tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"kasa_config": {"beta": 0.1}}))
    with pytest.raises(CheckpointError, match="kasa_config cuts the model's own weights"):
        jackfield.plan(model, **{argument: tmp_path if argument == "adapter" else {"a": tmp_path}})


@pytest.mark.parametrize(
    ("family", "layer"), [("llama4", "router"), ("deepseek-v3", "kv_b_proj")], ids=str
)
def test_layers_of_another_shape_are_refused(family: str, layer: str, tmp_path: Path) -> None:
    """Those that give more than rows, or are called with others; also where the probe ends."""
    build(family).save_pretrained(tmp_path / "model")
    saved(family, "a", tmp_path / "a", target_modules=["q_proj", "q_a_proj", layer])
    with pytest.raises(CheckpointError, match=f"{layer}, which is not called.*give it alone"):
        jackfield.plan(tmp_path / "model", adapters={"a": tmp_path / "a"})


def test_experts_are_refused(tmp_path: Path) -> None:
    """A layer that is not called with all tokens in order cannot tell whose they are."""
    build("gpt-oss").save_pretrained(tmp_path / "model")
    saved("gpt-oss", "a", tmp_path / "a", target_modules=["q_proj"],
          target_parameters=["mlp.experts.gate_up_proj"])  # fmt: skip
    with pytest.raises(CheckpointError, match="give it alone"):
        jackfield.plan(tmp_path / "model", adapters={"a": tmp_path / "a"})


def test_drafts_of_the_models_own_layers_are_those_without_any_adapter(
    model: Path, adapters: dict[str, Path], right: Any
) -> None:
    early = "assisted?assistant_early_exit=1&min_acceptance_rate=0&assistant_confidence_threshold=0"
    with jackfield.load(model, adapters=adapters, decoding=early) as engine:
        assert mixed(engine, NAMES) == [right[name] for name in NAMES]
        assert engine.report().speculation.accepted > 0
