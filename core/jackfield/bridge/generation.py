"""``generate(custom_generate=jackfield.decoding("plugin:NAME"))`` in plain transformers code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from jackfield.asking.vocabulary import INERT
from jackfield.bridge.install import selected
from jackfield.errors import UsageError

#: Processors that know which row they look at, or what all rows began with.
_BY_ROW = (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)
#: Settings of beam search and contrastive search, which are no processors.
_SEARCH = (
    "num_beams", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty",
    "penalty_alpha",
)  # fmt: skip
#: What the loop does by itself; any other criterion would be lost.
_UNDERSTOOD = (EosTokenCriteria, MaxLengthCriteria)

PLACES = 32  # sequences that run together, so that a search has places for its beams


def decoding(selection: str, **arguments: Any) -> Callable[..., torch.Tensor]:
    """A function for `generate(custom_generate=…)` that decodes with the selected strategy.

    `arguments` are those of `jackfield.load`, such as `assistant_model` or `cache_implementation`;
    the attention is the model's own choice unless it is among them. What `generate` prepares from
    its settings and is given (`logits_processor`) is applied as it is. Stopping criteria of a
    caller's own, `num_beams` and its like (``beam?num_beams=4`` asks for beams), a filled cache and
    dictionaries as results raise UsageError. `generate` itself does not hand on a streamer. Models
    are planned and bound anew in each call.
    """

    def custom_generate(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        from jackfield.front import load

        _check(stopping_criteria, generation_config, model_kwargs)
        prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
        _check_rows(logits_processor, len(prompts))
        longest, ends = _limits(stopping_criteria)
        padding = _padding(generation_config)
        own = {
            "attn_implementation": selected(model),
            "max_batch_size": max(PLACES, len(prompts)),
            **arguments,
        }
        with load(model, decoding=selection, **own) as engine:
            found = engine.generate(
                prompts,
                settings=[
                    {"seed": seed, "logits_processor": _as_padded(logits_processor, gap, padding)}
                    for seed, gap in zip(
                        _seeds(len(prompts)),
                        (input_ids.shape[1] - len(prompt) for prompt in prompts),
                        strict=True,
                    )
                ],
                generation_config=GenerationConfig(eos_token_id=ends or None),
                max_new_tokens=longest - input_ids.shape[1],
                do_sample=bool(generation_config.do_sample),
            )
        for completion in found:
            if completion.error is not None:
                raise UsageError(f"generate with {selection!r}: {completion.error}")
        return _joined(input_ids, [c.token_ids for c in found], padding)

    return custom_generate


def _check(criteria: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse what would be lost."""
    lost = [type(c).__name__ for c in criteria if not isinstance(c, _UNDERSTOOD)]
    past = model_kwargs.get("past_key_values")
    for stray, what in (
        (lost, f"the stopping criteria {', '.join(lost)}"),
        (_searches(config), ", ".join(_searches(config))),
        (config.return_dict_in_generate, "return_dict_in_generate=True"),
        (past is not None and past.get_seq_length() > 0, "past_key_values that hold tokens"),
        (model_kwargs.get("inputs_embeds") is not None, "inputs_embeds"),
        (config.cache_implementation, f"cache_implementation={config.cache_implementation!r}"),
        (config.use_cache is False, "use_cache=False"),
    ):
        if stray:
            raise UsageError(
                f"custom_generate=jackfield.decoding(…) does not take {what}; drop it, or use "
                "jackfield.load"
            )


def _searches(config: GenerationConfig) -> list[str]:
    """What asks for a search of `generate`'s own."""
    values = {name: getattr(config, name, None) for name in _SEARCH}
    return [
        f"{name}={value}"
        for name, value in values.items()
        if value is not None and value not in INERT.get(name, ())
    ]


def _check_rows(processors: Any, count: int) -> None:
    """Refuse processors that look at all rows together; each row is processed by itself."""
    stray = [type(p).__name__ for p in processors if isinstance(p, _BY_ROW)]
    if stray and count > 1:
        raise UsageError(
            f"custom_generate=jackfield.decoding(…) takes {stray[0]} for one prompt at a time; "
            "generate the prompts one by one"
        )


def _limits(criteria: Any) -> tuple[int, list[int]]:
    """The length, prompt included, and the tokens at which the criteria end a text."""
    lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    ends = [c.eos_token_id.flatten().tolist() for c in criteria if isinstance(c, EosTokenCriteria)]
    return min(lengths), sorted({token for several in ends for token in several})


def _as_padded(processors: Any, gap: int, padding: int) -> list[Callable[..., torch.Tensor]]:
    """The processors, which are shown a row as it was given, with `gap` tokens of padding."""

    def shown(processor: Any) -> Callable[..., torch.Tensor]:
        def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return processor(torch.cat([ids.new_full((1, gap), padding), ids], 1), scores)  # type: ignore[no-any-return]

        return process

    return [shown(processor) for processor in processors]


def _seeds(count: int) -> list[int]:
    """From torch's generator, so that `torch.manual_seed` decides."""
    return torch.randint(1 << 62, (count,)).tolist()


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
