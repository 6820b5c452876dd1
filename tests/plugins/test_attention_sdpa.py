"""`sdpa`: torch's choice of kernel is one for the whole process, and grouped heads need one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build, prompts
from torch.nn.attention import SDPBackend

import jackfield
from jackfield_plugins.attention import sdpa, sdpa_flags
from jackfield_plugins.attention.sdpa import SdpaAttention, SdpaOptions, torch_attention
from jackfield_plugins.attention.sdpa_flags import ORDER, free_choice, pinned

ENABLED = [sdpa_flags._ENABLED[backend] for backend in ORDER]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """Tensors of it are the processor's."""
    zeros = torch.zeros

    def here(*size: int, device: str) -> torch.Tensor:
        assert device.startswith("cuda")
        return zeros(*size)

    monkeypatch.setattr(torch, "zeros", here)
    return "cuda:0"


def order() -> list[int]:
    return [int(backend) for backend in torch._C._get_sdp_priority_order()]


def flags() -> list[bool]:
    return [enabled() for enabled in ENABLED]


def test_cudnn_comes_last_of_the_fused_ones_until_the_last_engine_is_closed(gpu: str) -> None:
    before = order(), flags()
    first, second = (torch_attention("auto", gpu) for _ in range(2))
    assert first.close is not None
    assert second.close is not None
    wanted = [int(backend) for backend in ORDER]
    assert [number for number in order() if number in wanted] == wanted
    assert flags() == before[1]
    first.close()
    first.close()
    assert [number for number in order() if number in wanted] == wanted
    second.close()
    assert (order(), flags()) == before


def test_what_a_user_switched_off_stays_off(gpu: str) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        bound = torch_attention("auto", gpu)
        assert flags() == [True, True, False, True]
        assert bound.close is not None
        bound.close()
        assert flags() == [True, True, False, True]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize(
    ("devices", "asked"),
    [
        (("cpu",), None), (("mps",), None), (("cuda:1",), "cuda:1"), (("cpu", "cuda:0"), "cuda:0"),
    ],
)  # fmt: skip
def test_the_order_is_for_gpus_of_cuda(
    devices: tuple[str, ...], asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is made on a GPU that a model does not use."""
    seen: list[Any] = []
    monkeypatch.setattr(sdpa_flags, "_let_torch_order", seen.append)
    before = order()
    needs = SimpleNamespace(computing_devices=devices)
    bound = SdpaAttention().bind(SimpleNamespace(options=SdpaOptions(), requirements=needs))  # type: ignore[arg-type]
    assert seen == [asked] * (asked is not None)
    assert (bound.close is None) == (asked is None)
    if bound.close is not None:
        bound.close()
    assert order() == before


def test_the_order_that_torch_sets_at_its_first_call_does_not_stay(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper, with cuDNN first; it asks once a process, when it first has to choose a kernel."""
    before, calls = order(), []
    theirs = [int(SDPBackend.CUDNN_ATTENTION), *(n for n in before if n != 3)]

    def first_sets(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if not calls:
            torch._C._set_sdp_priority_order(theirs)
        calls.append(query)
        return query

    monkeypatch.setattr(sdpa_flags, "scaled_dot_product_attention", first_sets)
    try:
        attend, close = free_choice(gpu)
        attend(torch.ones(1, 1, 1, 8))
        wanted = [int(backend) for backend in ORDER]
        assert [number for number in order() if number in wanted] == wanted
        assert close is not None
        close()
        assert order() == theirs  # torch's own for that GPU
    finally:
        torch._C._set_sdp_priority_order(before)


def test_an_engine_that_is_closed_ends_its_pinning() -> None:
    with jackfield.load(build("llama"), attn_implementation="sdpa?kernel=math") as engine:
        assert sdpa_flags._flags.pinned == 1
        engine.generate(prompts((3,)), max_new_tokens=2)
    assert sdpa_flags._flags.pinned == 0


def test_kernels_that_are_pinned_at_once_do_not_see_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three engines' threads; each call sees its own flags, and in the end all are as before."""
    before, seen = flags(), []

    def spy(own: str) -> torch.Tensor:
        found = flags()
        for _ in range(50):  # others run meanwhile
            threading.Event().wait(0.00001)
            if flags() != found:
                found = []
        seen.append((own, found))
        return torch.zeros(())

    monkeypatch.setattr(sdpa_flags, "scaled_dot_product_attention", spy)
    made = {"MATH": pinned("MATH"), "FLASH_ATTENTION": pinned("FLASH_ATTENTION")}
    calls = {**made, "any": free_choice(None)}

    def run(own: str) -> None:
        for _ in range(6):
            calls[own][0](own)

    threads = [threading.Thread(target=run, args=(own,)) for own in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, close in made.values():
        close()
    wanted = {
        own: [backend is getattr(SDPBackend, own) for backend in ORDER] for own in made
    } | {"any": before}  # fmt: skip
    assert len(seen) == 18
    assert all(found == wanted[own] for own, found in seen)
    assert flags() == before


@pytest.mark.parametrize(
    ("cuda", "mask", "dtype", "sizes", "takes"),
    [
        (False, True, torch.float32, (64, 32), True),
        (True, False, torch.bfloat16, (128, 128), True),
        (True, False, torch.float16, (256, 256), True),
        (True, True, torch.bfloat16, (128, 128), False),
        (True, False, torch.float32, (128, 128), False),
        (True, False, torch.bfloat16, (264, 264), False),
        (True, False, torch.bfloat16, (192, 128), False),
        (True, False, torch.bfloat16, (64, 128), False),
    ],
)
def test_which_calls_keep_their_heads_grouped(
    cuda: bool, mask: bool, dtype: torch.dtype, sizes: tuple[int, int], takes: bool
) -> None:
    """`sizes` are those of a head's keys and of its values."""
    query: Any
    query, value = (
        SimpleNamespace(is_cuda=cuda, itemsize=dtype.itemsize, shape=(1, 8, 2, size))
        for size in sizes
    )
    given = torch.ones(1) if mask else None
    assert sdpa._takes_groups(query, value, given) == takes


@pytest.mark.parametrize("kernel", ["auto", "math"])
@pytest.mark.parametrize("cache", ["dynamic", "paged?page_size=4"])
def test_heads_that_are_repeated_see_what_grouped_ones_see(
    kernel: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU; a kernel that was named decides for itself, so it is asked with groups."""
    monkeypatch.setattr(sdpa, "_takes_groups", lambda *_: False)
    asked = set()
    original = sdpa_flags.scaled_dot_product_attention

    def spy(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
        asked.add(kwargs["enable_gqa"])
        assert kwargs["enable_gqa"] == (query.shape[1] != key.shape[1])
        return original(query, key, value, **kwargs)

    monkeypatch.setattr(sdpa_flags, "scaled_dot_product_attention", spy)
    found = {}
    for name in ("eager", f"sdpa?kernel={kernel}"):
        with jackfield.load(
            build("llama"), attn_implementation=name, cache_implementation=cache
        ) as engine:
            done = engine.generate(prompts((3, 9)), max_new_tokens=6)
            found[name] = [completion.token_ids for completion in done]
    assert len({str(tokens) for tokens in found.values()}) == 1
    assert asked == {kernel == "math"}
