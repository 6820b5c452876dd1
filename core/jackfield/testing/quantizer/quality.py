"""What a quantizer does to a trained model: the perplexity of the demo model."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn

from jackfield.api import plan
from jackfield.demo import MODEL_PATH
from jackfield.demo.tasks import TASKS, heldout
from jackfield.errors import PlanError, shown
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.quantizer.loads import Loads, allowed

ITEMS = 3  # of each task
SEEDS = (1, 2)


def checks(loads: Loads) -> Iterator[Check]:
    """One; it takes as long as the demo model takes to be quantized."""

    def run(_: object) -> str:
        return _quality(loads)

    yield Check("quality.demo", "relative_error", run, limit=240)


def _quality(loads: Loads) -> str:
    """Perplexity is no worse than with noise of the declared size in every weight, twice over."""
    arguments = loads.arguments(loads.dtype())
    try:
        plan(MODEL_PATH, **arguments)
    except PlanError as error:
        loads.main()
        raise NotTriedError(shown(error, 300)) from None
    exact: Any = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL_PATH, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    texts = _texts()
    whole = _loss(exact, texts)
    with loads.another(MODEL_PATH, cache_implementation="dynamic", **arguments) as engine:
        found = _loss(engine.model, texts)
        share = loads.backend.relative_error(loads.subject.options)
        if share is None:
            share = _allowed(loads, engine.model, exact)
    rise = max(_loss(_noisy(exact, share, seed), texts) - whole for seed in SEEDS)
    bound = whole + 2 * max(rise, 0.0) + 0.01
    words = f"{math.exp(found):.4g} (whole {math.exp(whole):.4g}, at most {math.exp(bound):.4g})"
    if not found <= bound:
        raise WrongError(f"the perplexity of the demo model is {words}")
    return f"perplexity {words}"


def _texts() -> list[torch.Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_PATH)
    found = []
    for task in TASKS:
        for item in heldout(task, ITEMS, seed=4):
            chat = [{"role": "user", "content": item.prompt},
                    {"role": "assistant", "content": item.answer}]  # fmt: skip
            found.append(torch.tensor([tokenizer.apply_chat_template(chat, return_dict=False)]))
    return found


@torch.inference_mode()
def _loss(model: Any, texts: list[torch.Tensor]) -> float:
    """Mean negative log-likelihood of a token, in nats."""
    total, count = 0.0, 0
    for ids in texts:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        losses = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        total, count = total + float(losses), count + ids.shape[1] - 1
    return total / count


def _noisy(exact: Any, error: float, seed: int) -> Any:
    """A copy whose linear layers, the head aside, have Gaussian noise in every weight."""
    model = copy.deepcopy(exact)
    drawn = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            weight = module.weight.data
            size = error * float(weight.norm()) / weight.numel() ** 0.5
            weight += size * torch.randn(weight.shape, generator=drawn)
    return model


def _allowed(loads: Loads, model: Any, exact: Any) -> float:
    """The largest error that the bits of any layer allow."""
    shapes = dict(exact.named_modules())
    found = [
        allowed(module, shapes[path].weight)
        for path, module in model.named_modules()
        if loads.backend.converted(module)
    ]
    return max(found, default=0.0)
