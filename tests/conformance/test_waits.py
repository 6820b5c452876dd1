"""On a GPU a step waits once, to read its tokens: counted on a device that is none.

A stray `.item()`, an index by a list, or a tensor made of numbers is no fault that a CPU shows, and
each costs a GPU the time in which it has nothing to do.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from counting_device import DEVICE, RUBBISH, CountingDevice, counting_device
from driven import Arrival, drive, tokens
from families import WINDOW, build, prompts

import jackfield
from jackfield.contracts import StepBlock, staging
from jackfield.engine.ahead import Begun
from jackfield.engine.checked_search import _packed
from jackfield.registry.backends import Registered
from jackfield_plugins.attention.sdpa import SdpaAttention
from jackfield_plugins.attention.varlen import Rows, VarlenKernel, bind_varlen
from jackfield_plugins.attention.varlen_probe import reference

TEXTS = [*prompts((3, 20)), [7, 8, 9] * 4]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 3},
    "top-k": {"top_k": 5, "seed": 3},
    "top-p": {"top_p": 0.8, "min_p": 0.05, "seed": 3},
    "penalties": {
        "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2,
        "min_new_tokens": 3, "eos_token_id": [5, 6], "sequence_bias": {(3,): 2.0, (4, 5): 1.0},
    },
    "typical": {"typical_p": 0.9, "top_h": 0.6, "seed": 3},
    "cut": {"epsilon_cutoff": 1e-3, "eta_cutoff": 2e-3, "seed": 3},
    "logprobs": {"logprobs": 3},
    "told": {"output_logits": True, "output_scores": True, "logprobs": 0, "top_k": 5, "seed": 3},
    "beams": {"decoding": "beam", "num_beams": 3},
    "sampled beams": {"decoding": "beam", "num_beams": 2, "temperature": 0.8, "seed": 3},
    "diverse beams": {
        "decoding": "beam", "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5,
    },
    "drafts": {"decoding": "prompt_lookup"},
    "sampled drafts": {
        "decoding": "prompt_lookup", "temperature": 0.6, "seed": 3, "repetition_penalty": 1.2,
        "min_new_tokens": 3, "eos_token_id": 5,
    },
}  # fmt: skip

#: What asks for no token of a text: in pages its steps are begun before the last are read.
BLIND = frozenset({"greedy", "sampled", "top-k", "top-p", "typical", "cut", "logprobs"})

FROM_STAND_IN = ("reference", "stand_in", "<genexpr>")


class Run:
    """Requests that come one after another: their tokens, and what each step waited for.

    `begun` counts the steps that were begun before the tokens of the one before were read; without
    `overlaps` none is.
    """

    def __init__(
        self,
        load: dict[str, Any],
        fake: CountingDevice | None = None,
        *,
        overlaps: bool = True,
        **common: Any,
    ) -> None:
        self.waits: list[Counter[str]] = []
        self.sent: list[int] = []
        self.begun = 0
        before, sent = Counter[str](), 0

        def note(loop: Any) -> None:
            nonlocal before, sent
            self.begun += isinstance(loop._begun, Begun)
            if fake is not None:
                self.waits.append(fake.waits - before)
                self.sent.append(fake.copies.total() - sent)
                before, sent = fake.waits.copy(), fake.copies.total()

        decoding = common.get("decoding", "sample")
        texts = common.pop("texts", TEXTS)
        coming = [
            Arrival(2 * n, text, **{"max_new_tokens": 5 + n, **common})
            for n, text in enumerate(texts)
        ]
        with jackfield.load(**{"decoding": decoding, **load}) as engine:
            engine._loop.overlaps &= overlaps
            if fake is not None:
                before, sent = fake.waits.copy(), fake.copies.total()
            self.tokens = tokens(drive(engine, coming, note))

    def most(self) -> int:
        return max(counter.total() for counter in self.waits)


def compare(load: dict[str, Any], *, overlaps: bool = True, **common: Any) -> Run:
    """A run on the fake device, whose texts are those of the CPU."""
    expected = Run(load, **common).tokens
    models = [load["model"], *([helper] if (helper := load.get("assistant_model")) else [])]
    with counting_device(pytest.MonkeyPatch(), *models) as fake:
        run = Run(load, fake, overlaps=overlaps, **common)
    assert run.tokens == expected
    return run


CACHES = (("gemma3", "paged", "sdpa"), ("llama", "dynamic", "sdpa"), ("gemma3", "static", "eager"))
QUICK = {
    "paged": frozenset(SETTINGS),
    "dynamic": frozenset({"greedy", "penalties", "beams", "sampled drafts"}),
    "static": frozenset({"sampled", "penalties"}),
}


def cells() -> list[Any]:
    """All but those that a static cache refuses: it takes nothing back, and copies no row."""
    return [
        pytest.param(*cell, name, marks=() if name in QUICK[cell[1]] else pytest.mark.long)
        for cell in CACHES
        for name, settings in SETTINGS.items()
        if cell[1] != "static" or "decoding" not in settings
    ]


@pytest.mark.parametrize(("family", "cache", "attention", "settings"), cells())
@pytest.mark.one_in(2)
def test_a_step_waits_once(family: str, cache: str, attention: str, settings: str) -> None:
    load = {
        "model": build(family), "cache_implementation": cache, "attn_implementation": attention,
    }  # fmt: skip
    run = compare(load, **SETTINGS[settings])
    assert run.most() == 1, run.waits
    assert max(run.sent) <= 9
    assert (run.begun > 0) == (cache == "paged" and settings in BLIND)


@pytest.mark.parametrize("cache", ["paged", "dynamic", "static"])
def test_a_step_that_only_reads_prompts_waits_for_nothing(cache: str) -> None:
    load = {"model": build("llama"), "cache_implementation": cache, "prefill_chunk_size": 4}
    run = compare({**load, "attn_implementation": "sdpa"}, texts=prompts((20,)))
    assert [counter.total() for counter in run.waits] == [0] * 4 + [1] * 5


def test_numbers_go_out_before_the_forward_call() -> None:
    """All but the tokens that were just read, and what a new batch needs."""
    load = {"model": build("llama"), "cache_implementation": "paged", "attn_implementation": "sdpa"}
    sampled = {"temperature": 0.9, "seed": 3}
    with (
        counting_device(pytest.MonkeyPatch(), load["model"]) as fake,
        jackfield.load(**load) as engine,
    ):
        engine._loop.overlaps = False
        inner, counts = engine._loop.forward, []

        def forward(inputs: Any) -> Any:
            counts.append(fake.copies.total())
            return inner(inputs)

        engine._loop.forward = forward
        drive(engine, [Arrival(0, [5, 6, 7], max_new_tokens=8, **sampled)], lambda _: counts.append(
            fake.copies.total()
        ))  # fmt: skip
    before, after = counts[::2], counts[1::2]
    assert before[2:] == after[2:]  # nothing behind the call
    assert [b - a for a, b in zip(after[1:], before[2:], strict=False)] == [2] * len(before[2:])


@pytest.mark.parametrize("cache", ["paged", "dynamic", "static"])
def test_structures(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = {"model": "demo", "cache_implementation": cache, "attn_implementation": "sdpa"}
    asked: dict[str, Any] = {"regex": r"[A-Z][a-z]{3,9} \d{3}\.", "max_new_tokens": 24}
    coming = [Arrival(0, [5, 6, 7], **asked), Arrival(0, [5, 6], max_new_tokens=9)]
    with jackfield.load(**load) as engine:
        expected = tokens(drive(engine, coming))
    with counting_device(monkeypatch) as fake, jackfield.load(**load) as engine:
        for module in engine._bound.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.to(DEVICE)
        seen, before = [], fake.waits.total()

        def note(_: Any) -> None:
            nonlocal before
            seen.append(fake.waits.total() - before)
            before = fake.waits.total()

        assert tokens(drive(engine, coming, note)) == expected
        assert max(seen) == 1, fake.waits


@pytest.mark.parametrize("page_multiple", [None, 16])
def test_packed_flash_kernels(page_multiple: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are gathered, and pages that are read in place. What the stand-in reads is its."""

    def stand_in(query: Any, keys: Any, values: Any, rows: Rows, scoring: Any) -> torch.Tensor:
        if rows.block_table is not None and rows.seqused_k is not None:
            lengths = rows.seqused_k.tolist()
            keys, values = (
                torch.cat(
                    [
                        t[own].flatten(0, 1)[:n]
                        for own, n in zip(rows.block_table, lengths, strict=True)
                    ]
                )
                for t in (keys, values)
            )
        return reference(query, keys, values, rows, scoring).to(query.dtype)

    kernel = VarlenKernel(stand_in, frozenset(), page_multiple)
    windows = [WINDOW, None]
    monkeypatch.setattr(SdpaAttention, "bind", lambda *_: bind_varlen(kernel, windows))
    load = {"model": build("gemma3"), "cache_implementation": "paged"}
    run = compare({**load, "attn_implementation": "sdpa"}, overlaps=False)
    for counter in run.waits:
        ours = [asker for asker in counter if asker.split(" ")[-1] not in FROM_STAND_IN]
        assert sum(counter[asker] for asker in ours) == 1, counter


@pytest.mark.parametrize(
    ("family", "cache", "settings"),
    [
        *(("llama", "dynamic", settings) for settings in ("greedy", "sampled drafts", "beams")),
        *((family, "static", "greedy") for family in ("llama", "gemma3")),
    ],
)
def test_padded_flash_kernels(
    family: str, cache: str, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the device how many tokens are no padding. What the stand-in reads is its."""

    def stand_in(query: Any, keys: Any, values: Any, rows: Rows, scoring: Any) -> torch.Tensor:
        found = reference(query, keys, values, rows, scoring).to(query.dtype)
        found[rows.cu_seqlens_q[-1] :] = float("nan")  # nobody's
        return found

    kernel = VarlenKernel(stand_in, frozenset())
    windows = [WINDOW if family == "gemma3" else None, None]
    monkeypatch.setattr(SdpaAttention, "bind", lambda *_: bind_varlen(kernel, windows))
    load = {"model": build(family), "cache_implementation": cache}
    texts = prompts((3, 20, 9))
    run = compare(
        {**load, "attn_implementation": "sdpa", "prefill_chunk_size": 6},
        texts=texts, **SETTINGS[settings],
    )  # fmt: skip
    for counter in run.waits:
        ours = [asker for asker in counter if asker.split(" ")[-1] not in FROM_STAND_IN]
        assert sum(counter[asker] for asker in ours) <= 1, counter


def test_what_a_strangers_pages_hold_is_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a layer. What kernels could crash of is read before they run, once a window."""
    monkeypatch.setattr(Registered, "own", False)
    load = {
        "model": build("gemma3"),
        "cache_implementation": "paged",
        "attn_implementation": "sdpa",
    }
    run = compare(load, overlaps=False)
    of_pages = [
        sum(n for asker, n in step.items() if "/checked_contents.py" in asker) for step in run.waits
    ]
    assert max(of_pages) == 1
    assert len(run.waits) > of_pages.count(1) >= 4
    plain = [step for step, n in zip(run.waits, of_pages, strict=True) if not n]
    assert plain
    assert all(step.total() == 1 for step in plain)  # its tokens
    tables = 2
    assert max(step.total() for step in run.waits) <= 1 + 1 + 3 + 4 * tables


@pytest.mark.parametrize("cache", ["paged", "dynamic"])
def test_a_draft_model_waits_once_a_call_of_its_own(cache: str) -> None:
    model = build("llama")
    load = {
        "model": model, "cache_implementation": cache, "attn_implementation": "sdpa",
        "assistant_model": build("qwen3"),
        "assistant": {"cache_implementation": cache, "attn_implementation": "sdpa"},
    }  # fmt: skip
    fake_device = counting_device(pytest.MonkeyPatch(), model, load["assistant_model"])
    with fake_device as fake, jackfield.load(**load, decoding="assisted") as engine:
        drive(engine, [Arrival(0, [5, 6, 7], max_new_tokens=12)])
        reads = {asker.split(" ")[-1]: count for asker, count in fake.waits.items()}
        calls = engine.report()["assistant cache"].calls
        assert reads == {"numbers": engine._loop.steps, "drawn": calls}


STRAYS = {
    "item": lambda x: x.flatten()[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).any()),
    "int": lambda x: int(x.flatten()[0]),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "a tensor of numbers": lambda x: torch.tensor([1, 2], device=x.device),
    "a tensor of the host": lambda x: torch.ones(3).to(x.device),
    "a list as index": lambda x: x[[0]],
    "a list as index to write": lambda x: x.clone().__setitem__([0], 1),
    "an index of the host": lambda x: x[torch.tensor([0])],
    "a mask as index": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "bincount": lambda x: x.flatten().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.flatten()[:1] * 0 + 2, -1),
    "equal": lambda x: torch.equal(x, x),
    "max": lambda x: max(x.flatten()[:1]) > 0 and None,
    "copy_": lambda x: x.clone().copy_(torch.ones_like(x, device="cpu")),
}  # fmt: skip


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.one_in(4)
def test_a_stray_wait_is_seen(stray: str) -> None:
    load = {"model": build("llama"), "cache_implementation": "paged", "attn_implementation": "sdpa"}
    with (
        counting_device(pytest.MonkeyPatch(), load["model"]) as fake,
        jackfield.load(**load) as engine,
    ):
        inner = engine._loop.forward

        def forward(inputs: Any) -> Any:
            before = fake.waits.total()
            STRAYS[stray](inputs.kwargs["input_ids"])
            assert fake.waits.total() > before
            return inner(inputs)

        engine._loop.forward = forward
        drive(engine, [Arrival(0, [5, 6, 7], max_new_tokens=4)])
        assert any("test_waits.py" in asker for asker in fake.waits)


FREE = {
    "arithmetic": lambda x: (x + 1) * 2 % 3,
    "slices": lambda x: x[:, 1:].clone()[0],
    "an index of the device": lambda x: x[x * 0],
    "a number to write": lambda x: x.clone().__setitem__(0, 1),
    "zeros": lambda x: torch.zeros(3, device=x.device),
    "arange": lambda x: torch.arange(3, device=x.device),
    "known sums": lambda x: x.repeat_interleave(x.flatten()[:1] * 0 + 2, -1, output_size=2),
    "a copy that is not awaited": lambda x: x.to("cpu", non_blocking=True),
    "shape": lambda x: (x.shape, x.dtype, x.device, len(x), x.is_cuda),
}


@pytest.mark.parametrize("free", FREE)
def test_what_needs_no_wait_is_none(free: str) -> None:
    with counting_device(pytest.MonkeyPatch()) as fake:
        numbers = torch.ones(1, 1, dtype=torch.long, device=DEVICE)
        FREE[free](numbers)
        assert not fake.waits


def test_nothing_is_pinned_or_copied_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    block = StepBlock(torch.device("cpu"))
    monkeypatch.setattr(staging, "_Block", None)
    bits = torch.tensor([1, 2], dtype=torch.int32)
    assert block.put(bits) is bits
    assert block.put([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert block.put([1.5], torch.float64).dtype is torch.float64
    block.send()


def test_a_block_is_one_copy_of_all_that_was_put() -> None:
    put: list[tuple[Any, Any]] = [
        ([[1, 2, 3]], torch.long), ([4], torch.int32), ([[0.1], [0.2]], torch.float64),
        ([True, False, True], torch.bool), ([], torch.long), (list(range(5000)), torch.int32),
        (torch.arange(7), None), ([0.5], torch.float32),
    ]  # fmt: skip
    with counting_device(pytest.MonkeyPatch()) as fake:
        block = StepBlock(DEVICE)
        small = block.put([7])
        block.send()
        for _ in range(3):
            found = [block.put(numbers, dtype) for numbers, dtype in put[:5]]
            begun = fake.copies.total()
            block.send()
            block.send()
            assert fake.copies.total() == begun + 1
            large = [block.put(numbers, dtype) for numbers, dtype in put[5:]]
            block.send()
            assert not fake.waits
            for (numbers, dtype), tensor in zip(put, found + large, strict=True):
                expected = torch.as_tensor(numbers, dtype=dtype)
                assert tensor.dtype is expected.dtype
                assert tensor.tolist() == expected.tolist()
            assert small.tolist() == [7]  # what was sent stays for who holds it
            fake.waits.clear()


def test_what_is_not_sent_is_not_there() -> None:
    with counting_device(pytest.MonkeyPatch()):
        block = StepBlock(DEVICE)
        tensor = block.put([1, 2], torch.int32)
        assert tensor.view(torch.uint8).tolist() == [RUBBISH] * 8
        block.send()
        assert tensor.tolist() == [1, 2]


def test_a_block_that_is_read_is_not_written() -> None:
    """Many copies before the first wait; each arrives as it was put."""
    with counting_device(pytest.MonkeyPatch()) as fake:
        block = StepBlock(DEVICE)
        found = []
        for number in range(3 * staging._MOST):
            found.append(block.put([number] * 9))
            block.send()
        assert fake.waits.total() == 2 * staging._MOST  # only when all blocks were in use
        assert len(block._blocks) == staging._MOST
        assert [tensor[0].item() for tensor in found] == list(range(3 * staging._MOST))


@pytest.mark.parametrize("broken", ["free", "open"])
def test_a_block_that_is_written_too_early_is_seen(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "free":
        monkeypatch.setattr(staging._Block, "free", lambda _: True)
    else:
        monkeypatch.setattr(staging, "_MOST", 1)
    with counting_device(pytest.MonkeyPatch()) as fake:
        monkeypatch.setattr("counting_device._Event.synchronize", lambda _: None)
        block = StepBlock(DEVICE)
        for number in range(2):
            block.put([number])
            block.send()
        with pytest.raises(AssertionError, match="while the device reads it"):
            fake.wait("the end")


@pytest.mark.parametrize("width", [1, 8, 9, 120])
def test_bits_of_what_is_allowed(width: int) -> None:
    marks = torch.rand(5, width) > 0.5
    bits = _packed(marks)
    assert bits.shape == (5, -(-width // 8))
    for row in range(5):
        for at in range(width):
            assert bool(int(bits[row, at // 8]) >> at % 8 & 1) == bool(marks[row, at])
