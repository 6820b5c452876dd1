"""``generate(custom_generate=jackfield.decoding("plugin:NAME"))`` in plain transformers code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from jackfield.bridge.generate_call import arguments as arguments_of_generate
from jackfield.bridge.generate_call import check_processors, refuse_lost
from jackfield.engine.streaming import check_streamer, put_tokens
from jackfield.errors import UsageError
from jackfield.in_transformers.attention import selected
from jackfield.requests.token_settings import AllowedByPrefix
from jackfield.requests.wishes import VOCABULARY

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from jackfield.engine.completions import Completion
    from jackfield.engine.engine import Engine

#: What the loop does by itself; it asks every other criterion after each token.
_UNDERSTOOD = (EosTokenCriteria, MaxLengthCriteria)

PLACES = 32  # sequences that run together, so that a search has places for its beams


def decoding(selection: str, **arguments: Any) -> Callable[..., torch.Tensor]:
    """A function for `generate(custom_generate=…)` that decodes with the selected strategy.

    `arguments` are those of `jackfield.load`, such as `assistant_model` or `cache_implementation`;
    the attention is the model's own choice unless it is among them. What `generate` prepares from
    its settings and is given (`logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`,
    `streamer`) is applied as it is, to each row by itself. Whatever would be lost raises
    UsageError by name: `num_beams` and its like (``beam?num_beams=4`` asks for beams), a cache,
    dictionaries as results, arguments for the model's forward. Models are planned and bound anew
    in each call.
    """

    def custom_generate(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        from jackfield.api import load

        given = arguments_of_generate(input_ids)
        refuse_lost(model, generation_config, given, model_kwargs)
        prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
        check_processors(logits_processor, len(prompts), packed=False)
        if (streamer := given.get("streamer")) is not None:
            check_streamer(streamer, len(prompts))
        own = {
            "attn_implementation": selected(model),
            "max_batch_size": max(PLACES, len(prompts)),
            **arguments,
        }
        padding = _padding(generation_config)
        settings = _settings(input_ids, prompts, logits_processor, stopping_criteria, padding)
        common = _common(input_ids, stopping_criteria, generation_config)
        with load(model, decoding=selection, **own) as engine:
            packed = engine.plan.requirements.layout == "packed"
            check_processors(logits_processor, len(prompts), packed=packed)
            found = _run(engine, prompts, settings, common, streamer)
        for completion in found:
            if completion.error is not None:
                raise UsageError(f"generate with {selection!r}: {completion.error}")
        if streamer is not None:  # which hears of no end where something failed, as in transformers
            streamer.end()
        return _joined(input_ids, [c.token_ids for c in found], padding)

    return custom_generate


def _run(
    engine: Engine,
    prompts: list[list[int]],
    settings: list[dict[str, Any]],
    common: dict[str, Any],
    streamer: Any,
) -> list[Completion]:
    if streamer is None:
        return engine.generate(prompts, settings=settings, **common)
    return [put_tokens(streamer, engine.submit(prompts[0], **settings[0], **common))]


def _common(input_ids: torch.Tensor, criteria: Any, config: GenerationConfig) -> dict[str, Any]:
    """The settings of all rows. What the model's own config says is in the processors already."""
    lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    ends = [c.eos_token_id.flatten().tolist() for c in criteria if isinstance(c, EosTokenCriteria)]
    return {
        **dict.fromkeys(VOCABULARY),
        "eos_token_id": sorted({token for several in ends for token in several}),
        "max_new_tokens": min(lengths) - input_ids.shape[1],
        "do_sample": bool(config.do_sample),
    }


def _settings(
    input_ids: torch.Tensor,
    prompts: list[list[int]],
    processors: Any,
    criteria: Any,
    padding: int,
) -> list[dict[str, Any]]:
    """The settings of each row: what looks at it is shown it as it was given, with its padding."""
    own = [criterion for criterion in criteria if not isinstance(criterion, _UNDERSTOOD)]
    found = []
    for row, prompt in enumerate(prompts):
        gap = input_ids.shape[1] - len(prompt)
        asked = {
            "logits_processor": [_as_padded(_of_row(p, row), gap, padding) for p in processors],
            "stopping_criteria": [_as_padded(criterion, gap, padding) for criterion in own],
        }
        found.append({name: functions for name, functions in asked.items() if functions})
    return found


def _of_row(processor: Any, row: int) -> Any:
    """The processor, for one row. One that counts the rows that it sees would count none."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return AllowedByPrefix(processor._prefix_allowed_tokens_fn, row)
    return processor


def _as_padded(function: Any, gap: int, padding: int) -> Callable[..., Any]:
    """A processor or a criterion, with `gap` tokens of padding before what it is shown."""

    def shown(ids: torch.Tensor, scores: torch.Tensor | None) -> Any:
        return function(torch.cat([ids.new_full((1, gap), padding), ids], 1), scores)

    return shown


def _prompts(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    """The tokens of each row, without the padding at its left."""
    if mask is None:
        return input_ids.tolist()
    if bool((mask.diff() < 0).any()):
        raise UsageError("prompts must be padded at their left; set padding_side='left'")
    return [row[seen.bool()].tolist() for row, seen in zip(input_ids, mask, strict=True)]


def _padding(config: GenerationConfig) -> int:
    return int(config.pad_token_id if config.pad_token_id is not None else 0)


def _joined(input_ids: torch.Tensor, new: list[list[int]], padding: int) -> torch.Tensor:
    """`[rows, prompt + new]`, filled up at the right, as `generate` returns it."""
    width = max(map(len, new))
    filled = [row + [padding] * (width - len(row)) for row in new]
    return torch.cat([input_ids, torch.tensor(filled, device=input_ids.device)], 1)
