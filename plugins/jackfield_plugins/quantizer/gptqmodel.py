"""gptqmodel and optimum, made to work inside a program that has a console of its own."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from jackfield.contracts import TORCHAO, quieted
from jackfield_plugins.quantizer.gptq_files import check_groups
from jackfield_plugins.quantizer.libraries import import_bitsandbytes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

#: It imports what builds extensions, where torch's CUDA build notes that there is no GPU.
_BUILDER = ("torch.utils.cpp_extension",)
#: What tells gptqmodel not to compile.
EXTENSION = "GPTQMODEL_DISABLE_PACK_EXT"
#: What is changed of the libraries while weights are read is changed for all threads.
_ONE_AT_A_TIME = threading.RLock()
HUB_FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRANSFORMERS_CACHE")


def import_gptqmodel() -> None:
    """Import it without its banner; loggers, the hub's folders and torch's settings stay."""
    if importlib.util.find_spec("bitsandbytes"):
        import_bitsandbytes()  # which it would import itself
    with _contained(), _own_folders(), _own_limits():
        importlib.import_module("gptqmodel")
        importlib.import_module("optimum.gptq")


@contextlib.contextmanager
def _own_limits() -> Iterator[None]:
    """How often torch compiles a function anew, which it raises for the whole process."""
    import torch._dynamo.config as settings

    before = settings.recompile_limit
    try:
        yield
    finally:
        settings.recompile_limit = before


@contextlib.contextmanager
def _own_folders() -> Iterator[None]:
    """Where the hub's files are stays the user's to say.

    tokenicer, which it imports, names a folder in /tmp that everybody knows, for this process and
    all that it starts: their files would be there, and who made it first could write them.
    """
    before = {name: os.environ.get(name) for name in HUB_FOLDERS}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Pack in Python, where gptqmodel would compile an extension for 45 seconds to save a few, and
    show one bar, on a terminal only; and give weights of one sign a grid that holds them.
    """
    from optimum.gptq import quantizer

    with _ONE_AT_A_TIME:
        bar, extension = quantizer.tqdm, os.environ.get(EXTENSION)
        quantizer.tqdm, os.environ[EXTENSION] = _bar, "1"
        try:
            with _contained(), _grids_of_one_sign():
                yield
        finally:
            quantizer.tqdm = bar
            os.environ.pop(EXTENSION)
            if extension is not None:
                os.environ[EXTENSION] = extension


@contextlib.contextmanager
def _grids_of_one_sign() -> Iterator[None]:
    """A symmetric grid holds weights that are all positive, as it holds those that are negative.

    gptqmodel makes that of a group without a negative number half as wide, with its zero in the
    middle all the same: what is above half of the largest would be cut off.
    """
    import torch
    from gptqmodel.quantization.quantizer import Quantizer

    find = Quantizer.find_params

    def find_params(self: Any, x: torch.Tensor, weight: bool = False) -> None:
        if weight and self.qcfg.sym:
            x = torch.where((x >= 0).all(1, keepdim=True), -x, x)
        find(self, x, weight=weight)

    Quantizer.find_params = find_params
    try:
        yield
    finally:
        Quantizer.find_params = find


def finish(model: PreTrainedModel) -> None:
    """Leave out of the config what was needed only once, and of the layers what they compile."""
    check_groups(model)
    config: Any = model.config.quantization_config
    config.dataset = config.tokenizer = None
    for module in model.modules():
        if hasattr(module, "qweight"):
            # `optimize` puts a torch.compile of the method here: a minute at the first step.
            vars(module).pop("dequantize_weight", None)


def _bar(items: Any, desc: str = "", leave: bool = True, **others: Any) -> Any:
    """tqdm's place in optimum: blocks are shown, the layers inside of one are not."""
    del desc, others
    console = Console(stderr=True)
    if not leave or not console.is_terminal:
        return items
    return track(items, "Quantizing", console=console)


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    """What gptqmodel logs through a logger of its own, and what it does to everybody's."""
    from logbar import LogBar

    root, own = logging.getLogger(), LogBar.shared()
    handlers, level, own_level = root.handlers[:], root.level, own.level
    own.setLevel(logging.ERROR)
    try:
        with quieted("optimum", *_BUILDER, *TORCHAO), warnings.catch_warnings():
            # A kernel is chosen beside the config that the checkpoint has, as is foreseen.
            warnings.filterwarnings("ignore", "You passed `quantization_config`", UserWarning)
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        own.setLevel(own_level)
