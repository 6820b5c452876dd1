"""``quantized`` is lossy: its numbers are those of a plain round trip, or within one step of them.

quanto and fp8 are compared with a reference written here in plain torch, whole generations long;
hqq searches for its scales, so its states are bounded by the step of their group, and its text is
compared with `generate` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families import build, config_of, prompts
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer
from transformers.utils.import_utils import is_hqq_available, is_optimum_quanto_available

import jackfield
from jackfield.errors import OptionError, PlanError

needs_quanto = pytest.mark.skipif(
    not is_optimum_quanto_available(), reason="needs optimum-quanto: pip install jackfield[quanto]"
)
needs_hqq = pytest.mark.skipif(
    not is_hqq_available(), reason="needs hqq: pip install jackfield[hqq]"
)

GROUP, RESIDUAL, COUNT = 8, 4, 14
PROMPTS = prompts((3, 5, 12))
GROUPED = f"q_group_size={GROUP}&residual_length={RESIDUAL}"
HQQ = [f"quantized?backend=hqq&{GROUPED}&nbits={nbits}" for nbits in (4, 8)]

model_of = functools.lru_cache(lambda family: build(family, torch.float32))


def quanto_round_trip(states: torch.Tensor, nbits: int) -> torch.Tensor:
    """Groups of neighbours, each on a grid of 2**nbits steps between its ends."""
    groups = states.reshape(-1, GROUP)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / (2**nbits - 1)
    grid = ((groups - low) / step).round().clamp(0, 2**nbits - 1)
    return (grid * step + low).reshape(states.shape)


class Recent(DynamicLayer):
    """Round-trips everything whenever `RESIDUAL` tokens have come in whole."""

    nbits = 4

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = not self.is_initialized
        self.whole = 0 if first else self.whole + keys.shape[2]
        found = super().update(keys, values)
        if first or self.whole >= RESIDUAL:
            self.keys, self.values = (quanto_round_trip(t, self.nbits) for t in found)
            self.whole = 0
        return found


class Coarse(Recent):
    nbits = 2


class Fp8(DynamicLayer):
    """Round-trips every token, on one scale that the first ones set; those are attended whole."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = not self.is_initialized
        if first:
            self.scales = [t.abs().max() / 448 for t in (keys, values)]
        found = super().update(*map(self.round_trip, (keys, values), self.scales))
        return (keys, values) if first else found

    @staticmethod
    def round_trip(states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (states / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


REFERENCES = [
    pytest.param(f"quantized?backend=quanto&{GROUPED}", Recent, marks=needs_quanto),
    pytest.param(f"quantized?backend=quanto&{GROUPED}&nbits=2", Coarse, marks=needs_quanto),
    pytest.param("quantized?backend=fp8", Fp8),
]


def generated(prompt: list[int], family: str = "llama", **arguments: Any) -> Any:
    ids = torch.tensor([prompt])
    return model_of(family).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=COUNT,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **arguments,
    )


def logprobs(output: Any, length: int) -> list[tuple[int, float]]:
    """The new tokens of `generate` and their log-probabilities."""
    tokens = output.sequences[0, length:].tolist()
    scores = [logits[0].log_softmax(-1) for logits in output.logits]
    return [(token, float(row[token])) for token, row in zip(tokens, scores, strict=True)]


def alike(found: list[tuple[int, float]], reference: list[tuple[int, float]]) -> bool:
    close = all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(found, reference, strict=True))
    return close and [token for token, _ in found] == [token for token, _ in reference]


@pytest.mark.parametrize("family", ["llama", "llama-mqa", "gpt2"])
@pytest.mark.parametrize(("selection", "layer"), REFERENCES)
def test_generations_equal_a_plain_round_trip(
    selection: str, layer: type[DynamicLayer], family: str
) -> None:
    model = model_of(family)
    exact = []
    with jackfield.load(model, cache_implementation=selection) as engine:
        for prompt in PROMPTS:
            (done,) = engine.generate(prompt, max_new_tokens=COUNT, logprobs=0)
            found = [(p.token_id, p.logprob) for p in done.logprobs]
            past = transformers.Cache(layers=[layer() for _ in range(2)])
            reference = generated(prompt, family, past_key_values=past)
            assert alike(found, logprobs(reference, len(prompt)))
            exact.append(alike(found, logprobs(generated(prompt, family), len(prompt))))
    assert not all(exact), "nothing was lost, so nothing was quantized"


@pytest.mark.parametrize(
    ("selection", "config"),
    [
        pytest.param(HQQ[0], {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1,
                              "q_group_size": GROUP, "residual_length": RESIDUAL}, marks=needs_hqq),
        pytest.param(HQQ[1], {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1,
                              "q_group_size": GROUP, "residual_length": RESIDUAL}, marks=needs_hqq),
        pytest.param(f"quantized?{GROUPED}", {"backend": "quanto", "q_group_size": GROUP,
                                              "residual_length": RESIDUAL}, marks=needs_quanto),
        ("quantized?backend=fp8", {"backend": "fp8"}),
    ],
)  # fmt: skip
def test_generate_says_the_same_with_its_own_and_with_ours(
    selection: str, config: dict[str, Any]
) -> None:
    model = model_of("llama")
    for prompt in PROMPTS:
        own = generated(prompt, cache_implementation="quantized", cache_config=config)
        ours = generated(prompt, past_key_values=jackfield.cache(selection, model))
        with jackfield.load(model, cache_implementation=selection) as engine:
            (done,) = engine.generate(prompt, max_new_tokens=COUNT)
        assert ours.sequences.tolist() == own.sequences.tolist()
        assert [*prompt, *done.token_ids] == own.sequences[0].tolist()


@needs_hqq
@pytest.mark.parametrize("nbits", [1, 2, 4, 8])
def test_hqq_stays_within_a_step_of_its_group(nbits: int) -> None:
    layer = cache_utils.HQQQuantizedLayer(
        nbits=nbits, axis_key=1, axis_value=1, q_group_size=GROUP, residual_length=RESIDUAL
    )
    keys = torch.randn(2, 4, 6, 16, generator=torch.Generator().manual_seed(0))
    layer.update(keys, keys)
    kept = layer._dequantize(layer._quantized_keys).reshape(-1, GROUP)
    groups = keys.reshape(-1, GROUP)
    step = (groups.amax(1) - groups.amin(1)) / (2**nbits - 1)
    assert bool(((kept - groups).abs().amax(1) <= step).all())
    assert float((kept - groups).abs().max()) > 0


BATCHES = [
    pytest.param(f"quantized?backend=quanto&{GROUPED}", marks=needs_quanto),
    *(pytest.param(selection, marks=needs_hqq) for selection in HQQ),
]


@pytest.mark.parametrize("selection", BATCHES)
def test_groups_do_not_mix_the_rows_of_a_batch(selection: str) -> None:
    """Neither padding nor neighbours nor rows that end change what is said."""
    counts = [COUNT, 2, 9]
    with jackfield.load(model_of("llama"), cache_implementation=selection) as engine:
        alone = [engine.generate(prompt, max_new_tokens=COUNT)[0].token_ids for prompt in PROMPTS]
        together = engine.generate(PROMPTS, settings=[{"max_new_tokens": n} for n in counts])
    assert [c.token_ids for c in together] == [
        tokens[:n] for tokens, n in zip(alone, counts, strict=True)
    ]


SENSIBLE = [
    pytest.param("quantized?backend=quanto&q_group_size=32&residual_length=8", marks=needs_quanto),
    pytest.param("quantized?backend=hqq&q_group_size=16&residual_length=8", marks=needs_hqq),
    "quantized?backend=fp8",
]


@pytest.mark.parametrize("selection", SENSIBLE)
def test_the_demo_model_still_answers(selection: str) -> None:
    task = "Sort: 4 9 1 7"
    with jackfield.load("demo") as engine:
        (exact,) = engine.generate([[{"role": "user", "content": task}]], max_new_tokens=24)
    with jackfield.load("demo", cache_implementation=selection) as engine:
        (lossy,) = engine.generate([[{"role": "user", "content": task}]], max_new_tokens=24)
    assert lossy.finish_reason == exact.finish_reason
    assert lossy.text == exact.text


def refuse(family: str, selection: str, dtype: str = "float32") -> str:
    with pytest.raises(PlanError) as caught:
        jackfield.plan(config_of(family), cache_implementation=selection, dtype=dtype)
    return str(caught.value)


def test_what_it_cannot_hold_is_refused_by_name() -> None:
    fp8 = "quantized?backend=fp8"
    assert "does not hold sliding_attention layers" in refuse("mistral", fp8)
    assert "does not hold dtype float64" in refuse("llama", fp8, "float64")
    assert "groups of 64 do not divide heads of 8; write 'q_group_size=8'" in refuse(
        "llama", "quantized"
    )
    assert "hqq packs 8 groups of 1 bits into a byte, and a token has 2 of 8" in refuse(
        "llama", "quantized?backend=hqq&nbits=1&q_group_size=8"
    )


@pytest.mark.parametrize(
    ("backend", "available"), [("quanto", is_optimum_quanto_available), ("hqq", is_hqq_available)]
)
def test_a_missing_library_says_what_to_install(
    backend: str, available: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        f"transformers.utils.import_utils.{available.__name__}", lambda *_, **__: False
    )
    message = refuse("llama", f"quantized?backend={backend}&{GROUPED}")
    assert f"pip install 'jackfield[{backend}]'" in message


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cache_utils, "Fp8QuantizedLayer")
    message = refuse("llama", f"quantized?{GROUPED}")
    assert "cannot take a finished row out of a quantized cache" in message


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        ("quantized?backend=int8", "must be one of quanto, hqq, fp8"),
        ("quantized?nbits=3", "must be one of 1, 2, 4, 8"),
        ("quantized?nbits=8", "backend quanto stores nbits=2, 4, not 8"),
        ("quantized?backend=fp8&q_group_size=8", "backend fp8 has no q_group_size"),
        ("quantized?residual_length=0", "residual_length must be at least 1"),
    ],
)
def test_options_are_checked(selection: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        jackfield.plan("demo", cache_implementation=selection)
