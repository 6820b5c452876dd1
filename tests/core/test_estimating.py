"""What a model takes, from its config alone: against sums by hand, and what loading then takes."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import extras
import pytest
import torch
from families import WINDOW, build, config_of
from transformers import LlamaConfig, LlamaForCausalLM

import jackfield
from jackfield import Estimate, estimate
from jackfield.bridge.footprint import loaded_bytes
from jackfield.demo import MODEL_PATH
from jackfield.errors import CheckpointError, PlanError, UsageError
from jackfield.estimates.measuring import check
from jackfield.units import parse_bandwidth, parse_bytes

if TYPE_CHECKING:
    from command_line import Cli

FAMILIES = ["llama", "llama-mqa", "gpt2", "gemma3", "mistral", "mixtral", "deepseek-v3"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24e9),
        ("24 GiB", 24 * 2**30),
        (".5kB", 500),
        ("7B", 7),
        ("7KB", 7000),
        ("512MiB", 2**29),
    ],
)
def test_sizes(text: str, size: float) -> None:
    assert parse_bytes(text, "it") == size
    assert parse_bandwidth(f"{text}/s") == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "24",
        "GB",
        "1e3GB",
        "-1GB",
        "0GB",
        "nanGB",
        "24 Gb/s",
        "24Gb",
        "24gb",
        "24kiloB",
        True,
        0,
        2.5,
    ],
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(UsageError, match="it must be a size such as"):
        parse_bytes(text, "it")


@pytest.mark.parametrize(
    "rate", ["24GB", "24/s", "24Gb/s", "GB/s", "/s", True, 0, math.nan, math.inf]
)
def test_what_is_no_rate(rate: Any) -> None:
    with pytest.raises(UsageError, match="bandwidth must be a rate such as"):
        parse_bandwidth(rate)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(4)
def test_planned_weights_are_loaded_weights(family: str, tied: bool, tmp_path: Path) -> None:
    config = config_of(family)
    config.tie_word_embeddings = tied
    model = build(family, torch.float32) if not tied else type(build(family))(config)
    model.to(torch.float32).save_pretrained(tmp_path)
    for dtype in ("bfloat16", "float32"):
        planned = estimate(tmp_path, dtype=dtype, device_map="cpu")
        with jackfield.load(tmp_path, dtype=dtype, device_map="cpu") as engine:
            assert planned.weight_bytes == loaded_bytes(engine.model)
    assert planned.weights_known
    assert planned.dtypes["float32"] == planned.weight_bytes


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, **changes,
    )  # fmt: skip


def test_what_a_step_reads_by_hand() -> None:
    untied = estimate(llama(tie_word_embeddings=False), dtype="float32", bandwidth="1GB/s")
    kept = (
        2 * 2 * 2 * 8 * 4
    )  # bytes of a token: layers, keys and values, heads, their size, float32
    rows = 32 * 4  # of the embedding table, for a token
    table = 100 * rows
    for batch in (1, 5):
        read = untied.weight_bytes - table + batch * rows + batch * 64 * kept
        assert untied.bytes_read(64, batch) == read
        assert untied.decode_limit(64, batch) == pytest.approx(batch * 1e9 / read)
    tied = estimate(llama(tie_word_embeddings=True), dtype="float32")
    assert tied.bytes_read(64) == tied.weight_bytes + 64 * kept  # the head reads the table whole
    assert tied.decode_limit(64) is None


def test_a_window_bounds_what_is_read() -> None:
    found = estimate(config_of("mistral"), dtype="float32")
    assert found.bytes_read(100) == found.bytes_read(WINDOW)


def test_of_experts_only_the_active_ones_are_read() -> None:
    found = estimate(config_of("mixtral"), dtype="float32")
    assert found.reads is not None
    assert [(e.count, e.active) for e in found.reads.experts] == [(4, 2)] * 2
    experts = sum(e.num_bytes for e in found.reads.experts)
    assert experts == 2 * 4 * 3 * 48 * 32 * 4  # layers, experts, matrices
    table = found.reads.tables[0]
    assert found.reads.unread(1) == experts / 2 + table.num_bytes - table.token_bytes
    # Two tokens of four experts, two each: one of the four is left out with probability 1/4.
    beside = table.num_bytes - 2 * table.token_bytes
    assert found.reads.unread(2) == experts / 4 + beside


def test_eager_attention_takes_the_whole_matrix_of_scores() -> None:
    def peak(attention: str, tokens: int) -> int:
        config = llama()
        config.max_position_embeddings = 8192
        found = estimate(config, attn_implementation=attention, cache_implementation="dynamic",
                         lengths=[tokens])  # fmt: skip
        return found.step_bytes(tokens)

    assert peak("sdpa", 4096) == pytest.approx(2 * peak("sdpa", 2048), rel=0.05)
    assert peak("eager", 4096) > 3.5 * peak("eager", 2048)
    assert peak("eager", 2048) > 4 * 2048 * 2048 * 4  # heads, queries, keys, float32


def test_what_fits_fits_and_one_more_does_not() -> None:
    for cache in ("dynamic", "paged"):
        asked = {"cache_implementation": cache, "device_map": "cpu"}
        found = estimate(llama(), device_memory="3MB", **asked)
        memory = found.memory()
        assert memory is not None
        most = memory.requests(64)
        assert most > 0
        fits, beyond = found.total(64, most), found.total(64, most + 1)
        assert fits is not None
        assert beyond is not None
        assert fits <= 3_000_000 < beyond
    small = estimate(llama(), device_memory="100kB").memory()
    assert small is not None
    assert (small.requests(64), small.longest) == (0, 0)


def test_a_growing_pool_is_counted_as_it_is_allocated() -> None:
    asked = {"dtype": "float32", "device_map": "cpu"}
    found = estimate(llama(), cache_implementation="paged?page_size=4", **asked)
    token = 256
    assert found.cache_bytes(4) == 64 * 4 * token
    assert found.cache_bytes(64, 5) == 128 * 4 * token  # 80 pages
    fixed = estimate(llama(), cache_implementation="paged?num_tokens=96", **asked)
    assert fixed.cache_bytes(4, 100) == fixed.pool == 96 * token


@pytest.mark.parametrize("cache", ["paged?page_size=4", "dynamic"])
def test_a_pool_grows_to_what_was_planned(cache: str) -> None:
    config = llama(eos_token_id=None)
    model = LlamaForCausalLM(config)
    with jackfield.load(model, cache_implementation=cache, device_map="cpu") as engine:
        if (usage := engine._loop.cache.usage()) is None:
            return
        prompts = [[row + 1] * 60 for row in range(5)]
        engine.generate(prompts, max_new_tokens=5, min_new_tokens=5)
        usage = engine._loop.cache.usage()
        assert usage is not None
        asked = {"dtype": "float32", "cache_implementation": cache, "device_map": "cpu"}
        planned = estimate(config, **asked)
        assert usage.num_bytes == planned.cache_bytes(64, 5)


def test_every_quantizer_and_cache_has_a_row_and_says_why_not() -> None:
    found = estimate("demo", device_map="cpu")
    rows = {w.registered.name: w for w in found.weights}
    assert rows["none"].chosen
    assert rows["none"].num_bytes == found.weight_bytes
    assert rows["transformers"].num_bytes is None
    assert "give a transformers quantization config" in rows["transformers"].reasons[0]
    caches = {c.registered.name: c for c in found.caches}
    assert caches["paged"].request_bytes[512] == caches["dynamic"].request_bytes[512]
    assert "no second device" in caches["offloaded"].reasons[0]


def test_a_config_without_weights_is_enough(tmp_path: Path) -> None:
    shutil.copy(MODEL_PATH / "config.json", tmp_path)
    assert estimate(tmp_path).weight_bytes == estimate("demo").weight_bytes


@pytest.mark.long  # it measures in a process of its own
def test_a_config_without_weights_cannot_be_measured(tmp_path: Path) -> None:
    shutil.copy(MODEL_PATH / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="there are no weights in"):
        check(str(tmp_path))


def test_a_quantized_checkpoint_of_which_nobody_knows_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as if it were not quantized, and says so."""
    config = json.loads((MODEL_PATH / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fbgemm_fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="quantized with fbgemm_fp8"):
        estimate(tmp_path, quantization="none")
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_fbgemm_fp8.FbgemmFp8HfQuantizer.validate_environment",
        lambda *_, **__: None,
    )
    found = estimate(tmp_path, quantization="transformers")
    assert not found.weights_known
    assert found.weight_bytes == found.dtypes[found.plan.requirements.dtype]


def test_a_live_model_is_looked_at_through_its_config() -> None:
    model = build("llama", torch.float32)
    assert estimate(model).weight_bytes == loaded_bytes(model)


def test_the_command_line_shows_and_draws_it(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs jackfield[plot]")
    drawing = tmp_path / "memory.svg"
    flags = ("--device-memory", "20MB", "--bandwidth", "1GB/s", "--batch", "2", "--length", "256")
    done = cli("memory", "demo", *flags, "--plot", str(drawing))
    assert done.code == 0, done
    assert "device memory 20.0 MB (given), weights 13.6 MB" in done.out
    assert "tokens/s ×2" in done.out
    assert drawing.read_text().count("</svg>") == 1
    found = cli("memory", "demo", *flags, "--json").json
    wanted = estimate("demo", lengths=[256], device_memory="20MB", bandwidth=1e9, batch_sizes=[2])
    assert found == json.loads(json.dumps(wanted.to_dict() | {"check": None}))
    assert found["lengths"][0]["decode"]["2"]["tokens_per_second"] > 0


def test_bandwidth_is_measured(cli: Cli) -> None:
    found = cli("memory", "demo", "--measure-bandwidth", "--json").json
    assert 1e8 < found["bandwidth"] < 1e14


def test_planned_is_measured_for_the_demo_model() -> None:
    found = check("demo", prompt_tokens=100, new_tokens=4)
    rows = {name: (planned, measured) for name, planned, measured in found.rows()}
    for name in ("weights", "keys and values"):
        planned, measured = rows[name]
        assert planned == measured > 0


@pytest.mark.long
@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="reads memory from Linux's /proc"
)
@pytest.mark.parametrize("cache", ["paged", "dynamic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peaks_are_within_a_tenth(dtype: str, cache: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=16000, hidden_size=768, intermediate_size=2304, num_hidden_layers=16,
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=4096,
        eos_token_id=None, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    found = check(str(tmp_path), dtype=dtype, cache_implementation=cache)
    rows = {name: (planned, measured) for name, planned, measured in found.rows()}
    for name, (planned, measured) in rows.items():
        exact = name in ("weights", "keys and values")
        assert measured == (planned if exact else pytest.approx(planned, rel=0.1)), name


def test_the_public_name_is_the_class() -> None:
    assert isinstance(estimate("demo"), Estimate)


LARGE = LlamaConfig(
    hidden_size=32768, intermediate_size=131072, num_hidden_layers=4, num_attention_heads=256,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=4096, dtype="bfloat16",
)  # fmt: skip  # 77 billion numbers


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ({"device_memory": "300GB"}, None),
        pytest.param(
            {"device_memory": "80GB", "quantization": "bnb-4bit"},
            None,
            marks=extras.marked("bitsandbytes"),
        ),
        ({"device_memory": "80GB", "quantization": "bnb-4bit", "device_map": "cuda"}, "cuda"),
        ({"device_memory": "80GB", "quantization": "int4-cpu", "device_map": "cpu"}, "cpu"),
        ({"device_memory": "300GB", "cache_implementation": "paged", "device": "cuda:3"}, "cuda"),
        ({"device_memory": "200GB", "device_map": "mps"}, "mps"),
    ],
)
@pytest.mark.one_in(4)
def test_the_device_that_is_named_need_not_be_here(
    arguments: dict[str, Any], device: str | None
) -> None:
    found = jackfield.estimate(LARGE, lengths=[512], **arguments)
    assert device in (None, found.plan.requirements.device)
    total, memory = found.total(512), found.memory()
    assert total is not None
    assert memory is not None
    assert total <= found.device_memory
    assert memory.requests(512) >= 1
    small = jackfield.estimate(LARGE, lengths=[512], **arguments | {"device_memory": "1GB"})
    assert small.memory() is not None
    assert small.total(512) == total


def test_quantizers_are_judged_for_the_device_that_is_named() -> None:
    found = jackfield.estimate(LARGE, lengths=[512], device_memory="300GB", device_map="cuda")
    rows = {row.registered.name: row for row in found.weights}
    assert rows["bnb-4bit"].reasons == ()
    assert rows["int4-cpu"].reasons == ("does not run on cuda (only cpu)",)
    with pytest.raises(PlanError, match=r"does not run on cuda"):
        jackfield.estimate(LARGE, device_memory="80GB", device_map="cuda", quantization="int4-cpu")
    with pytest.raises(UsageError, match="not a device of this machine"):
        jackfield.estimate(LARGE, device_map="bogus", device_memory="80GB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="plans for a GPU that is not here")
@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_a_gpu_that_is_elsewhere_is_planned_for_by_what_backends_declare(
    attention: str, cli: Cli
) -> None:
    words = ["memory", "demo", "--device", "cuda", "--device-memory", "80GB"]
    done = cli(*words, "--dtype", "bfloat16", "--attention", attention)
    assert done.code == 0, done.err
    assert "no cuda is here: what backends need of a machine was not checked" in " ".join(
        done.out.split()
    )
    assert "no cuda is here" not in cli("memory", "demo", "--device-memory", "80GB").out
    told = cli(*words, "--dtype", "float64", "--attention", attention)
    assert told.code == 2
    assert "float64" in told.err
    assert "--device-memory 80GB" in cli("memory", "demo", "--device", "cuda").err


@pytest.mark.parametrize("family", ["llama-mqa", "gemma3", "mixtral", "gpt2", "deepseek-v3"])
def test_flops_of_a_prompt_are_those_of_the_model(family: str) -> None:
    """Against torch's own count of a real prompt, longer than the windows."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build(family).eval()
    model.set_attn_implementation("eager")
    length = 3 * WINDOW
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.zeros(1, length, dtype=torch.long), logits_to_keep=1)
    found = estimate(model.config, device_map="h200", lengths=[length]).prompt
    assert found is not None
    # Eager attention computes all scores, also of keys that a query does not see.
    full = length * length * sum(each for each, _ in found.attentions)
    assert found.token * length + found.once + full == counted.get_total_flops()
    windows = [window for _, window in found.attentions]
    assert (WINDOW in windows) == (family in ("gemma3", "mixtral"))


@pytest.mark.parametrize("window", [None, 1, 4, 9, 10, 11])
def test_keys_that_queries_see_are_counted(window: int | None) -> None:
    from jackfield.bridge.prompt_flops import PromptFlops

    for tokens in range(1, 12):
        seen = sum(min(query, window or query) for query in range(1, tokens + 1))
        assert PromptFlops(5, 7, ((3, window),)).of(tokens) == 5 * tokens + 7 + 3 * seen


def test_a_data_sheet_names_a_device() -> None:
    given = estimate(MODEL_PATH, device_map="H200", lengths=[128])
    same = estimate(
        MODEL_PATH, device_map="cuda", device_memory="141GB", bandwidth="4.8TB/s", lengths=[128]
    )
    assert given.device_memory == same.device_memory == 141 * 10**9
    assert given.decode_limit(128, 8) == same.decode_limit(128, 8)
    assert given.plan.requirements == same.plan.requirements
    half = estimate(MODEL_PATH, device_map="h200", device_memory="70GB", bandwidth=1e12)
    assert (half.device_memory, half.bandwidth) == (70 * 10**9, 1e12)
    # One token is read as fast as the weights are, a long prompt as fast as they are multiplied.
    assert given.prompt is not None
    assert given.prompt_limit(1) == given.bytes_read(0) / 4.8e12
    assert given.prompt_limit(10**6) == given.prompt.of(10**6) / 989e12
    assert same.prompt_limit(128) is None


@pytest.mark.parametrize("given", [{"device_memory": 0}, {"device_memory": ""}, {"bandwidth": 0}])
def test_what_is_given_beside_a_data_sheet_is_not_passed_over(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(given))):
        estimate(MODEL_PATH, device_map="h200", **given)


def test_replicas_are_added_up(cli: Cli) -> None:
    one = estimate(MODEL_PATH, device_map="h200", tp_size=3, lengths=[128])
    many = estimate(MODEL_PATH, device_map="h200", tp_size=3, lengths=[128], replicas=5)
    assert (one.devices, many.devices) == (3, 15)
    for alone, together in zip(one.together()[0][1:], many.together()[0][1:], strict=True):
        assert together == pytest.approx(5 * alone)
    asked = ("memory", "demo", "--device", "h200", "--tp", "3", "--replicas", "5")
    shown = cli(*asked, "--length", "128").out
    assert "for each of 3 processes" in shown
    assert "5 replicas, 15 devices, 2.1 TB of memory" in shown
    said = json.loads(cli(*asked, "--json").out)
    assert said["devices"] == 15
    assert said["together"][0]["requests"] == 5 * one.memory().requests(512)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--replicas", "0"), "replicas must be a whole number, at least 1, not 0"),
        (("--device", "h200", "--check"), "--device h200 is a data sheet, and --check"),
        (("--device", "h200", "--measure-bandwidth"), "is a data sheet, and --check"),
    ],
)
def test_what_cannot_be_asked_of_other_devices(cli: Cli, flags: list[str], why: str) -> None:
    done = cli("memory", "demo", *flags)
    assert (done.code, done.out) == (2, "")
    assert why in done.err
