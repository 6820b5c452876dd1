"""`flash_attention_2` and `_3`: where they run, whose kernel they take, the real ones on CUDA."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, Gpu
from families import WINDOW, build, config_of, prompts
from torch.nn.attention import varlen

import jackfield
from jackfield.contracts import Attention, Requirements
from jackfield.errors import OptionError, PlanError
from jackfield_plugins.attention.flash_attention_2 import FlashAttention2, FlashAttention2Options
from jackfield_plugins.attention.flash_attention_3 import FlashAttention3, FlashAttention3Options
from jackfield_plugins.attention.sources import TorchVarlen, VarlenAttention
from jackfield_plugins.attention.triton import TritonAttention
from jackfield_plugins.attention.varlen import Rows, Scoring
from jackfield_plugins.attention.varlen_probe import reference, trial
from jackfield_plugins.quantizer.torchao import INT4, _Format, _too_old

pytestmark = pytest.mark.usefixtures("local_kernels")

FLASH = Path(__file__).parent / "kernels/flash.py"
LENGTHS = (WINDOW - 2, WINDOW, 3 * WINDOW)
COUNT = 10
OFFLINE = "me/nothing-here="

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ON_CUDA = Requirements(
    architecture="TinyForCausalLM",
    dtype="bfloat16",
    device="cuda",
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dims=(64,),
    layer_types=("full_attention",),
    windows=(None,),
)


def packages(site: Path, module: str, distribution: str, source: str) -> None:
    """An installed distribution of one module."""
    site.mkdir(exist_ok=True)
    (site / f"{module}.py").write_text(source)
    info = site / f"{distribution.replace('-', '_')}-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.8.3\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("flash_attn", "flash_attn_interface"):
        sys.modules.pop(name, None)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backends run where there is no GPU, for kernels that need none."""
    for cls in (FlashAttention2, FlashAttention3):
        able = dataclasses.replace(
            cls.capabilities,
            devices=frozenset({"cpu"}),
            dtypes=frozenset({"float32", "float64"}),
        )
        monkeypatch.setattr(cls, "capabilities", able)
        monkeypatch.setattr(cls, "available", lambda self: [])


def same_as_eager(model: Any, attention: str, cache: str = "dynamic") -> str | None:
    """Assert equal tokens; returns whose kernel it was."""
    with jackfield.load(model, attn_implementation="eager") as engine:
        expected = [c.token_ids for c in engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)]
    with jackfield.load(model, attn_implementation=attention, cache_implementation=cache) as engine:
        found = [c.token_ids for c in engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)]
        seen = engine.report()["attention"]
    assert found == expected
    assert seen.calls == COUNT * model.config.num_hidden_layers
    return seen.source


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_refused_by_name_on_a_cpu(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        jackfield.plan(config_of("llama"), attn_implementation=f"plugin:{name}")
    message = str(caught.value)
    assert "\n" not in message
    assert f"{name} (needs a CUDA GPU; none is here; " in message
    assert "does not run with dtype float32 (only bfloat16, float16)" in message
    assert "does not run with device cpu (only cuda)" in message
    assert "'sdpa'" in message


@pytest.mark.parametrize("backend", [FlashAttention2(), FlashAttention3()])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_dims": (264,)}, "has no kernel for head size 264"),
        ({"head_dims": (20,)}, "has no kernel for head size 20"),
        ({"dtype": "float32"}, "does not run with dtype float32"),
        ({"dtype": "float64"}, "does not run with dtype float64"),
        ({"device": "mps"}, "does not run with device mps (only cuda)"),
        ({"features": {"sinks": "every head has a sink"}}, "does not support sinks"),
        ({"features": {"position_bias": "alibi"}}, "does not support position_bias"),
        ({"features": {"chunked": "chunks"}}, "does not support chunked"),
        ({"features": {"mixed_head_sizes": "MLA"}}, "does not support mixed_head_sizes"),
        ({"model_declines": frozenset({"flash"})}, "declares that it must not run with flash"),
    ],
)
def test_what_they_cannot_do(backend: Attention, changes: dict[str, Any], says: str) -> None:
    reasons = backend.refuse(dataclasses.replace(ON_CUDA, **changes), backend.options())
    assert says in "; ".join(reasons)


@pytest.mark.parametrize(
    ("capability", "two", "three"),
    [((7, 5), False, False), ((8, 6), True, False), ((9, 0), True, True), ((10, 0), True, False)],
)
def test_gpus_they_run_on(
    capability: tuple[int, int], two: bool, three: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda([Gpu(capability=capability)]).install(monkeypatch)
    for backend, able in ((FlashAttention2(), two), (FlashAttention3(), three)):
        reasons = backend.available()
        assert (reasons == []) == able
        assert able or "{}.{}".format(*capability) in reasons[0]


def test_the_gpu_of_the_model_is_asked_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the current one, for each backend that needs a certain GPU."""
    FakeCuda([Gpu(capability=(7, 5)), Gpu(capability=(9, 0))]).install(monkeypatch)
    monkeypatch.setattr(VarlenAttention, "refuse", lambda *_: [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    triton, torchao = TritonAttention(), "int4 on cuda needs tensor cores"
    for changes, able in (
        ({"device_index": 0}, False),
        ({"device_index": None}, False),  # the current one
        ({"device_index": 1}, True),
        ({"execution_devices": ("cuda:1", "cuda:0")}, False),
        ({"execution_devices": ("cuda:1", "cpu")}, True),
        ({"device_index": 0, "elsewhere": True}, True),
    ):
        needs = dataclasses.replace(ON_CUDA, layout="packed", **changes)
        for backend in (FlashAttention2(), FlashAttention3(), triton):
            said = "; ".join(backend.refuse(needs, backend.options()))
            assert ("7.5" in said) == (not able), (backend.name, changes, said)
        said = "; ".join(_too_old(needs, _Format(INT4, 128)))
        assert (torchao in said) == (not able), (changes, said)
    assert FlashAttention2().available() == FlashAttention3().available() == []


def test_the_package_comes_first(here: None, site: Path, tiny, monkeypatch, flash_folder) -> None:
    packages(site, "flash_attn", "flash-attn", FLASH.read_text())
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/flash-attn2={flash_folder}")
    for family in ("mistral", "gemma2"):
        for cache in ("dynamic", "paged?page_size=4", "paged?page_size=256"):
            assert same_as_eager(tiny(family), "flash_attention_2", cache) == "flash-attn 2.8.3"


def test_then_the_kernel_of_the_hub(
    here: None, tiny, monkeypatch: pytest.MonkeyPatch, flash_folder: Path
) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/flash-attn2={flash_folder}")
    monkeypatch.setenv("JACKFIELD_TRUSTED_PUBLISHERS", "")
    source = same_as_eager(tiny("gemma2"), "flash_attention_2", "paged")
    assert source is not None
    assert source.startswith("kernels-community/flash-attn2@v4 (torch-cpu, sha256:")


class LikeTorch:
    """torch's varlen_attn in plain arithmetic, with the signature of one of its versions.

    `split` has, for each call with one query a sequence, whether torch's kernel would have split
    the keys: only without a window on either side (mha_varlen_fwd in flash_api.cpp).
    """

    def __init__(self) -> None:
        self.split: list[bool] = []

    def attend(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None,
        window_size=(-1, -1), enable_gqa=None, seqused_k=None, block_table=None,
    ):  # fmt: skip
        left, right = window_size
        sequences = len(cu_seq_q) - 1
        if max_q == 1:
            assert len(query) == sequences, "the kernel lays a query of each sequence in a row"
            self.split.append(window_size == (-1, -1))
        if block_table is not None:
            assert seqused_k.dtype == torch.int32
            assert key.shape[1] % 256 == 0
            lengths = seqused_k.tolist()
            key, value = (
                torch.cat(
                    [t[block_table[i].long()].flatten(0, 1)[:n] for i, n in enumerate(lengths)]
                )
                for t in (key, value)
            )
        if enable_gqa is not None:
            assert enable_gqa == (query.shape[1] != key.shape[1])
        scoring = Scoring(scale, right == 0, None if left < 0 else left + 1)
        rows = Rows(cu_seq_q, cu_seq_k, max_q, max_k)
        return reference(query, key, value, rows, scoring).to(query.dtype)

    def of_2_13(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
        window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        return self.attend(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale,
            window_size=window_size, enable_gqa=enable_gqa, seqused_k=seqused_k,
            block_table=block_table,
        )  # fmt: skip

    def of_2_11(
        self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
        window_size=(-1, -1), seqused_k=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        return self.attend(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale,
            window_size=window_size, seqused_k=seqused_k, block_table=block_table,
        )  # fmt: skip


VERSIONS = ("of_2_13", "of_2_11")


@pytest.fixture(params=VERSIONS)
def like_torch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LikeTorch:
    made = LikeTorch()
    monkeypatch.setattr(varlen, "varlen_attn", getattr(made, request.param))
    return made


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "paged?page_size=4", "paged"])
def test_then_torchs_own(here: None, tiny, like_torch: LikeTorch, cache: str, family: str) -> None:
    """Grouped heads also where the signature says nothing of them."""
    source = same_as_eager(tiny(family), "flash_attention_2", cache)
    assert source == f"torch.nn.attention.varlen of torch {torch.__version__}"
    # Whole pages hold more than a window; a padded layer, and what is gathered, just the window.
    window_needed = family == "mistral" and cache == "paged"
    assert (False in like_torch.split) == window_needed


@pytest.mark.parametrize("cache", ["dynamic", "paged"])
def test_a_window_that_nobody_has_filled_does_not_turn_off_the_split(
    here: None, tiny, like_torch: LikeTorch, cache: str
) -> None:
    with jackfield.load(
        tiny("mistral"), attn_implementation="flash_attention_2", cache_implementation=cache
    ) as engine:
        engine.generate(prompts((2,)), max_new_tokens=WINDOW - 1)
    assert set(like_torch.split) == {True}


def test_a_row_that_waits_for_its_chunk_is_not_part_of_the_step(
    here: None, tiny, like_torch: LikeTorch
) -> None:
    """Chunks of one token: a step of single queries, and the shorter rows have none yet."""
    expected = {}
    for name in ("eager", "flash_attention_2"):
        with jackfield.load(
            tiny("llama"), attn_implementation=name, cache_implementation="dynamic",
            prefill_chunk_size=1,
        ) as engine:  # fmt: skip
            done = engine.generate(prompts((3, 7)), max_new_tokens=4)
            expected[name] = [c.token_ids for c in done]
    assert expected["eager"] == expected["flash_attention_2"]


def test_every_source_says_why_not(here: None) -> None:
    with pytest.raises(PlanError) as caught:
        jackfield.plan(config_of("gemma2"), attn_implementation="flash_attention_2")
    message = str(caught.value)
    assert "the package flash-attn: is not installed" in message
    assert "the kernel kernels-community/flash-attn2@v4: " in message
    assert "HF_HUB_OFFLINE is set" in message
    assert "torch.nn.attention.varlen: has no parameter for softcap" in message


def test_a_source_can_be_named(here: None, like_torch: LikeTorch, tiny) -> None:
    source = same_as_eager(tiny("llama"), "flash_attention_2?source=torch")
    assert source is not None
    assert source.startswith("torch.nn.attention.varlen of torch")
    with pytest.raises(PlanError, match="the package flash-attn: is not installed"):
        jackfield.plan(config_of("llama"), attn_implementation="flash_attention_2?source=package")
    with pytest.raises(OptionError, match="source"):
        jackfield.plan(config_of("llama"), attn_implementation="flash_attention_3?source=torch")


def test_a_package_that_does_not_import_is_passed_over(here: None, site: Path) -> None:
    packages(site, "flash_attn", "flash-attn", "raise ImportError('undefined symbol: _ZN3c10')")
    with pytest.raises(PlanError, match=r"does not import \(ImportError: undefined symbol"):
        jackfield.plan(config_of("llama"), attn_implementation="flash_attention_2?source=package")


@pytest.fixture
def flash_3(site: Path) -> Any:
    """The package of FlashAttention-3; what it returns remembers which function was called."""
    (site / "flash.py").write_text(FLASH.read_text())
    source = FLASH.with_name("flash3.py").read_text()
    packages(site, "flash_attn_interface", "flash-attn-3", source)
    yield lambda: set(importlib.import_module("flash_attn_interface").calls)
    sys.modules.pop("flash", None)


@pytest.mark.parametrize(
    ("cache", "called"),
    [("dynamic", {"varlen"}), ("paged", {"pages"}), ("paged?page_size=4", {"pages"})],
)
def test_flash_attention_3_reads_pages_of_any_size_in_place(
    here: None, flash_3: Any, tiny, cache: str, called: set[str]
) -> None:
    assert same_as_eager(tiny("gemma2"), "flash_attention_3", cache) == "flash-attn-3 2.8.3"
    assert flash_3() == called


def test_flash_attention_3_without_pages_gathers_them(here: None, site: Path, flash_3, tiny):
    """An older one, whose `flash_attn_with_kvcache` is that of FlashAttention-2."""
    package = site / "flash_attn_interface.py"
    package.write_text(package.read_text().replace("cu_seqlens_q=None,", ""))
    same_as_eager(tiny("gemma2"), "flash_attention_3", "paged?page_size=256")
    assert flash_3() == {"varlen"}


@pytest.mark.parametrize(
    ("cache", "size", "in_place"),
    [("paged", 256, True), ("paged?page_size=32", 32, False), ("paged?page_size=512", 512, True)],
)
def test_pages_are_as_large_as_the_kernel_reads_them_unless_a_size_is_named(
    here: None, site: Path, tiny, cache: str, size: int, in_place: bool
) -> None:
    packages(site, "flash_attn", "flash-attn", FLASH.read_text())
    with jackfield.load(
        tiny("mistral"), attn_implementation="flash_attention_2", cache_implementation=cache
    ) as engine:
        engine.generate(prompts(LENGTHS), max_new_tokens=COUNT)
        usage = engine.statistics().cache
    assert usage is not None
    assert usage.page_size == size
    calls = importlib.import_module("flash_attn").calls
    assert {call["paged"] for call in calls} == {in_place}


def test_pages_stay_small_where_the_attention_reads_any() -> None:
    with jackfield.load(build("llama"), cache_implementation="paged") as engine:
        engine.generate([1, 2, 3], max_new_tokens=2)
        assert engine.statistics().cache.page_size == 32


def test_they_run_only_when_they_are_named() -> None:
    assert FlashAttention2.auto_rank is None
    assert FlashAttention3.auto_rank is None
    assert [str(s) for s in FlashAttention2().sources(FlashAttention2Options())] == [
        "the package flash-attn",
        "the kernel kernels-community/flash-attn2@v4",
        "torch.nn.attention.varlen",
    ]
    assert [str(s) for s in FlashAttention3().sources(FlashAttention3Options())] == [
        "the package flash-attn-3",
        "the kernel kernels-community/flash-attn3@v1",
    ]


# The real kernels.


@no_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [8, 64, 80, 128, 256])
def test_torchs_own_kernel_on_a_real_gpu(dtype: str, size: int) -> None:
    kernel, _ = TorchVarlen().load(ON_CUDA)
    request = {
        "device": "cuda", "dtype": dtype, "head_dims": [size], "group": 2,
        "features": ["grouped_query", "sliding_window"],
    }  # fmt: skip
    assert trial(kernel, request) == {"page_multiple": 256}


@no_gpu
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "paged", "paged?page_size=256"])
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_logits_on_a_real_gpu(name: str, cache: str, family: str, tiny, monkeypatch) -> None:
    """Log-probabilities of one greedy step within bfloat16's own distance from float64."""
    monkeypatch.delenv("LOCAL_KERNELS")
    model = tiny(family, torch.bfloat16, initializer_range=0.1, head_dim=64).to("cuda")
    try:
        jackfield.plan(model, attn_implementation=name, cache_implementation=cache)
    except PlanError as refused:
        pytest.skip(str(refused))
    found = {}
    for attention in ("eager", name):
        with jackfield.load(
            model, attn_implementation=attention, cache_implementation=cache
        ) as engine:
            done = engine.generate(prompts(LENGTHS), max_new_tokens=1, logprobs=5)
            found[attention] = [c.logprobs for c in done]
            assert engine.report()["attention"].name == attention
    assert [[t.token_id for t in row] for row in found[name]] == [
        [t.token_id for t in row] for row in found["eager"]
    ]
