"""int4-cpu against llama.cpp and transformers, one set of weights, in turn in one process.

    python tests/benchmarks/int4_against_llama.py [--threads 2] [--head 8] [--transformers]
    python tests/benchmarks/int4_against_llama.py --limit [--head 8]

`--head 8` stores the output head in 8 bits (8.5 with scales), which is also what llama.cpp takes
for it (Q8_0, since the width of 896 does not suit Q6_K); `--head 4` has all of both in 4 bits. The
embeddings of the model are tied: the head is a copy, and rows of the input are read from bfloat16.
`--limit` prints what a step reads, how fast memory is, and the steps a second that this allows, and
no more. Prints each engine's median tokens a second and the median over the rounds of the ratios:
of the time, and of the processor time of all threads, which other programs disturb less; it says
something with `--threads 1`, since threads that wait are busy too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from workload import half_billion

import jackfield
from jackfield_plugins.quantizer.int4_cpu.linear import GroupwiseLinear
from jackfield_plugins.quantizer.int4_cpu.quantize import dequantize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT, NEW = 128, 64
Runs = dict[str, Callable[[list[list[int]], int], object]]


def quantized_engine(model: PreTrainedModel, head_bits: int) -> jackfield.Engine:
    """`model`, read again by int4-cpu; shares no prefixes, as prompts come again in every round."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return jackfield.load(
            folder,
            quantization=f"int4-cpu?head={head_bits}&kernel=native",
            cache_implementation="paged?prefix_sharing=false",
            kernels="cpu-rms-norm",
        )


def bytes_a_token(model: PreTrainedModel) -> int:
    """What a decoding step reads of the weights."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | GroupwiseLinear)]
    return sum(
        tensor.numel() * tensor.element_size()
        for layer in layers
        for tensor in (*layer.parameters(), *layer.buffers())
    )


def bandwidth() -> float:
    """Bytes a second that all threads read of memory, the most of several readings."""
    memory = torch.ones(50_000_000, dtype=torch.int64)
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        memory.sum()
        seconds.append(time.perf_counter() - start)
    return memory.numel() * 8 / min(seconds)


def limit(model: PreTrainedModel) -> str:
    """The steps a second that reading the weights allows, with both figures that it is made of."""
    read, speed = bytes_a_token(model), bandwidth()
    return (
        f"a step reads {read / 1e6:.1f} MB of weights; memory is read at {speed / 1e9:.1f} GB/s: "
        f"{speed / read:.0f} steps/s at most"
    )


def plain(model: PreTrainedModel) -> Callable[[list[list[int]], int], object]:
    def run(prompts: list[list[int]], new: int) -> object:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)

    return run


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def timed(run: Callable[[list[list[int]], int], object], prompts: list[list[int]]) -> list[float]:
    """Seconds and processor seconds of NEW tokens, and of the decoding steps among them."""
    start = clocks()
    run(prompts, NEW)
    middle = clocks()
    run(prompts, 1)
    end = clocks()
    whole = [b - a for a, b in zip(start, middle, strict=True)]
    first = [b - a for a, b in zip(middle, end, strict=True)]
    return whole + [(a - b) / (NEW - 1) for a, b in zip(whole, first, strict=True)]


def measure(runs: Runs, batch: int, rounds: int) -> None:
    prompts = torch.randint(5, 1000, (batch, PROMPT)).tolist()
    found: dict[str, list[list[float]]] = {name: [] for name in runs}
    for run in runs.values():
        run(prompts, 2)
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(timed(run, prompts))
    for name, mine in found.items():
        seconds, processor, step, processor_step = map(statistics.median, zip(*mine, strict=True))
        times = [
            [b / a for a, b in zip(ours, theirs, strict=True)]
            for ours, theirs in zip(found["jackfield"], mine, strict=True)
        ]
        ratios = [statistics.median(column) for column in zip(*times, strict=True)]
        print(
            f"batch {batch} {name:12}: {batch * NEW / seconds:6.1f} tok/s, step {step * 1e3:6.2f} "
            f"ms; processor {processor:5.2f} s, step {processor_step * 1e3:6.2f} ms; jackfield is "
            f"faster by {ratios[0]:.2f}, a step {ratios[2]:.2f}; by processor {ratios[1]:.2f}, "
            f"a step {ratios[3]:.2f}",
            flush=True,
        )


def distance(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.float() - true.float()).norm() / true.float().norm())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--head", type=int, choices=(4, 8), default=8)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--limit", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = half_billion()
    if given.limit:
        with quantized_engine(model, given.head) as engine:
            print(limit(engine.model))
        return
    from llama_cpp_engine import LlamaCpp, convert, dequantized, quantize, types_in

    prompt = torch.randint(5, 1000, (PROMPT,)).tolist()
    true = model(torch.tensor([prompt])).logits[0, -1]
    with tempfile.TemporaryDirectory() as folder, quantized_engine(model, given.head) as engine:
        whole, quantized = Path(folder, "f16.gguf"), Path(folder, "q4_0.gguf")
        convert(model, whole)
        quantize(whole, quantized, pure=given.head == 4)
        print("llama.cpp has", types_in(quantized))
        context = PROMPT + NEW
        llama = LlamaCpp(
            quantized, sequences=max(given.batches), context=context, threads=given.threads
        )
        exact = LlamaCpp(whole, sequences=1, context=context, threads=given.threads)
        print(f"the file's logits differ by {distance(exact.logits(prompt), true):.3f}")
        name, layer = "blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj"
        weight = model.get_submodule(layer).weight
        mine = dequantize(engine.model.get_submodule(layer).quantized())
        theirs = torch.from_numpy(dequantized(quantized, name))
        print(
            f"{layer} differs by {distance(mine, weight):.4f} here, {distance(theirs, weight):.4f} "
            "in llama.cpp"
        )
        runs: Runs = {
            "jackfield": lambda prompts, new: engine.generate(prompts, max_new_tokens=new),
            "llama.cpp": llama.generate,
        }
        if given.transformers:
            runs["transformers"] = plain(model)
        print(limit(engine.model))
        for batch in given.batches:
            measure(runs, batch, given.rounds)


if __name__ == "__main__":
    main()
