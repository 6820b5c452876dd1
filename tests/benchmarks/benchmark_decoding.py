"""Drafts against plain decoding: the same model, the same tokens, in turn.

The demo pair (assisted), copying and editing (prompt lookup), and a random model whose draft is a
cut-down copy that is right as often as we like, against what the formula of Leviathan et al. 2023
(arXiv:2211.17192, theorem 3.8) predicts from the times of the two models.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import jackfield
from jackfield.demo.tasks import heldout

ITEMS = 3
NEW = 60
DRAFTS = 4  # of the random pair


def runner(engine: jackfield.Engine, texts: list[list[int]], batch: int) -> Callable[[], Any]:
    """All texts to their end, `batch` at a time; returns their tokens."""

    def run() -> list[list[int]]:
        return [
            completion.token_ids
            for at in range(0, len(texts), batch)
            for completion in engine.generate(texts[at : at + batch], max_new_tokens=NEW)
        ]

    return run


def demo_texts(engine: jackfield.Engine, tasks: tuple[str, ...]) -> list[list[int]]:
    items = [item for task in tasks for item in heldout(task, ITEMS, seed=1)]
    return [
        engine._assembly.text.encode([{"role": "user", "content": item.prompt}]) for item in items
    ]


def measure(engine: jackfield.Engine, texts: Any, batch: int, alternate: Any, capsys: Any) -> None:
    """Against the same kind of engine that decodes plainly."""
    with jackfield.load("demo") as plain:
        ours, theirs = runner(engine, texts, batch), runner(plain, texts, batch)
        units = sum(map(len, theirs()))
        alternate(ours, theirs, units, rounds=7)
    with capsys.disabled():
        print(f"  {engine.report().speculation}")  # noqa: T201 - the figures are what this is for


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("tasks", [("copy", "edit", "json"), ("arithmetic", "sort", "reverse")])
def benchmark_demo_assisted(
    tasks: tuple[str, ...], batch: int, alternate: Any, capsys: Any
) -> None:
    with jackfield.load("demo", decoding="assisted", assistant_model="demo-draft") as engine:
        measure(engine, demo_texts(engine, tasks), batch, alternate, capsys)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("task", ["copy", "edit"])
def benchmark_demo_prompt_lookup(task: str, batch: int, alternate: Any, capsys: Any) -> None:
    with jackfield.load("demo", decoding="prompt_lookup") as engine:
        measure(engine, demo_texts(engine, (task,)), batch, alternate, capsys)


def random_pair(
    layers: int = 12, kept: int = 2, said: float = 0.05
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """100 million random weights, and the first layers of the same model.

    The others add only so much of what they would, so that the cut-down copy often agrees.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        initializer_range=0.1,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for layer in model.model.layers[kept:]:
            layer.self_attn.o_proj.weight *= said
            layer.mlp.down_proj.weight *= said
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:kept]
    small.config.num_hidden_layers = kept
    return model, small


def expected_tokens(rate: float, drafts: int) -> float:
    """How many tokens a step gains where each draft is right with probability `rate`."""
    return drafts + 1 if rate == 1 else (1 - rate ** (drafts + 1)) / (1 - rate)


def agreement(model: PreTrainedModel, small: PreTrainedModel, ids: torch.Tensor) -> float:
    """How often the two choose the same one of the last tokens, without any of our code."""
    with torch.inference_mode():
        one, other = (m(ids, logits_to_keep=NEW + 1).logits.argmax(-1) for m in (model, small))
    return float((one == other)[:, :-1].double().mean())


def timed(forward: Callable[[Any], Any], seconds: list[float]) -> Callable[[Any], Any]:
    """`forward`, which notes the processor's time that it takes."""

    def run(inputs: Any) -> Any:
        start = time.process_time()
        logits = forward(inputs)
        seconds.append(time.process_time() - start)
        return logits

    return run


@pytest.mark.timeout(0)
@pytest.mark.parametrize("batch", [1, 8])
def benchmark_against_the_formula(batch: int, alternate: Any, capsys: Any) -> None:
    model, small = random_pair()
    texts = torch.randint(5, 16000, (batch, 32), generator=torch.Generator().manual_seed(1))
    options = "assistant_confidence_threshold=0&min_acceptance_rate=0&min_speedup=0"
    strategy = f"assisted?num_assistant_tokens={DRAFTS}&{options}"
    with (
        jackfield.load(copy.deepcopy(model)) as plain,
        jackfield.load(copy.deepcopy(model), decoding=strategy,
                       assistant_model=copy.deepcopy(small)) as engine,
    ):  # fmt: skip
        draft = engine._loop.decoding.strategies["assisted"]._inner._assistant.bound  # type: ignore[attr-defined]
        took: list[list[float]] = [[], [], []]
        for one, seconds in zip((plain._loop, engine._loop, draft), took, strict=True):
            one.forward = timed(one.forward, seconds)
        ours = runner(engine, texts.tolist(), batch)
        theirs = runner(plain, texts.tolist(), batch)
        said = torch.tensor(theirs())
        rate = agreement(model, small, torch.cat([texts, said], 1))
        ratio = alternate(ours, theirs, said.numel(), rounds=5)
        found = engine.report().speculation
    assert found is not None
    step, check, guess = map(statistics.median, took)
    gain = expected_tokens(rate, DRAFTS)
    speed = gain / ((DRAFTS * guess + check) / step)
    with capsys.disabled():
        print(  # noqa: T201
            f"  agreement {rate:.2f}: {gain:.2f} tokens a step predicted, "
            f"{found.tokens_per_step:.2f} measured; a draft takes {guess / step:.2f} and a "
            f"verification {check / step:.2f} of a step: {speed:.2f} times the speed predicted, "
            f"{ratio:.2f} measured ({found})"
        )


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("batch", "said"), [(1, 0.01), (4, 0.01), (1, 0.05)])
@pytest.mark.parametrize("compiler", ["none", "native"])
def benchmark_early_exit(
    batch: int, said: float, compiler: str, alternate: Any, capsys: Any
) -> None:
    """The same model's first 3 of 24 layers."""
    model, _ = random_pair(24, 3, said)
    texts = torch.randint(5, 16000, (batch, 32), generator=torch.Generator().manual_seed(1))
    options = "assistant_confidence_threshold=0&min_acceptance_rate=0&min_speedup=0"
    strategy = f"assisted?assistant_early_exit=3&num_assistant_tokens={DRAFTS}&{options}"
    with (
        jackfield.load(copy.deepcopy(model), compile=compiler) as plain,
        jackfield.load(copy.deepcopy(model), compile=compiler, decoding=strategy) as engine,
    ):
        ours, theirs = (runner(one, texts.tolist(), batch) for one in (engine, plain))
        assert ours() == theirs()
        alternate(ours, theirs, batch * NEW, rounds=5)
        with capsys.disabled():
            print(f"  {engine.report().speculation}")  # noqa: T201
