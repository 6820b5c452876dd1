"""What a transformers user writes is taken, or answered by name; every keyword is walked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompileConfig,
    GenerationConfig,
    PreTrainedModel,
    pipeline,
)
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pipelines.text_generation import TextGenerationPipeline
from transformers.tokenization_utils_base import (
    INIT_TOKENIZER_DOCSTRING,
    PreTrainedTokenizerBase,
)
from transformers.utils import quantization_config

import jackfield
from jackfield.api import LoadArguments, PlanArguments
from jackfield.cli.answers import instead_of_flag, with_values
from jackfield.cli.app import app
from jackfield.errors import PlanError, UsageError
from jackfield.planning.keywords import in_our_words, selected
from jackfield.registry.discovery import registry
from jackfield.requests import habits

LOAD = frozenset(LoadArguments.__annotations__) | frozenset(PlanArguments.__annotations__)
STRANGE = object()  # a value that no habit takes


def refused(call: Callable[[], Any]) -> str | None:
    """The words of the UsageError that `call` raises; None where it raises none."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return None


def keywords_of_loading() -> set[str]:
    """What `from_pretrained` takes: in its signature, its docstring, and out of its kwargs."""
    found: set[str] = set()
    for method in (PreTrainedModel.from_pretrained, AutoModelForCausalLM.from_pretrained):
        found |= set(inspect.signature(method).parameters)
        source = inspect.getsource(inspect.unwrap(getattr(method, "__func__", method)))
        found |= set(re.findall(r"^            (\w+) \(`", source, re.M))
        found |= set(re.findall(r"kwargs\.(?:pop|get)\(\s*\"(\w+)\"", source))
    return found - {"args", "kwargs", "cls", "model_kwargs"}


def keywords_of_pipelines() -> set[str]:
    found = set(inspect.signature(pipeline).parameters)
    found |= set(inspect.signature(TextGenerationPipeline._sanitize_parameters).parameters)
    return found - {"self", "kwargs", "generate_kwargs"}


def keywords_of_generate() -> set[str]:
    found = set(inspect.signature(transformers.GenerationMixin.generate).parameters)
    return (found | set(vars(GenerationConfig()))) - {"self", "kwargs"}


def keywords_of_tokenizers() -> set[str]:
    """What a tokenizer's call takes, and what its class does."""
    found = set(inspect.signature(PreTrainedTokenizerBase.__call__).parameters)
    found |= set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)
    found |= set(re.findall(r"^        (\w+) \(`", INIT_TOKENIZER_DOCSTRING, re.M))
    return found - {"self", "kwargs"}


KEYWORDS = sorted(
    name
    for name in keywords_of_loading()
    | keywords_of_pipelines()
    | keywords_of_generate()
    | keywords_of_tokenizers()
    if name[0] != "_"  # what transformers hands from one of its functions to another
)


def test_the_sources_of_the_walk_are_there() -> None:
    """A walk over nothing finds nothing wrong."""
    assert {"trust_remote_code", "device_map", "gguf_file", "device_mesh"} <= keywords_of_loading()
    assert {"device", "return_full_text"} <= keywords_of_pipelines()
    assert {"temperature", "streamer"} <= keywords_of_generate()
    assert {"padding_side", "pad_token", "stride"} <= keywords_of_tokenizers()
    assert len(KEYWORDS) > 150


@pytest.mark.parametrize("name", [name for name in KEYWORDS if name != "model"])
def test_every_keyword_is_taken_or_answered_by_name(name: str) -> None:
    assert in_our_words({name: None}, LOAD, "jackfield.load") == {}
    answer = refused(lambda: in_our_words({name: STRANGE}, LOAD, "jackfield.load"))
    if answer is None:
        taken = in_our_words({name: STRANGE}, LOAD, "jackfield.load")
        assert taken, "dropped without a word"
        assert set(taken) <= LOAD
    else:
        assert name in answer
        assert "takes no argument" not in answer
        assert len(answer.partition(name)[2].split()) > 3, "says nothing to do"


@pytest.mark.parametrize("name", sorted(habits.KEYWORDS))
def test_every_habit_says_something_true(name: str) -> None:
    """Its names are ours, and no keyword of ours is taken for a habit."""
    habit = habits.KEYWORDS[name]
    assert name not in LOAD
    assert habit.ours is None or habit.ours in LOAD
    assert habit.answer or habit.ours or habit.inert
    assert habit.ours or not habit.values
    outside = re.sub(r"\([^)]*\)|'[^']*'", "", habit.answer)
    assert set(re.findall(r"\b([a-z_]+)=", outside)) <= LOAD
    for value in habit.inert:
        assert in_our_words({name: value}, LOAD, "jackfield.load") == {}
    for theirs, ours in habit.values.items():
        assert in_our_words({name: theirs}, LOAD, "jackfield.load") == {habit.ours: ours}


def known(kind: str) -> set[str]:
    return {registered.name for registered in registry().of_kind(kind)}


def attentions() -> list[str]:
    """transformers' names, with the prefix of its paged ones, and the kernels that it fetches."""
    plain = {"eager", *(name for name in ALL_ATTENTION_FUNCTIONS if "|" not in name)}
    hub = {"kernels-community/flash-attn2", "kernels-community/vllm-flash-attn3@main"}
    return sorted({n for n in plain if not n.startswith("jackfield-")} | hub)


@pytest.mark.parametrize("prefix", ["", "paged|", "plugin:paged|"])
@pytest.mark.parametrize("name", attentions())
def test_every_attention_of_transformers(name: str, prefix: str) -> None:
    answer = refused(lambda: selected({"attention": prefix + name}, registry()))
    if "/" in name or name not in known("attention"):
        assert answer is not None
        assert "hub?repo=kernels-community/" in answer
        return
    assert answer is None
    found = selected({"attention": prefix + name}, registry())
    assert found["attention"] == name
    assert found.get("cache") == ("paged" if prefix else None)


@pytest.mark.parametrize("name", [*ALL_CACHE_IMPLEMENTATIONS, "paged"])
def test_every_cache_of_transformers(name: str) -> None:
    assert selected({"cache": name}, registry())["cache"] in known("cache")


CONFIGS = sorted(
    name
    for name, member in vars(quantization_config).items()
    if inspect.isclass(member)
    and issubclass(member, quantization_config.QuantizationConfigMixin)
    and member is not quantization_config.QuantizationConfigMixin
)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_quantization_config_is_taken_or_answered(name: str) -> None:
    """Planned or refused by the name of its class; one that needs arguments is made by its user."""
    try:
        config = getattr(quantization_config, name)()
    except Exception as error:  # noqa: BLE001 - whatever its class wants
        pytest.skip(f"{name}() needs arguments or a library: {error}")
    if not hasattr(config, "quant_method"):
        pytest.skip(f"{name} is a part of another config")
    answer = refused(lambda: jackfield.plan("demo", quantization_config=config, dtype="bfloat16"))
    assert answer is None or name in answer


def chosen(**arguments: Any) -> dict[str, str]:
    plan = jackfield.plan("demo", **arguments)
    return {kind: choice.registered.name for kind, choice in plan.choices.items()}


TAKEN: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, {"quantizer": "bnb-8bit"}),
    ({"load_in_4bit": True}, {"quantizer": "bnb-4bit"}),
    ({"load_in_8bit": True, "load_in_4bit": False}, {"quantizer": "bnb-8bit"}),
    ({"attn_implementation": "paged|sdpa"}, {"attention": "sdpa", "cache": "paged"}),
    ({"attn_implementation": None, "cache_implementation": "hybrid"}, {"cache": "static"}),
    ({"compile": False}, {"compiler": "none"}),
    ({"num_beams": 3, "length_penalty": 2.0}, {"decoding": "beam"}),
    ({"num_beams": 1}, {"decoding": "sample"}),
    ({"use_mtp": False}, {"decoding": "sample"}),
    ({"prompt_lookup_num_tokens": 5}, {"decoding": "prompt_lookup"}),
    ({"assistant_model": "demo-draft"}, {"decoding": "assisted"}),
    ({"assistant_model": "demo-draft", "num_assistant_tokens": 2}, {"decoding": "assisted"}),
    ({"device": -1, "trust_remote_code": False, "use_kernels": False}, {"attention": "cpu_decode"}),
    ({"device_map": torch.device("cpu")}, {}),
]


@pytest.mark.parametrize(("arguments", "wanted"), TAKEN)
def test_what_is_taken_chooses_what_it_names(
    arguments: dict[str, Any], wanted: dict[str, str]
) -> None:
    if wanted.get("quantizer", "").startswith("bnb"):
        pytest.importorskip("bitsandbytes", reason="needs jackfield[bnb]")
    found = chosen(**arguments)
    assert {kind: found[kind] for kind in wanted} == wanted


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_dtypes_are_names_or_torchs_own(name: str) -> None:
    assert jackfield.plan("demo", **{name: torch.bfloat16}).requirements.dtype == "bfloat16"


ANSWERED: list[tuple[dict[str, Any], str]] = [
    ({"use_kernels": True}, r"kernels=\['NAME'\]"),
    ({"kernels": True}, r"kernels=\['NAME'\]"),
    ({"attn_implementation": "kernels-community/flash-attn2"}, r"hub\?repo=kernels-community/f"),
    ({"attn_implementation": "o/k@v1:f"}, r"'hub\?repo=o/k&revision=v1&function=f'"),
    ({"attn_implementation": {"text_config": "sdpa"}}, "not a dict"),
    ({"attn_implementation": ["paged|sdpa", "eager"]}, "cache_implementation='paged'"),
    ({"attn_implementation": "paged|sdpa", "cache_implementation": "dynamic"}, "give one of them"),
    ({"compile": CompileConfig()}, r"compile='inductor\?mode=…'"),
    ({"compile": "reduce-overhead"}, "'cuda_graph'"),
    ({"trust_remote_code": True}, "give the live model"),
    ({"token": "hf_secret"}, "HF_TOKEN"),
    ({"temperature": 0.7}, r"engine.generate\(…, temperature=0.7\)"),
    ({"max_batch_size": 3}, "jackfield.load"),
    ({"torch_dtype": "float32", "dtype": "bfloat16"}, "give one"),
    ({"num_beams": 4, "decoding": "sample"}, "give one"),
    ({"num_beams": 4, "assistant_model": "demo-draft"}, "two decodings"),
    ({"length_penalty": 2.0}, r"decoding='beam\?length_penalty=2.0'"),
    ({"num_beams": True}, "must be of type int"),
    ({"use_mtp": True, "decoding": "sample"}, "mtp', and decoding='sample' is given too; give"),
    ({"use_mtp": True, "num_beams": 2}, "two decodings"),
    ({"use_mtp": "yes"}, "use_mtp must be True or False, not 'yes'"),
    ({"use_mtp": True}, "mtp' cannot run LlamaForCausalLM here: mtp .*none .num_mtp_lay"),
    ({"atn_implementation": "sdpa"}, "did you mean 'attn_implementation'"),
    ({"temprature": 1.0}, "did you mean 'temperature'"),
    ({"quantization": {"load_in_4bit": True}}, r"BitsAndBytesConfig\(…\)"),
    ({"quantization": "4bit"}, "'bnb-4bit'"),
    ({"device": torch.device("meta")}, "device_map='meta'"),
]


@pytest.mark.parametrize(("arguments", "words"), ANSWERED)
def test_what_is_not_taken_is_answered_with_what_to_write(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        jackfield.plan("demo", **arguments)
    assert "secret" not in str(raised.value)


def test_the_page_has_every_habit() -> None:
    page = Path(__file__).parents[2] / "docs/coming-from-transformers.md"
    text = page.read_text()
    rows = {name for row in re.findall(r"^\| (`.*?) \|", text, re.M) for name in row.split("`")}
    tables = (habits.KEYWORDS, habits.DECODINGS, habits.DECODING_OPTIONS)
    assert {name for names in tables for name in names} - rows == set()
    for name, habit in habits.KEYWORDS.items():
        assert not habit.answer or habit.answer in text, name
        assert not habit.ours or f"`{habit.ours}" in text, name
    values = (*habits.VALUES.values(), *habits.NAMES.values())
    assert {str(v) for table in values for v in table} - rows == set()


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_weights_that_bitsandbytes_would_leave_as_they_are_are_refused(bits: str) -> None:
    """Before they are read: on a CPU its offload in float32 converts nothing."""
    config = BitsAndBytesConfig(**{bits: True}, llm_int8_enable_fp32_cpu_offload=True)
    for arguments in ({"device_map": "cpu"}, {"max_memory": {"cpu": "2MB"}}):
        with pytest.raises(PlanError, match=r"cpu_offload=True leaves|on one device"):
            jackfield.plan("demo", quantization=config, **arguments)


def flags_of_transformers() -> set[str]:
    """The flags and arguments of `transformers chat`, `serve`, `download` and `env`."""
    from transformers.cli import chat, download, serve, system

    calls = (chat.Chat.__init__, serve.Serve.__init__, download.download, system.env)
    names = {name for call in calls for name in inspect.signature(call).parameters}
    return {f"--{name.replace('_', '-')}" for name in names - {"self"}}


def test_every_flag_of_transformers_is_taken_or_answered() -> None:
    pytest.importorskip("requests", reason="transformers' own command line imports it")
    flags = flags_of_transformers()
    assert {"--continuous-batching", "--dtype", "--system-prompt"} <= flags
    typer_app: Any = typer.main.get_command(app)
    known = {
        flag
        for c in typer_app.commands.values()
        for parameter in c.params
        for flag in parameter.opts
    }
    generate = {name for name in keywords_of_generate() if name[0] != "_"}
    flags |= {f"--{name.replace('_', '-')}" for name in generate}
    for flag in flags - known - {"--inputs"}:
        assert instead_of_flag(flag, known), f"nothing is said about {flag}"
    for flag in ("--cache-implementation", "--do-sample", "--max-batch-tokens", "--torch-dtype"):
        assert flag in known


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("generate --compile", "generate --compile=inductor"),
        ("generate --compile --seed 3", "generate --compile=inductor --seed 3"),
        ("generate --compile none hi", "generate --compile none hi"),
        ("generate -- --compile", "generate -- --compile"),
    ],
)
def test_a_bare_compile_is_torchs(words: str, meant: str) -> None:
    assert with_values(words.split()) == meant.split()
