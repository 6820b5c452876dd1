"""Checks of files: saved and read again it is the same; what is another's is not read."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from jackfield.api import load, plan
from jackfield.bridge.footprint import loaded_bytes
from jackfield.errors import JackfieldError, PlanError, error_text, shown
from jackfield.testing.checks import Check, NotTriedError, WrongError
from jackfield.testing.quantizer.loads import Loads
from jackfield.testing.quantizer.memory import PROMPTS

#: What a file may say of its quantization: of nobody, of somebody else, of nothing that can be.
STRANGE: tuple[dict[str, Any], ...] = (
    {},
    {"quant_method": None},
    {"quant_method": "somebody-elses"},
    {"quant_method": 7, "bits": "many"},
    {"quant_method": ["a", "list"]},
    {"quant_method": {"an": "object"}, "group_size": -3},
)


#: What no field of a quantizer can be.
ODD = "nonsense"


def checks(loads: Loads) -> Iterator[Check]:
    """All of them."""
    yield Check("files.untouched", "contract", _each(loads, _untouched))
    for dtype in loads.dtypes():
        yield Check(f"saved.{dtype}", f"dtypes: {dtype}", _each(loads, _saved, dtype), limit=120)
    yield Check("saved.named_and_auto", "reads", _each(loads, _found_again))
    yield Check("saved.with_odd_fields", "fields", _each(loads, _odd_fields))
    yield Check("reads.others", "reads", _of_others(loads), cases=STRANGE)


def _each(
    loads: Loads, check: Callable[[Loads, str, str], str | None], dtype: str = ""
) -> Callable[[Any], str | None]:
    def run(_: object) -> str | None:
        name = loads.main()
        if dtype and dtype != loads.dtype():
            loads.accepted(name, dtype)
        return check(loads, name, dtype or loads.dtype())

    return run


def _untouched(loads: Loads, name: str, dtype: str) -> None:
    """Reading changes neither the files nor what is torch's for the whole process."""
    folder = loads.original(name).folder
    before = _digests(folder)
    with loads.another(folder, **loads.arguments(dtype)) as engine:
        engine.generate(PROMPTS, max_new_tokens=2)
    if changed := [n for n, digest in _digests(folder).items() if before.get(n) != digest]:
        raise WrongError(f"reading the model changed {', '.join(changed)} in its folder")


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def saved(loads: Loads, name: str, dtype: str, into: Path) -> Any:
    """Save one of the models. Raises NotTriedError where it says that it cannot be saved."""
    engine = loads.engine(name, dtype)
    if not loads.stores(name, dtype):
        raise NotTriedError("it stores every weight as it is")
    try:
        engine.model.save_pretrained(into)
    except Exception as error:
        if list(into.glob("*.safetensors")):
            raise WrongError(f"saving wrote files and raised {error_text(error)}") from error
        raise NotTriedError(
            f"it cannot be saved, and says so: {shown(error_text(error), 300)}"
        ) from error
    assert engine.tokenizer is not None
    engine.tokenizer.save_pretrained(into)
    return engine


def _temporary(loads: Loads) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=loads.into, prefix="saved-")


def _saved(loads: Loads, name: str, dtype: str) -> str:
    with _temporary(loads) as text:
        folder = Path(text)
        engine = saved(loads, name, dtype, folder)
        outputs = _outputs(loads, engine.model)
        state = dict(engine.model.state_dict())
        with loads.another(folder, device_map=loads.subject.device, dtype=dtype) as again:
            choice = again.plan["quantizer"]
            if choice.registered.name != loads.subject.registered.name:
                raise WrongError(
                    f"what it saved is read by {choice.registered} where nobody names a quantizer"
                )
            planned = again.plan.requirements.weight_bytes
            held = loaded_bytes(again.model, loads.subject.registered)
            if held != planned and _promises(loads, again):
                raise WrongError(
                    f"read again it holds {held:,} bytes, where weight_bytes promised {planned:,}"
                )
            _same_state(state, again.model.state_dict())
            for path, found in _outputs(loads, again.model).items():
                if not torch.equal(found, outputs[path]):
                    raise WrongError(f"{path} has other outputs once it was saved and read again")
            if missing := outputs.keys() - _outputs(loads, again.model).keys():
                raise WrongError(
                    f"{min(missing)} is not converted once it was saved and read again"
                )
    return f"{len(state)} tensors, {len(outputs)} layers, bit for bit"


def _promises(loads: Loads, engine: Any) -> bool:
    return loads.backend.weight_bytes(engine.plan.requirements, loads.subject.options) is not None


def _outputs(loads: Loads, model: Any) -> dict[str, torch.Tensor]:
    """What each converted layer says of the same inputs."""
    found = {}
    for path, module in model.named_modules():
        if loads.backend.converted(module):
            drawn = torch.Generator().manual_seed(3)
            given = torch.randn(5, module.in_features, generator=drawn).to(model.dtype)
            with torch.inference_mode():
                found[path] = module(given)
    return found


def _same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    if one.keys() != other.keys():
        odd = min(one.keys() ^ other.keys())
        where = "lost" if odd in one else "new"
        raise WrongError(f"saved and read again, {odd} is {where}")
    for key, value in one.items():
        if not same_bits(value, other[key]):
            raise WrongError(f"saved and read again, {key} has other bits")


def same_bits(one: Any, other: Any) -> bool:
    """Equal to the bit, also where a tensor is made of others."""
    if type(one) is not type(other):
        return False
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    if hasattr(one, "__tensor_flatten__"):
        parts = one.__tensor_flatten__()[0]
        return all(same_bits(getattr(one, part), getattr(other, part)) for part in parts)
    return one.dtype == other.dtype and torch.equal(one, other)


def _found_again(loads: Loads, name: str, dtype: str) -> str:
    """By name it is read too; no other backend takes it for whole."""
    with _temporary(loads) as text:
        folder = Path(text)
        saved(loads, name, dtype, folder)
        stored = json.loads((folder / "config.json").read_text()).get("quantization_config")
        if not stored:
            raise WrongError(
                "what it saves has no quantization_config, so nobody knows how to read it"
            )
        if not loads.backend.reads(stored):
            raise WrongError(f"does not read what it saved ({shown(str(stored), 200)})")
        where: Any = {"device_map": loads.subject.device}
        chosen = plan(folder, quantization=f"{_bare(loads)}", **where)
        if chosen.requirements.stored is None:
            raise WrongError("what it saved is planned as if it were whole")
        try:
            plan(folder, quantization="none", **where)
        except PlanError:
            return "read by name and by auto"
    raise WrongError("what it saved is taken for whole weights by quantization='none'")


def _bare(loads: Loads) -> str:
    """The selection without options."""
    return loads.subject.selection.partition("?")[0]


def _odd_fields(loads: Loads, name: str, dtype: str) -> str:
    """Fields of its own that hold nonsense are told as the file's fault, or change nothing."""
    with _temporary(loads) as text:
        folder = Path(text)
        saved(loads, name, dtype, folder)
        config = json.loads((folder / "config.json").read_text())
        tried = 0
        for field in sorted(loads.backend.fields):
            broken = {**config["quantization_config"], field: ODD}
            (folder / "config.json").write_text(
                json.dumps({**config, "quantization_config": broken})
            )
            _told_as_the_files(folder, field, loads)
            tried += 1
    return f"{tried} odd values"


def _told_as_the_files(folder: Path, field: str, loads: Loads) -> None:
    try:
        plan(folder, device_map=loads.subject.device)
        load(folder, device_map=loads.subject.device).close()
    except JackfieldError as error:
        if type(error).__name__ == "PluginError":
            raise WrongError(f"a file with {field}={ODD!r} is told as a fault of the plugin: "
                             f"{shown(error, 300)}") from error  # fmt: skip
    except Exception as error:
        raise WrongError(f"a file with {field}={ODD!r} raises {error_text(error)}") from error


def _of_others(loads: Loads) -> Callable[[Any], None]:
    def run(stored: dict[str, Any]) -> None:
        if loads.subject.registered.ask("reads", stored):
            raise WrongError(f"says that it reads a checkpoint with quantization_config={stored}")

    return run
