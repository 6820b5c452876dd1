"""`hub` runs kernels from local folders: equal to eager, or refused in one line before weights."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from families import WINDOW, build, config_of, prompts, references
from huggingface_hub import constants

import jackfield
from jackfield.errors import OptionError, PlanError
from jackfield_plugins.attention import varlen_probe
from jackfield_plugins.hub_kernels import lock

pytestmark = pytest.mark.usefixtures("local_kernels")

FLASH = "plugin:hub?repo=me/flash&revision=v1"
MADE = "plugin:hub?repo=me/kernel&revision=v1"
LENGTHS = (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
COUNT = 2 * WINDOW + 2
FAMILIES = ("llama", "llama-mqa", "mistral", "gemma2", "gemma3", "qwen3")
CACHES = ("dynamic", "paged?page_size=3", "paged?page_size=256")
HEAD = (
    "def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,"
    " softmax_scale, causal):\n"
)
SOURCE = (Path(__file__).parent / "kernels/flash.py").read_text()

model_of = functools.cache(build)


def loaded(folder: Path) -> ModuleType:
    """The kernel module that this process loaded from `folder`."""
    found = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None))
    (module,) = (m for m in found if m.__file__.startswith(str(folder)))
    return module


def refusal(attention: str, family: str = "llama", **more: str) -> str:
    """The one line that a plan and loading say. Nothing but a plan of a config: no weights."""
    with pytest.raises(PlanError) as caught:
        jackfield.plan(config_of(family), attn_implementation=attention, **more)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"attn_implementation={attention!r} cannot run ")
    return message


@pytest.mark.parametrize(("family", "cache"), list(itertools.product(FAMILIES, CACHES)))
@pytest.mark.one_in(4)
def test_ragged_batch_equals_eager_in_float64(family: str, cache: str, flash_folder: Path) -> None:
    with jackfield.load(
        model_of(family), attn_implementation=FLASH, cache_implementation=cache
    ) as engine:
        loaded(flash_folder).calls.clear()
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        seen = engine.report()["attention"]
    assert [c.token_ids for c in found] == references(family, LENGTHS, COUNT)
    calls = loaded(flash_folder).calls
    assert len(calls) == seen.calls > 0
    assert {call["paged"] for call in calls} == {cache.endswith("256")}
    windows = {call["window"] for call in calls}
    assert (WINDOW - 1, 0) in windows or family not in ("mistral", "gemma2", "gemma3")
    assert {call["softcap"] for call in calls} == {5.0 if family == "gemma2" else 0.0}


@pytest.mark.parametrize(
    ("family", "cache"), list(itertools.product(("llama", "mistral", "gemma2"), CACHES))
)
@pytest.mark.one_in(4)
def test_single_and_ragged_equal_eager_in_float32(family: str, cache: str) -> None:
    model = build(family, torch.float32)
    batches = [prompts(LENGTHS), prompts(LENGTHS)[:1], prompts(LENGTHS)[-1:]]
    with jackfield.load(model, attn_implementation="eager") as engine:
        expected = [
            [c.token_ids for c in engine.generate(b, max_new_tokens=COUNT)] for b in batches
        ]
    with jackfield.load(model, attn_implementation=FLASH, cache_implementation=cache) as engine:
        found = [[c.token_ids for c in engine.generate(b, max_new_tokens=COUNT)] for b in batches]
    assert found == expected


def tried(folder: Path, *features: str) -> str:
    """What the process that tries a kernel answers, without the process."""
    request = {
        "folder": str(folder / "build/torch-cpu"), "function": None, "device": "cpu",
        "dtype": "float64", "head_dims": [8], "group": 2, "features": features,
    }  # fmt: skip
    return str(varlen_probe.examine(request)["refused"])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padding_in_plain_transformers(family: str, cache: str) -> None:
    ids = prompts(LENGTHS)
    width = max(LENGTHS)
    rows = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    model = build(family)
    jackfield.install()
    try:
        model.set_attn_implementation(FLASH)
        output = model.generate(
            rows,
            attention_mask=mask,
            max_new_tokens=COUNT,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
        )
        places = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(rows, attention_mask=mask, position_ids=places).logits
    finally:
        jackfield.uninstall()
    assert output[:, width:].tolist() == references(family, LENGTHS, COUNT)
    for row, seen in zip(ids, logits, strict=True):
        alone = model_of(family)(torch.tensor([row])).logits[0]
        torch.testing.assert_close(
            seen[-len(row) :], alone, rtol=0, atol=1e-5
        )  # softmax in float32


def test_the_report_says_which_bytes_ran(flash_folder: Path) -> None:
    content = lock.digest(flash_folder / "build/torch-cpu")
    with jackfield.load(model_of("llama"), attn_implementation=FLASH) as engine:
        (done,) = engine.generate([prompts(LENGTHS)[0]], max_new_tokens=2)
        source = f"me/flash@v1 (torch-cpu, {content[:19]})"
        assert engine.report()["attention"].source == source
        assert done.report.to_dict()["attention"]["source"] == source
        assert source in str(engine.report())
        assert source in engine.explain()


def test_sinks_go_to_a_kernel_that_has_a_parameter_for_them(kernel) -> None:
    source = SOURCE.replace(
        "block_table=None,\n)", "block_table=None,\n    s_aux=None,\n)"
    ).replace("window_size, softcap\n        )", "window_size, softcap, s_aux\n        )")
    source = source.replace(
        "def attend(query, keys, values, scale, causal, window_size, softcap):",
        "def attend(query, keys, values, scale, causal, window_size, softcap, sinks):",
    ).replace(
        'float("-inf")).softmax(-1)',
        'float("-inf"))\n    if sinks is not None:\n'
        "        sinks = sinks[:, None, None].expand(-1, len(query), 1)\n"
        "        weights = torch.cat([weights, sinks], -1)\n"
        "    weights = weights.softmax(-1)[..., : len(keys)]",
    )
    kernel(source)
    for cache in ("dynamic", "paged"):
        with jackfield.load(
            model_of("gpt-oss"), attn_implementation=MADE, cache_implementation=cache
        ) as engine:
            found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        assert [c.token_ids for c in found] == references("gpt-oss", LENGTHS, COUNT)


# What is refused, before weights are looked for.


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        ("hub", "needs the option 'repo'"),
        ("hub?repo=me/flash", "needs the option 'revision'"),
        ("hub?revision=v1", "needs the option 'repo'"),
        ("hub?repo=flash&revision=v1", "repo must be 'organisation/name', not 'flash'"),
        ("hub?repo=../flash&revision=v1", "repo must be 'organisation/name'"),
        ("hub?repo=me/flash&revision=v1&name=f", "no option 'name'"),
    ],
)
def test_options(selection: str, says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        jackfield.plan(config_of("llama"), attn_implementation=selection)


def test_an_untrusted_publisher(monkeypatch: pytest.MonkeyPatch, lock_file: Path) -> None:
    monkeypatch.setenv("JACKFIELD_TRUSTED_PUBLISHERS", "mee,other")
    message = refusal(FLASH)
    assert "its publisher 'me' is not trusted" in message
    assert "set JACKFIELD_TRUSTED_PUBLISHERS=me" in message
    assert not lock_file.exists()


@pytest.mark.parametrize("offline", [True, False])
def test_no_network(offline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    message = refusal(FLASH)
    why = "HF_HUB_OFFLINE is set" if offline else "https://hub.invalid cannot be reached"
    assert f"me/flash@v1 is not in the cache and {why}" in message
    assert "LOCAL_KERNELS=me/flash=<folder>" in message


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "kernels" else find(name, *a)
    )
    assert "pip install jackfield[kernels]" in refusal(FLASH)


def test_a_device_without_a_build(kernel) -> None:
    kernel(SOURCE, variant="torch-cuda")
    assert "me/kernel@v1 has no build for cpu on this machine (its builds: torch-cuda)" in refusal(
        MADE
    )


def test_a_local_folder_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"me/flash={tmp_path}")
    assert f"LOCAL_KERNELS names {tmp_path}, which has no folder 'build'" in refusal(FLASH)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise SystemExit(1)", "it does not load (SystemExit: 1)"),
        ("import os\nos._exit(1)", "it ended its process with exit code 1 when it was tried"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "it crashed its process (sig"),
        ("raise ImportError('built for another torch')", "built for another torch"),
    ],
    ids=["SystemExit", "exit", "segfault", "ImportError"],
)
def test_a_kernel_that_ends_its_process(source: str, says: str, kernel, lock_file: Path) -> None:
    kernel(source)
    assert says in refusal(MADE)
    assert not lock_file.exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nonsense_that_is_missing", "No module named 'nonsense_that_is_missing'"),
        ("def other(): ...", "no function 'flash_attn_varlen_func' or 'flash_attention_varlen'"),
        ("def flash_attn_varlen_func(q, k): ...", "its parameters (q, k) are neither those of"),
        (f"{HEAD}    raise RuntimeError('no such architecture')",
         "with head size 8, float64 on cpu it raises RuntimeError: no such architecture"),
        (f"{HEAD}    return q", "it is wrong by "),
        (f"{HEAD}    pass", "it returns NoneType for a query of"),
    ],
    ids=["missing", "function", "parameters", "raises", "wrong", "returns"],
)  # fmt: skip
def test_a_kernel_that_fails_when_it_is_tried(source: str, says: str, kernel) -> None:
    assert says in tried(kernel(source))


@pytest.mark.parametrize(
    ("feature", "needle", "lie"),
    [
        ("sliding_window", "if left >= 0:", "if False:"),
        ("sliding_window", "place - left", "place - left - 1"),
        ("softcap", "if softcap > 0:", "if False:"),
        ("grouped_query", "repeat_interleave(groups, 1)", "repeat(1, groups, 1)"),
        ("grouped_query", "if causal:", "if False:"),
        ("grouped_query", "+ len(keys) - len(query)", ""),
    ],
    ids=["window", "window-by-one", "softcap", "groups", "causal", "alignment"],
)
def test_a_kernel_that_lies(feature: str, needle: str, lie: str, kernel) -> None:
    assert needle in SOURCE
    assert "it is wrong by " in tried(kernel(SOURCE.replace(needle, lie)), feature)


def test_a_kernel_that_takes_no_tokens_behind_the_last_sequence(kernel) -> None:
    """As padded batches have them, whose lengths nobody waits for."""
    asserted = SOURCE.replace("q.shape[0] >= cu_seqlens_q[-1]", "q.shape[0] == cu_seqlens_q[-1]")
    assert asserted != SOURCE
    said = tried(kernel(asserted))
    assert "with tokens behind the last sequence it raises AssertionError" in said


def test_a_lie_is_a_refusal_before_weights(kernel) -> None:
    kernel(SOURCE.replace("if left >= 0:", "if False:"))
    message = refusal(MADE, "mistral")
    assert re.search(r"float32 on cpu it is wrong by [\d.]+ with window\)", message)


def test_a_kernel_that_is_wrong_on_pages_gets_none(kernel) -> None:
    folder = kernel(SOURCE.replace("pages = block_table[row]", "pages = block_table[0]"))
    with jackfield.load(
        model_of("llama"), attn_implementation=MADE, cache_implementation="paged?page_size=256"
    ) as engine:
        found = engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
    assert [c.token_ids for c in found] == references("llama", LENGTHS, COUNT)
    assert {call["paged"] for call in loaded(folder).calls} == {False}


@pytest.mark.parametrize(
    ("family", "needle", "says"),
    [
        ("mistral", "window_size=(-1, -1),", "it has no parameter for sliding_window"),
        ("gemma2", "softcap=0.0,", "it has no parameter for softcap"),
        ("gpt-oss", "", "it has no parameter for sinks"),
        ("falcon-alibi", "", "does not support position_bias"),
    ],
)
def test_a_feature_that_the_kernel_has_no_parameter_for(
    family: str, needle: str, says: str, kernel
) -> None:
    kernel(SOURCE.replace(f"    {needle}\n", "", 1) if needle else SOURCE)
    assert says in refusal(MADE, family)


def test_an_unknown_function() -> None:
    message = refusal(f"{FLASH}&function=flash_attn")
    assert "it has no function 'flash_attn' (it has: flash_attn_varlen_func, attend)" in message


@pytest.mark.parametrize(
    ("dtype", "family", "says"),
    [
        ("float64", "llama", "float64 on cpu it raises RuntimeError: Unsupported dtype"),
        ("float32", "llama", "with head size 8, float32 on cpu it raises RuntimeError: Head dim"),
    ],
)
def test_a_dtype_or_head_size_the_kernel_cannot_take(dtype: str, family: str, says: str) -> None:
    assert says in refusal("plugin:hub?repo=me/metal&revision=v1", family, dtype=dtype)


def test_a_kernel_that_needs_others(kernel) -> None:
    kernel(SOURCE, **{"kernel-depends": [{"repo-id": "else/where", "version": 1}]})
    message = refusal(MADE)
    assert "needs other kernels (else/where)" in message or "metadata.json" in message
