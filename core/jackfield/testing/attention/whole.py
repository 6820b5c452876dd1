"""Checks of attentions in whole models: engines of jackfield, and plain transformers code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from jackfield.api import plan
from jackfield.in_transformers import attention as in_transformers
from jackfield.planning.solving import reasons_against
from jackfield.testing.attention.jobs import (
    capabilities_of,
    main_dtype,
    model_of,
    requirements_of,
)
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.engines import engine_with
from jackfield.testing.models import Reference
from jackfield.testing.subject import Subject

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHES = {"padded": "dynamic", "packed": "paged?page_size=4"}
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 9, 8, 7, 6, 5, 9], [11, 12, 13, 14, 15, 16]]

#: A model -> the features it needs beside those that `model_changes` leaves out.
MODELS = {
    "plain": "",
    "grouped_query": "grouped_query",
    "multi_query": "grouped_query",
    "mixed_head_sizes": "mixed_head_sizes",
    "sliding_window": "sliding_window",
    "softcap": "softcap",
    "sinks": "sinks",
    "chunked": "chunked",
    "bidirectional_prefix": "bidirectional_prefix",
    "own_mask": "own_mask",
    "own_attention": "own_attention",
    "position_bias": "position_bias",
}
UNPACKED = frozenset(
    {"chunked", "bidirectional_prefix", "own_mask", "own_attention", "position_bias"}
)


def checks(subject: Subject) -> Iterator[Check]:
    can = capabilities_of(subject)
    for layout in sorted(can.layouts, reverse=True):
        for name, feature in MODELS.items():
            if (feature and feature not in can.features) or (
                layout == "packed" and feature in UNPACKED
            ):
                continue
            what = f"; features: {feature}" if feature else ""
            yield Check(
                f"engine.{layout}.{name}", f"layouts: {layout}, in an engine{what}",
                _Run(subject, name, layout),
            )  # fmt: skip
        for dtype in sorted(can.dtypes - {main_dtype(subject)}):
            yield Check(
                f"engine.{layout}.{dtype}", f"dtypes: {dtype}, in an engine",
                _Run(subject, "plain", layout, dtype),
            )  # fmt: skip
        yield Check(
            f"engine.{layout}.drafts", f"layouts: {layout}, drafts in an engine",
            _Run(subject, "plain", layout, decoding="prompt_lookup"),
        )  # fmt: skip
    if "padded" in can.layouts:
        yield Check(
            "engine.static", "layouts: padded, in a static cache",
            _Run(subject, "plain", "padded", cache_implementation="static"),
        )  # fmt: skip
        yield Check(
            "transformers.generate", "layouts: padded, in plain transformers code",
            lambda _: _in_transformers(subject),
        )  # fmt: skip
    if can.batch_invariant:
        yield Check(
            "engine.deterministic", "batch_invariant, in an engine",
            _Run(subject, "plain", "packed" if "packed" in can.layouts else "padded",
                 deterministic=True),
        )  # fmt: skip


class _Run:
    """Ragged prompts in chunks, then decoding; every logit is computed again."""

    def __init__(
        self, subject: Subject, name: str, layout: str, dtype: str = "", **arguments: Any
    ) -> None:
        self._subject, self._name, self._layout, self._dtype = subject, name, layout, dtype
        self._arguments = {"cache_implementation": CACHES[layout], **arguments}

    def __call__(self, _: object) -> str:
        model = model_of(self._subject, self._name, self._dtype)
        served(self._subject, model, self._layout)
        own = self._name == "bidirectional_prefix"
        reference = Reference(model, [tuple(p) for p in PROMPTS] if own else ())
        selected = {"attn_implementation": self._subject.selection, **self._arguments}
        whole = plan(model.to(self._subject.device), **selected).requirements.whole_prompt  # type: ignore[arg-type]
        size = {} if whole or self._name == "chunked" else {"prefill_chunk_size": 4}
        with engine_with(self._subject, model, **size, **self._arguments) as (engine, computed):
            engine.generate(PROMPTS, max_new_tokens=7)
        return computed.compare(reference)


def served(subject: Subject, model: PreTrainedModel, layout: str) -> None:
    """Raise NotTriedError where `subject` refuses the model for a reason of its own."""
    needs = requirements_of(subject, model, layout)
    if reasons := reasons_against(subject.registered, needs, subject.options):
        raise NotTriedError(f"it refuses {needs.architecture}: {'; '.join(reasons)}")


def _in_transformers(subject: Subject) -> str:
    """`generate` of transformers with rows that are padded on the left, against the same alone."""
    name = "grouped_query" if "grouped_query" in capabilities_of(subject).features else "plain"
    model: Any = model_of(subject, name)
    served(subject, model, "padded")
    reference = Reference(model)
    model.to(subject.device)
    before = in_transformers.installed()
    in_transformers.install()
    try:
        model.set_attn_implementation(subject.selection)
        found = _generated(model)
    finally:
        if not before:
            in_transformers.uninstall()
    worst = 0.0
    for row, (prompt, tokens, logits) in enumerate(found):
        whole = (*prompt, *tokens)
        right, bound = reference.logits(whole), reference.bound(whole)
        for step in range(len(tokens)):
            off = float((logits[step] - right[len(prompt) + step - 1]).abs().max())
            if not off <= bound:
                raise WrongError(
                    f"the logits of row {row} of a batch with padding are off by {off:.3g} in step "
                    f"{step} (computed again, alone, in float64; at most {bound:.3g} is rounding)"
                )
            worst = max(worst, off)
    return f"at most {worst:.2g} off"


def _generated(model: PreTrainedModel) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Each prompt, its new tokens, and float64 logits `[tokens, vocab]` of these."""
    width = max(map(len, PROMPTS))
    padded = [[0] * (width - len(p)) + p for p in PROMPTS]
    ids = torch.tensor(padded, device=model.device)
    mask = (torch.arange(width) >= torch.tensor([[width - len(p)] for p in PROMPTS])).long()
    output: Any = model.generate(  # type: ignore[operator]
        ids, attention_mask=mask.to(ids.device), max_new_tokens=5, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    logits = torch.stack(output.logits, 1).double().cpu()
    return [
        (prompt, output.sequences[row, width:].tolist(), logits[row])
        for row, prompt in enumerate(PROMPTS)
    ]
