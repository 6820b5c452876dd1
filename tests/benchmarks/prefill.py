"""How long a prompt takes, against `generate` and against its matrix products alone, and where.

`python prefill.py MODEL DTYPE TOKENS…` runs engine, `generate` and the products in turn, in one
process, and prints a row of a table for each length: medians of milliseconds until the first token,
ratios, and how far that token was from the best one in float32, in logits. `--parts` prints what of
the engine's time is spent where. DTYPE is float32, bfloat16, int4-cpu or Q4_0 (a GGUF file), and
may be followed by kernels for the engine: float32+onednn-linear.

`JACKFIELD_BENCH_CLOCK=processor OMP_NUM_THREADS=1` counts one thread's processor time.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmark_compile import demo, hundred_million
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from workload import CLOCK, Load, half_billion, regret

import jackfield

ROUNDS, APART = 5, 2


def small() -> PreTrainedModel:
    """For long prompts: most of the time is attention's."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=65536,
        initializer_range=0.05, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "demo": demo, "small": small, "110M": hundred_million, "half": half_billion,
}  # fmt: skip
QUANTIZED = ("int4-cpu", "Q4_0")


def prompt(tokens: int, vocab_size: int) -> list[int]:
    return [5 + (104729 * at * at + 7919 * at) % (vocab_size - 10) for at in range(tokens)]


def engine_of(name: str, dtype: str, places: int) -> jackfield.Engine:
    """An engine with room for the longest prompt, in which no prefix is found again."""
    dtype, _, kernels = dtype.partition("+")
    given: dict[str, Any] = {
        "cache_implementation": f"paged?prefix_sharing=false&num_tokens={places}",
        "max_batch_size": 1,
        "kernels": kernels or "auto",
    }
    if dtype not in QUANTIZED:
        torch_dtype = getattr(torch, dtype)
        return jackfield.load(MODELS[name]().to(torch_dtype), dtype=torch_dtype, **given)
    folder = Path(tempfile.mkdtemp())
    if dtype == "int4-cpu":
        MODELS[name]().to(torch.bfloat16).save_pretrained(folder)
        return jackfield.load(folder, quantization="int4-cpu", dtype=torch.bfloat16, **given)
    sys.path.append(str(Path(__file__).parents[1] / "conformance"))
    import gguf_files

    kind = gguf_files.Type[dtype]
    file = gguf_files.export(MODELS[name]().float(), folder / "model.gguf", kind)
    return jackfield.load(str(file), dtype=torch.bfloat16, **given)


def linears(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("Linear")]


class Products:
    """The matrix products of a prompt, one after another, of random rows; the head has one row."""

    def __init__(self, model: PreTrainedModel, tokens: int, step: int) -> None:
        head: Any = model.get_output_embeddings()
        dtype = next(m for m in model.modules() if "Norm" in type(m).__name__).weight.dtype
        widths = {m.in_features for m in linears(model)}  # type: ignore[attr-defined]
        rows = {n: torch.randn(1, tokens, n, dtype=dtype) for n in widths}
        self.calls: list[tuple[nn.Module, torch.Tensor]] = []
        for begin in range(0, tokens, step):
            for module in linears(model):
                part = rows[module.in_features][:, begin : begin + step]  # type: ignore[index]
                if module is not head:
                    self.calls.append((module, part))
        self.calls.append((head, rows[head.in_features][:, :1]))

    @torch.inference_mode()
    def __call__(self) -> None:
        for module, part in self.calls:
            module(part)


@contextlib.contextmanager
def parts(model: PreTrainedModel, spent: Counter[str]) -> Iterator[None]:
    """Adds to `spent` what the parts of a forward call take, in seconds, each without its own."""
    from jackfield_plugins.attention.cpu_decode.prompts import Prompts
    from jackfield_plugins.cache.paged.store import PagedKVCache

    open_parts: list[list[float]] = []

    def begin() -> None:
        open_parts.append([CLOCK(), 0.0])

    def end(part: str) -> None:
        began, inner = open_parts.pop()
        took = CLOCK() - began
        spent[part] += took - inner
        if open_parts:
            open_parts[-1][1] += took

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return function(*args, **kwargs)
            finally:
                end(part)

        return call

    names = {"Linear": "products", "RMSNorm": "norms", "RotaryEmbedding": "rotary"}
    names |= {"Attention": "rotary, reshaping", "MLP": "activation", "DecoderLayer": "residuals"}
    hooks: list[Any] = []
    for module in model.modules():
        part = next((p for tail, p in names.items() if type(module).__name__.endswith(tail)), None)
        if module is model:
            part = "embedding, the rest of the model"
        if part:
            hooks.append(module.register_forward_pre_hook(lambda *_: begin()))
            hooks.append(module.register_forward_hook(lambda *_, p=part: end(p)))
    places = ((Prompts, "attend", "attention"), (PagedKVCache, "write", "cache writes"))
    before = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, part), function in zip(places, before, strict=True):
        setattr(owner, name, timed(part, function))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, before, strict=True):
            setattr(owner, name, function)
        for hook in hooks:
            hook.remove()


def generate(model: PreTrainedModel, tokens: list[int]) -> list[int]:
    ids = torch.tensor([tokens])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
    )
    return found[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


def took(run: Callable[[], Any]) -> float:
    """Milliseconds."""
    began = CLOCK()
    run()
    return (CLOCK() - began) * 1000


def ratio(others: list[float], mine: list[float]) -> str:
    ratios = sorted(b / a for a, b in zip(mine, others, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def compare(name: str, dtype: str, tokens: int, engine: jackfield.Engine) -> None:
    exact = MODELS[name]().float()
    base = dtype.partition("+")[0]
    plain_dtype = torch.bfloat16 if base in QUANTIZED else getattr(torch, base)
    plain = MODELS[name]().to(plain_dtype)
    ids = prompt(tokens, exact.config.vocab_size)
    products = Products(engine.model, tokens, 2048)
    runs: dict[str, Callable[[], Any]] = {
        "generate": lambda: generate(plain, ids),
        "ours": lambda: engine.generate([ids], max_new_tokens=1)[0].token_ids,
        "products": products,
    }
    far = regret(exact, Load([ids], [1]), [runs["ours"]()])
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(ROUNDS):
        for label, run in runs.items():
            times[label].append(took(run))
    medians = " | ".join(f"{statistics.median(times[label]):.0f}" for label in runs)
    print(  # noqa: T201
        f"| {name} | {dtype} | {tokens} | {medians} | {ratio(times['generate'], times['ours'])} | "
        f"{ratio(times['products'], times['ours'])} | {far:.2g} |",
        flush=True,
    )


def take_apart(name: str, dtype: str, tokens: int, engine: jackfield.Engine) -> None:
    ids = prompt(tokens, engine.model.config.vocab_size)
    engine.generate([ids], max_new_tokens=1)
    spent: Counter[str] = Counter()
    with parts(engine.model, spent):
        whole = sum(
            took(lambda: engine.generate([ids], max_new_tokens=1)) / 1000 for _ in range(APART)
        )
    spent["beside the model"] = whole - spent.total()
    told = ", ".join(f"{part} {seconds / whole:.1%}" for part, seconds in spent.most_common())
    print(f"{name} {dtype} {tokens}: {whole / APART * 1000:.0f} ms: {told}", flush=True)  # noqa: T201


def main(name: str, dtype: str, lengths: list[int], *, apart: bool) -> None:
    with engine_of(name, dtype, max(lengths) + 512) as engine:
        for tokens in lengths:
            (take_apart if apart else compare)(name, dtype, tokens, engine)


if __name__ == "__main__":
    given = [word for word in sys.argv[1:] if word != "--parts"]
    main(given[0], given[1], [int(n) for n in given[2:]], apart="--parts" in sys.argv)
