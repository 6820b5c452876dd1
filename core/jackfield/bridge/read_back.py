"""What was read is what was planned: shapes before, and each layer of a quantizer afterwards.

transformers compares no shapes where a quantizer reads, and takes what a quantizer made as it is: a
layer that was forgotten, or that holds other numbers than the file, would write another text.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from jackfield.bridge.footprint import tensors_of
from jackfield.bridge.gguf import GgufModel
from jackfield.bridge.meta_model import meta_model
from jackfield.bridge.sharding import Shard
from jackfield.contracts import Requirements, StoredTensor, Weight
from jackfield.contracts.checkpoint import Tensors, shown
from jackfield.contracts.quantizing import own_part, plain_bytes
from jackfield.errors import CheckpointError
from jackfield.guarded import fault
from jackfield.registry.backends import Choice, Registered

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_FLOATS = ("F64", "F32", "F16", "BF16")

#: vectors that a layer is asked about, and outputs of it that are compared with the file
PROBES, ROWS = 4, 64
#: What rounding leaves: at 2 bits a layer is at an angle of 0.7; of another layer, of 0.0 ± 0.06.
COSINE, RATIO = 0.25, 4.0


def check_shapes(config: PreTrainedConfig, tensors: Tensors) -> None:
    """Raise CheckpointError where a weight that is stored whole has not the shape of the model's.

    Which are packed is a quantizer's business: those that other tensors stand beside.
    """
    packed = {path for name in tensors if (path := _packed(name))}
    for name, parameter in meta_model(config).named_parameters():
        found = tensors.get(name)
        if found is None or name.rpartition(".")[0] in packed or found.dtype.startswith("F8"):
            continue
        if found.shape != tuple(parameter.shape) or found.dtype not in _FLOATS:
            raise CheckpointError(
                f"{name} in {found.file} is {found}, and has to be of floating point "
                f"{list(parameter.shape)}; its config.json does not fit its weights"
            )


def check_floats(source: str, tensors: Tensors) -> None:
    """Raise CheckpointError where weights are stored as whole numbers, and no config says how.

    transformers casts them, which leaves nothing of the model.
    """
    for name, found in tensors.items():
        if name.endswith(".weight") and not found.dtype.startswith(("F", "BF")):
            raise CheckpointError(
                f"{name} in {found.file} is {found}, and the config of {source} names no "
                "quantization that it is of; fetch the model again, or add its quantization_config"
            )


def _packed(name: str) -> str | None:
    """The layer to which a tensor belongs that is neither a weight nor a bias."""
    path, _, own = name.rpartition(".")
    while path.endswith((".weight", ".quant_state")):
        path = path.rpartition(".")[0]
    return None if own in ("weight", "bias") else path


def check_read(
    model: PreTrainedModel,
    choice: Choice,
    needs: Requirements,
    tensors: Tensors,
    gguf: GgufModel | None = None,
    shard: Shard | None = None,
) -> None:
    """Compare a model that a quantizer has read with its plan and with the files.

    `tensors` is empty where the files are not known; `gguf` is what they are of; `shard` is the
    part of them that was read. Raises PluginError for what the quantizer did, CheckpointError for
    what the files hold.
    """
    reader = _Reader(model, choice.registered, needs, tensors, gguf, shard)
    stored = {w.name for w in needs.weights if _is_stored(w, choice, needs)}
    converted = {
        p
        for p, m in model.named_modules(remove_duplicate=False)
        if choice.registered.ask("converted", m)
    }
    with reader:
        for path in sorted(converted):
            reader.layer(path)
        for weight in needs.weights:
            path = weight.name.rpartition(".")[0]
            if path in converted:
                continue
            if weight.name in stored and not _is_kept(model, path):
                reader.fail(path, "it is not stored as was planned, but is a "
                            f"{type(model.get_submodule(path)).__name__}")  # fmt: skip
            else:
                reader.whole(weight)
        reader.one_step()


def _is_stored(weight: Weight, choice: Choice, needs: Requirements) -> bool:
    """Whether the quantizer said that it stores this matrix, by what it said of its bytes."""
    if weight.linear is None:
        return False
    alone = replace(needs, weights=(weight,), head=None)
    size = choice.registered.size("weight_bytes", alone, choice.options)
    return size is not None and size != plain_bytes(alone)


def _is_kept(model: PreTrainedModel, path: str) -> bool:
    """Whether transformers keeps a layer in float32, which quantizers in it leave as it is."""
    names: list[str] = []
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names += getattr(model, attribute, None) or ()
    return any(name in path.split(".") for name in names)


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.numel() or tensor.dtype.itemsize < 2:  # there is no order of float8
        return True
    return all(bool(end.isfinite()) for end in tensor.detach().aminmax())


class _Reader(ExitStack):
    """Looks at layers one by one, with the files open."""

    def __init__(
        self,
        model: PreTrainedModel,
        quantizer: Registered,
        needs: Requirements,
        tensors: Tensors,
        gguf: GgufModel | None,
        shard: Shard | None,
    ) -> None:
        super().__init__()
        self._gguf, self._shard = gguf, shard
        self.model, self.quantizer, self.needs, self.tensors = model, quantizer, needs, tensors
        self._dtype: torch.dtype = getattr(torch, needs.dtype)
        self._files: dict[Path, Any] = {}
        self._planned = {weight.name: weight for weight in needs.weights}
        self._other: list[str] = []  # whole weights that are of another dtype than planned

    def fail(self, path: str, what: str) -> None:
        raise fault(self.quantizer, f"did not store {path} rightly: {what}")

    def layer(self, path: str) -> None:
        """A layer of the quantizer's, asked for products that the file knows too."""
        module: Any = self.model.get_submodule(path)
        weight, device = self._linear(path, module), self._device(path, module)
        if weight is None or weight.linear is None or device is None:
            return
        for tensor in tensors_of(module, self.quantizer):
            if tensor.is_floating_point() and not _is_finite(tensor):
                if self._is_finite_in_file(weight):
                    self.fail(path, "it has a number that is not finite, and the file has none")
                raise self._not_finite(path)
        rows, columns = weight.linear
        probes = torch.randn(PROBES, columns, generator=torch.Generator().manual_seed(columns))
        given = torch.cat([probes, -probes]).to(device, self._dtype)
        try:
            with torch.no_grad():
                out = self._product(module, given)
        except Exception as error:
            said = f"it raised {type(error).__name__}: {shown(str(error))}"
            if self.needs.stored is None:
                raise fault(self.quantizer, f"did not store {path} rightly: {said}") from error
            raise CheckpointError(
                f"{path} is not what its quantization_config says{self._where(path)}: {said}"
            ) from error
        wanted = (self._dtype, (2 * PROBES, rows), given.device)
        if not isinstance(out, torch.Tensor):
            self.fail(path, f"it returns {type(out).__name__}, and no tensor")
        elif (out.dtype, tuple(out.shape), out.device) != wanted:
            self.fail(path, f"it returns {out.dtype} {list(out.shape)} on {out.device}, where "
                      f"{wanted[0]} {list(wanted[1])} on {wanted[2]} is due")  # fmt: skip
        elif (some := self._some_rows(weight, rows)) is not None:
            self._compare(path, (out[:PROBES] - out[PROBES:])[:, : len(some)].cpu().float() / 2,
                          probes.to(self._dtype).float() @ some.T)  # fmt: skip

    def _product(self, module: nn.Module, given: torch.Tensor) -> Any:
        """What a layer makes of its matrix; a model's own kind of linear (a router) does more."""
        own = type(module).__module__ == type(self.model).__module__
        if own and isinstance(module, nn.Linear):
            return nn.Linear.forward(module, given)
        if self._shard is not None:  # without what processes do with one another around it
            return type(module).forward(module, given)
        return module(given)

    def _linear(self, path: str, module: Any) -> Weight | None:
        """The matrix that a layer stands for: as it was planned, or as the layer itself says."""
        found = self._planned.get(f"{path}.weight")
        if found is not None and found.linear is not None:
            return found
        sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
        if not all(isinstance(size, int) for size in sizes):
            return None
        return Weight(f"{path}.weight", 0, sizes)  # type: ignore[arg-type]  # two numbers

    def _device(self, path: str, module: nn.Module) -> torch.device | None:
        """Where a layer computes; None: its weights are elsewhere meanwhile."""
        devices = {tensor.device for tensor in tensors_of(module, self.quantizer)}
        if hasattr(module, "_hf_hook") or not devices:
            return None
        if len(devices) > 1 or devices == {torch.device("meta")}:
            self.fail(path, f"its tensors are on {' and '.join(sorted(map(str, devices)))}")
        planned = torch.device(self.needs.device or "cpu")
        found = devices.pop()
        if not self.needs.several_places and found.type != planned.type:
            self.fail(path, f"it is on {found}, and was planned on {planned}")
        return found

    def _some_rows(self, weight: Weight, rows: int) -> torch.Tensor | None:
        """The first rows of a matrix as the file has it, float32; None where it is not there."""
        if self._gguf is not None:
            return self._gguf.first_rows(weight.name, ROWS)
        if self.needs.stored is not None:
            return None
        found, linear = self.tensors.get(weight.name), weight.whole or weight.linear
        shape = linear[::-1] if weight.transposed and linear else linear
        if found is None or found.dtype not in _FLOATS or found.shape != shape:
            return None
        part = self._file(found.file).get_slice(weight.name)
        outputs, inputs = self._own(weight)
        some = part[inputs, outputs].T if weight.transposed else part[outputs, inputs]
        return some.to(self._dtype).float()  # type: ignore[no-any-return]

    def _own(self, weight: Weight) -> tuple[slice, slice]:
        """Where in a whole matrix the first rows are of what this process has of it."""
        assert weight.linear is not None
        own, whole = weight.linear, weight.whole or weight.linear
        row, column = (
            0 if self._shard is None or here == there else self._shard.begin(there)
            for here, there in zip(own, whole, strict=True)
        )
        return slice(row, row + min(ROWS, own[0])), slice(column, column + own[1])

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self.enter_context(safe_open(path, "pt"))
        return self._files[path]

    def _compare(self, path: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        size = float(wanted.norm())
        if not (size > 0 and wanted.isfinite().all()):
            return
        ratio = float(found.norm()) / size
        cosine = float((found * wanted).sum()) / size / max(float(found.norm()), 1e-30)
        if not (cosine > COSINE and 1 / RATIO < ratio < RATIO):
            self.fail(path, "its products are not those of the weights in the file (cosine "
                      f"{cosine:.2f}, size {ratio:.2g} times)")  # fmt: skip

    def whole(self, weight: Weight) -> None:
        """A weight that stays as it is: of floating point, as large as planned, as in the file."""
        path, _, own = weight.name.rpartition(".")
        found = getattr(self.model.get_submodule(path), own, None)
        if not isinstance(found, torch.Tensor):
            self.fail(weight.name, f"it is {found!r}, where a tensor is due")
            return
        found = own_part(found)
        if not found.is_floating_point() or found.numel() != weight.numbers:
            self.fail(weight.name, f"it is {found.dtype} {list(found.shape)}, where "
                      f"{weight.numbers:,} numbers of floating point are due")  # fmt: skip
        if found.device.type == "meta":
            if not self.needs.offloaded:
                self.fail(weight.name, "it has no numbers (it is on meta)")
            return
        if not _is_finite(found):
            raise self._not_finite(weight.name)
        if found.dtype is not getattr(torch, weight.dtype or self.needs.dtype):
            self._other.append(weight.name)
        stored = self.tensors.get(weight.name)
        if stored is not None and stored.dtype in _FLOATS and stored.shape == tuple(found.shape):
            some = self._first(stored, weight.name).to(found.dtype)
            if not torch.equal(some, found.detach()[:1].cpu()):
                self.fail(weight.name, "it does not hold the numbers of the file")

    def _first(self, stored: StoredTensor, name: str) -> torch.Tensor:
        """The first row or number of a weight that is whole in the file."""
        if self._gguf is not None:
            return self._gguf.whole(name)[:1]
        return self._file(stored.file).get_slice(name)[:1]  # type: ignore[no-any-return]

    def one_step(self) -> None:
        """Run a model with whole weights of another dtype than planned: not all models can."""
        if not self._other or self.needs.several_places:
            return
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        try:
            with torch.no_grad():
                self.model(input_ids=ids, use_cache=False)
        except Exception as error:
            name = self._other[0]
            raise CheckpointError(
                f"{name}{self._where(name)} is not of {self.needs.dtype}, in which the model "
                f"computes, and it cannot: {shown(str(error))}"
            ) from error

    def _where(self, name: str) -> str:
        files = (t.file for key, t in self.tensors.items() if key.startswith(name))
        return f" in {found}" if (found := next(files, None)) else ""

    def _not_finite(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{name}{self._where(name)} holds a number that is infinite or not a "
            "number; fetch the model again"
        )

    def _is_finite_in_file(self, weight: Weight) -> bool:
        """Whether it is there as a whole matrix, and all of it finite in the model's dtype."""
        found = self.tensors.get(weight.name)
        if self._gguf is not None or found is None or found.dtype not in _FLOATS:
            return False
        return _is_finite(self._file(found.file).get_tensor(weight.name).to(self._dtype))
