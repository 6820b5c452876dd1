"""Regexes in the files of adapters and quantized checkpoints are bounded before they are used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import jackfield
from jackfield.bridge.patterns import LONGEST, check_patterns, steps
from jackfield.errors import CheckpointError

if TYPE_CHECKING:
    from forking import Forks

NAMES = [
    *(f"model.layers.{i}.self_attn.{p}_proj" for i in range(28) for p in "qkvo"),
    *(f"model.layers.{i}.mlp.experts.127.down_proj" for i in range(28)),
    "base_model.model.model.vision_tower.vision_model.encoder.layers.11.self_attn.out_proj",
    "model.language_model.layers.3.mlp.gate_up_proj",
    "lm_head",
]
UNSLOTH = (
    r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp|ffn).*?(?:"
    r"k_proj|v_proj|q_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1"
    r",}\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|k_proj|v_proj|o_proj)))"
)
#: As adapters and checkpoints have them (PEFT's and Unsloth's, ms-swift's, llm-compressor's).
USUAL = [
    r"q_proj", r"all-linear", r".*\.(q_proj|v_proj)$", r"model\.layers\.(1[0-9]|2[0-3])\..*",
    r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj).*", r"(.*\.)?layers\.\d+\..*",
    UNSLOTH,
    r"^(language_model|aligner)(?=\.).*(?=\.)\.?(?!lm_head).*\.(q_proj|v_proj)$",
    r"^(?!.*(vision|audio)).*\.(?:q|k|v|o|gate|up|down)_proj", r"(?i).*ATTN.*", r"([^.]+\.)*q_proj",
    r"(\w+\.)+[qv]_proj", r"re:.*\.mlp\.experts\..*", r"-:.*\.self_attn\..*", r"re:.*lm_head",
    r"+:^model\.layers\.\d+\.mlp\.(gate|up)_proj$", r"model.*layers.*self_attn.*(to_k|q_proj)",
    "|".join(rf"model\.layers\.{i}\.mlp\.{p}_proj" for i in range(80) for p in ("up", "down")),
]  # fmt: skip
HOSTILE = [
    r"(.*.*)*z", r"(?i)(.*.*)*z", r"re:(.*.*)*z", r"-:(.*.*)*z", r"(\w+)+\d\dz", r"((((.*)*)*)*)*z",
    r".*.*.*.*.*z", r"(?:){4000000000}", r"(?:.{0,60}){0,60}z", r"(.+\.?)+\!", r"((.)\2?)*z",
    r"(?=(.*.*)*z)q", r"(?!(.*.*)*z)q", r"(?<=a)(.*)*(.*)*z", r"(?P<a>.+)(?(a)(.*)*|b)z",
    r"(x?|y?){30,60}!", r"(?:[^.]+\.?)*!", r"([a-z_]+|[^.]+|\.)+!", r"(.*?){50}z",
    r"(?s:.|\n|.\B)*!",
    "(" * 90 + ".*" + ")*" * 90,
]  # fmt: skip


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_pass(pattern: str) -> None:
    check_patterns("file", {"target_modules": pattern, "rank_pattern": {pattern: 4}}, NAMES)


@pytest.mark.parametrize("pattern", HOSTILE)
@pytest.mark.parametrize(
    "form", [lambda p: p, lambda p: [p], lambda p: {p: 4}, lambda p: {"a": [p]}]
)
def test_what_would_take_too_long_is_named(pattern: str, form: Any) -> None:
    with pytest.raises(CheckpointError, match="in some_field would take too long") as caught:
        check_patterns("the_file", {"r": 4, "some_field": form(pattern)}, NAMES)
    assert str(caught.value).startswith("the_file: the pattern ")
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("target_modules", "a" * (LONGEST + 1), "has 100,001 characters"),
        ("rank_pattern", {f"q{i}": 4 for i in range(20_000)}, "has 20,000 names or patterns"),
        ("modules_to_save", [f"q{i}" for i in range(20_000)], "has 20,000 names or patterns"),
        ("target_modules", [f"q{i}" for i in range(20_000)], "has 20,000 names or patterns"),
        ("rank_pattern", {rf"(.*\.)?q{i}.*v": 4 for i in range(5_000)}, "would take too long"),
    ],
)
def test_too_much_of_it_is_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        check_patterns("the_file", {field: value}, NAMES)
    assert f" {field} " in str(caught.value)


PIECES = st.sampled_from(
    [*"aelm_.", r"\.", r"\d", r"\w", ".", "[^.]", "[a-m]", "^", "$", r"\b", "(?i:L)", r"\1"]
)
PATTERNS = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.builds(lambda p, q: f"(?:{p}){q}", inner,
                  st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{0,3}", "{2,}"])),
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.builds(lambda p, sign: f"(?{sign}{p})", inner, st.sampled_from(["=", "!", ">", ":"])),
    ),
    max_leaves=12,
)  # fmt: skip
RUN = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
patterns, names = json.load(open(sys.argv[1]))
for pattern in patterns:
    print(pattern, flush=True)
    for name in names:
        re.fullmatch(pattern, name)
        re.match(rf"(.*\\.)?({pattern})$", name)
print("done")
"""


def test_what_passes_ends(forks: Forks, tmp_path: Path) -> None:
    """Thousands of patterns made by chance: Python runs in no time those that are let through."""
    passed, refused = [], 0

    @given(PATTERNS)
    def sort(pattern: str) -> None:
        nonlocal refused
        if all(steps(f"{pattern}!", name) is not None for name in NAMES[-4:]):
            passed.append(f"{pattern}!")
        else:
            refused += 1

    sort()
    file = tmp_path / "patterns.json"
    file.write_text(json.dumps([[p for p in passed if steps(p, NAMES[-1])], NAMES[-4:]]))
    done = forks.python("-c", RUN, file)
    assert done.stdout.endswith("done\n"), f"{done.stdout[-300:]} {done.stderr[-300:]}"
    assert len(passed) > refused


SLOW = ".*.*.*.*.*z"  # ends, were it let through


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", SLOW),
        ("exclude_modules", SLOW),
        ("modules_to_save", [SLOW]),
        ("rank_pattern", {SLOW: 4}),
        ("alpha_pattern", {SLOW: 4}),
        ("layers_pattern", SLOW),
        ("layers_pattern", [SLOW]),
        ("target_parameters", [SLOW]),
    ],
)
def test_adapters(folder: Path, tmp_path: Path, field: str, value: Any) -> None:
    peft = pytest.importorskip("peft", reason="needs jackfield[peft]")
    model = LlamaForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    for more in ({"adapter": tmp_path}, {"adapters": {"a": tmp_path}}):
        with pytest.raises(CheckpointError, match=f"in {field} would take too long") as caught:
            jackfield.plan(folder, **more)
        assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "field"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "llm_int8_skip_modules"),
        ({"quant_method": "fp8"}, "modules_to_not_convert"),
        ({"quant_method": "gptq", "bits": 4}, "modules_in_block_to_quantize"),
    ],
)
def test_quantized_checkpoints(
    folder: Path, tmp_path: Path, stored: dict[str, Any], field: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {**stored, field: [SLOW]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"in {field} would take too long") as caught:
        jackfield.plan(copy)
    assert f"config.json of {copy}" in str(caught.value)
