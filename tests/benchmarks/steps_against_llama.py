"""Steps and prompts of jackfield, llama.cpp and `transformers.generate` on one set of weights.

    python tests/benchmarks/steps_against_llama.py MODEL WEIGHTS ROWS… [--prompt 128] [--threads 2]

MODEL is one of `MODELS`, with random weights. WEIGHTS is a type of GGUF, whose very file both read,
or what jackfield stores a transformers model in: llama.cpp then has the type of `LIKE`. Options of
the quantizer may follow, as in `Q4_0?activations=int8`. Of transformers, which would unpack the
file, there is the model in bfloat16 (in float32 for float32).
Engines run in turn in one process; for each number of rows a row of a table is printed: medians of
milliseconds a decode step and of the time to the first token, the limit of a step, which is reading
the weights once as fast as this machine reads memory, and the medians over the rounds of how many
times as long the others took. Before it comes how far apart the logits after a prompt are.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llama_cpp_engine import LlamaCpp, convert, quantize
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from workload import half_billion

import jackfield
from jackfield.bridge.bandwidth import measure_bandwidth

SHORT, LONG = 4, 36
#: Of a type of file that jackfield does not read, or of a model that it quantizes itself.
LIKE = {"float32": "F32", "bfloat16": "BF16", "int4-cpu": "Q4_0", "int8-cpu": "Q8_0"}
#: hidden, intermediate, layers, heads, vocabulary: the shapes of Qwen2.5, and a smaller one
SHAPES = {"0.1B": (768, 2048, 12, 12, 32000), "1.5B": (1536, 8960, 28, 12, 151936)}
MODELS = ("0.1B", "0.5B", "1.5B")

Run = Callable[[list[list[int]], int], object]


def model_of(name: str, dtype: torch.dtype) -> PreTrainedModel:
    if name == "0.5B":
        return half_billion(dtype)
    hidden, intermediate, layers, heads, vocabulary = SHAPES[name]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=2,
        max_position_embeddings=32768, tie_word_embeddings=True, initializer_range=0.05,
        use_sliding_window=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval().to(dtype)  # type: ignore[no-any-return]


def files(model: PreTrainedModel, weights: str, folder: Path) -> tuple[Path, Path]:
    """What jackfield and llama.cpp read."""
    kind = weights.partition("?")[0]
    whole, quantized = folder / "whole.gguf", folder / f"{kind}.gguf"
    convert(model, whole)
    quantize(whole, quantized, LIKE.get(kind, kind))
    whole.unlink()
    if kind not in LIKE:
        return quantized, quantized
    model.save_pretrained(folder / "model")
    return folder / "model", quantized


def load(path: Path, weights: str, **given: Any) -> jackfield.Engine:
    kind, asks, options = weights.partition("?")
    if kind.endswith("-cpu"):
        given["quantization"] = weights
    elif asks:
        given["quantization"] = f"gguf?{options}"
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    return jackfield.load(path, dtype=dtype, **given)


def contenders(model: PreTrainedModel, engine: jackfield.Engine, llama: LlamaCpp) -> dict[str, Run]:

    def generate(prompts: list[list[int]], new: int) -> object:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)

    return {
        "native": lambda prompts, new: engine.generate(
            prompts, max_new_tokens=new, min_new_tokens=new
        ),
        "llama.cpp": llama.generate,
        "generate": generate,
    }


def seconds(run: Run, prompts: list[list[int]]) -> tuple[float, float]:
    """Of one decode step, and to the first token."""
    found = []
    for new in (1, SHORT, LONG):
        began = time.perf_counter()
        run(prompts, new)
        found.append(time.perf_counter() - began)
    return (found[2] - found[1]) / (LONG - SHORT), found[0]


def apart(mine: Path, weights: str, llama: LlamaCpp, model: Any, prompt: list[int]) -> str:
    """How far logits after a prompt are from one another, by their norm."""
    ids = torch.tensor([prompt])
    with load(mine, weights, compile="none", cache_implementation="dynamic") as engine:
        logits = engine.model(ids).logits
    found = {
        "jackfield": logits[0, -1].float(),
        "llama.cpp": llama.logits(prompt),
        "the whole model": model(ids).logits[0, -1].float(),
    }
    return ", ".join(
        f"{a} and {b} {float((found[a] - found[b]).norm() / found[b].norm()):.4f}"
        for a, b in itertools.combinations(found, 2)
    )


def ratio(other: list[float], mine: list[float]) -> str:
    ratios = sorted(b / a for a, b in zip(mine, other, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def measure(
    label: str, runs: dict[str, Run], prompts: list[list[int]], limit: float, rounds: int
) -> None:
    for run in runs.values():
        run(prompts, LONG)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            took[name].append(seconds(run, prompts))
    cells = [label]
    for part in (0, 1):
        parts = {name: [times[part] for times in found] for name, found in took.items()}
        cells += [f"{statistics.median(times) * 1e3:.2f}" for times in parts.values()]
        cells += [f"{limit * 1e3:.2f}"] * (part == 0)
        cells += [ratio(parts[name], parts["native"]) for name in ("llama.cpp", "generate")]
    print("| " + " | ".join(cells) + " |", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("weights")
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype = torch.float32 if given.weights == "float32" else torch.bfloat16
    model = model_of(given.model, dtype)
    most = max(given.rows)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(5, 30000, (most, given.prompt), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        mine, theirs = files(model, given.weights, Path(folder))
        llama = LlamaCpp(theirs, sequences=most, context=given.prompt + LONG, threads=given.threads)
        print(f"apart: {apart(mine, given.weights, llama, model, prompts[0])}", flush=True)
        engine = load(
            mine, given.weights, compile="native", max_batch_size=most,
            cache_implementation="paged?prefix_sharing=false",  # prompts come again
        )  # fmt: skip
        runs = contenders(model, engine, llama)
        limit = theirs.stat().st_size / measure_bandwidth("cpu")
        for rows in given.rows:
            label = f"{given.model} | {given.weights} | {given.prompt} | {rows}"
            measure(label, runs, prompts[:rows], limit, given.rounds)


if __name__ == "__main__":
    main()
