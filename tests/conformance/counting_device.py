"""A device that is none: tensors that say they are on a GPU, and a count of what waits for one.

What is computed is computed on the CPU, by real kernels. A tensor is on the device if it was made
there or has come of one that is (`OnDevice`, a subclass that hands itself on), and it says so. Two
looks see what would wait on a GPU: what Python asks of torch (numbers that are read, lists and
tensors of the host that become tensors of the device by a copy that is not page-locked), and what
torch's own functions call below that (`nonzero` in an index by a mask, `item` in a sum of lengths).

New memory of the device is rubbish, and so is memory of the host that the device is to fill, until
somebody has waited. Page-locked memory that is written while its copy is not known to be done is an
error.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from jackfield.contracts import BindContext

DEVICE = torch.device("cuda", 0)
RUBBISH = 113
_CPU = torch.device("cpu")

#: Functions that read numbers of a tensor.
_READS = frozenset(
    {
        "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "cpu",
        "item", "numpy", "tolist", "is_nonzero", "equal", "allclose", "__array__", "__format__",
        "__repr__",
    }
)  # fmt: skip
#: Functions that make a tensor of the device of what the host has.
_TAKES = frozenset({"tensor", "as_tensor", "to", "cuda"})
_INDEXED = frozenset({"__getitem__", "__setitem__", "index_put", "index_put_"})
#: Operators that have to know numbers before they can tell how much memory they need.
#: Where the counts are a tensor, their sum is read to know the size.
_REPEATING = ("aten::repeat_interleave.Tensor", "aten::repeat_interleave.self_Tensor")
_WAITING = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::masked_select",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::equal",
    "aten::histc", "aten::is_nonzero",
)  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor of the device; whatever is computed of it is one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _now().call(func, args, kwargs or {})


class Pinned(torch.Tensor):
    """Page-locked memory of the host."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _now().call(func, args, kwargs or {})


class CountingDevice(TorchFunctionMode):
    """While it is entered, `DEVICE` is there. Counters count by the line that asked.

    `waits` are what would have to wait for the device, `copies` those to it that nobody waits for.
    """

    current: CountingDevice | None = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.computing = 0
        self.pending: list[Callable[[], None]] = []
        self._below = _Below(self)

    def __enter__(self) -> CountingDevice:
        CountingDevice.current = self
        self._below.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._below.__exit__(*raised)
        CountingDevice.current = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.call(func, args, kwargs or {})

    def wait(self, what: str, begun: list[Callable[[], None]] | None = None) -> None:
        """Whoever asked has waited, and what was `begun` (None: all) is known to be done."""
        self.waits[f"{what} in {_asker()}"] += 1
        ended = [one for one in self.pending if begun is None or one in begun]
        self.pending = [one for one in self.pending if one not in ended]
        for done in ended:
            done()

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, OnDevice) for leaf in leaves):
            return self._of_device(func, name, args, kwargs)
        if _goes_to_device(name, args, kwargs):
            return self._to_device(func, name, args, kwargs)
        return _of_host(func, args, kwargs)

    def _to_device(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Something of the host becomes a tensor of the device, or one is made there."""
        found = _plainly(func, *_on_cpu((args, kwargs)))
        if name == "empty" and found.dtype is torch.uint8:
            found.fill_(RUBBISH)
        if name in _TAKES and found.numel():
            if isinstance(args[0], Pinned) and kwargs.get("non_blocking"):
                self._sent(args[0])
            else:
                self.wait(f"{name} of the host's")
        return _placed(found)

    def _sent(self, source: torch.Tensor) -> None:
        """A copy from page-locked memory was begun."""
        self.copies[_asker()] += 1
        memory = source.as_subclass(torch.Tensor)
        before = memory.clone()

        def check() -> None:
            assert torch.equal(memory, before), "written while the device reads it"

        self.pending.append(check)

    def _of_device(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "__get__":
            return _attribute(func, args)
        if name == "copy_" and not isinstance(args[1], OnDevice) and args[1].numel():
            if isinstance(args[1], Pinned) and kwargs.get("non_blocking"):
                self._sent(args[1])
            else:
                self.wait("copy_ of the host's")
        if name in _INDEXED and any(map(_is_of_host, _parts(args[1]))):
            self.wait("an index of the host's")
        if name == "to" and "cpu" in map(str, (*args[1:2], kwargs.get("device"))):
            return self._to_host(args[0], kwargs)
        if name in _READS:
            self.wait(name)
            return tree_map_only(torch.Tensor, _plain, _plainly(func, args, kwargs))
        if name in ("tensor", "as_tensor") and not isinstance(args[0], OnDevice):
            self.wait(f"{name} of numbers of the device")
        self.computing += 1
        try:
            found = _plainly(func, *_on_cpu((args, kwargs)))
        finally:
            self.computing -= 1
        if str(kwargs.get("device")) == "cpu":
            return found
        return tree_map_only(torch.Tensor, _placed, found)

    def _to_host(self, given: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if not kwargs.get("non_blocking"):
            self.wait("to the host")
            return _plain(given).clone()
        found = torch.full_like(_plain(given), RUBBISH)
        numbers = _plain(given).clone()
        self.pending.append(lambda: _plainly(torch.Tensor.copy_, (found, numbers), {}))
        return found


class _Below(TorchDispatchMode):
    """What functions of torch call that compute on the device."""

    def __init__(self, fake: CountingDevice) -> None:
        super().__init__()
        self._fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._fake.computing:
            name = func.name()
            masks = name == "aten::index.Tensor" and any(
                at is not None and at.dtype in (torch.bool, torch.uint8) for at in args[1]
            )
            sums = name in _REPEATING and "output_size" not in (kwargs or {})
            if masks or sums or name == "aten::where" or name.startswith(_WAITING):
                self._fake.wait("an index by a mask" if masks else name)
        return func(*args, **(kwargs or {}))


def _now() -> CountingDevice:
    assert CountingDevice.current is not None, "a tensor of a fake device outlives it"
    return CountingDevice.current


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return _plainly(torch.Tensor.as_subclass, (tensor, torch.Tensor), {})  # type: ignore[no-any-return]


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    return _plainly(torch.Tensor.as_subclass, (tensor, OnDevice), {})  # type: ignore[no-any-return]


def _address(tensor: torch.Tensor) -> int:
    return int(_plainly(torch.Tensor.untyped_storage, (tensor,), {}).data_ptr())


def _attribute(func: Any, args: tuple[Any, ...]) -> Any:
    attributes: Any = torch.Tensor
    if func == attributes.device.__get__:
        return DEVICE
    if func in (attributes.is_cuda.__get__, attributes.is_cpu.__get__):
        return func == attributes.is_cuda.__get__
    return tree_map_only(torch.Tensor, _placed, _plainly(func, args, {}))


def _of_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views of page-locked memory are page-locked."""
    pinned = kwargs.get("pin_memory")
    found = _plainly(func, args, {**kwargs, "pin_memory": False} if pinned else kwargs)
    memory = {_address(leaf) for leaf in args if isinstance(leaf, Pinned)} - {0}
    if isinstance(found, torch.Tensor) and (pinned or _address(found) in memory):
        return _plainly(torch.Tensor.as_subclass, (found, Pinned), {})
    return found


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str) and str(value).startswith("cuda")


def _goes_to_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    asked = args[1] if name == "to" and len(args) > 1 else kwargs.get("device")
    return name == "cuda" or _is_device(asked)


def _on_cpu(of: Any) -> Any:
    """The same arguments, which name another device."""
    if isinstance(of, dict):
        return {key: _on_cpu(value) for key, value in of.items()}
    if type(of) is tuple:
        return tuple(map(_on_cpu, of))
    return _CPU if _is_device(of) else of


def _parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_of_host(part: Any) -> bool:
    tensor = isinstance(part, torch.Tensor) and not isinstance(part, OnDevice)
    return isinstance(part, list | range) or (tensor and part.dim() > 0)


def _asker() -> str:
    """The nearest line that is neither torch's nor of this file."""
    frame: Any = sys._getframe(1)
    while "/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        frame = frame.f_back
    file = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"


class _Event:
    """All that was begun before it is recorded."""

    def __init__(self) -> None:
        self._before: list[Callable[[], None]] = []

    def record(self, stream: Any) -> None:
        self._before = list(_now().pending)

    def query(self) -> bool:
        return not any(begun in _now().pending for begun in self._before)

    def synchronize(self) -> None:
        if not self.query():
            _now().wait("an event", self._before)


class _Properties:
    multi_processor_count = 4


@contextlib.contextmanager
def counting_device(monkeypatch: Any, *models: torch.nn.Module) -> Iterator[CountingDevice]:
    """A device for what is bound within. Weights stay where they are; buffers are there."""
    monkeypatch.setattr(BindContext, "device", property(lambda _: DEVICE))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Properties)
    modules = [module for model in models for module in model.modules()]
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _placed(buffer)
    try:
        with CountingDevice() as fake:
            yield fake
    finally:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = _plain(buffer)
        monkeypatch.undo()
