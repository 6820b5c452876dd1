"""Load weights, after making sure that the files are whole and safe."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jackfield.bridge.encoders import text_class
from jackfield.bridge.footprint import stored_quantization
from jackfield.bridge.headers import check_files
from jackfield.bridge.hub_files import cached_folder, fetch, is_whole
from jackfield.bridge.placement import Placement
from jackfield.bridge.quiet import quiet
from jackfield.bridge.read_back import check_floats, check_shapes
from jackfield.bridge.sharding import Shard, check_loaded, loading
from jackfield.bridge.shared_layers import connect
from jackfield.bridge.shared_models import part_of
from jackfield.bridge.source import ModelSource
from jackfield.bridge.spreading import check_placed, has_accelerate, native, no_notes
from jackfield.contracts import Quantization, Requirements, StoredTensor
from jackfield.contracts.checkpoint import Tensors
from jackfield.contracts.compiling import TRACING
from jackfield.errors import CheckpointError, shown
from jackfield.foreign import named

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("jackfield")


def tensors_in(source: ModelSource) -> dict[str, StoredTensor]:
    """Every tensor by its file's header: of a folder or a file, or of a hub model whose files are
    here.

    None of a hub model that transformers finds by itself. Raises CheckpointError.
    """
    if source.gguf is not None:
        return source.gguf.tensors()
    folder = source.folder or _fetched(source)
    return {} if folder is None else check_files(folder, _named(source))


def _named(source: ModelSource) -> object:
    """The file of weights that the config names, if it does."""
    return getattr(source.config, "transformers_weights", None)


def _fetched(source: ModelSource, check: Callable[[Tensors], None] | None = None) -> Path | None:
    """The folder of a hub model's weights; they are fetched if `check` is there to look first."""
    if source.location is None or source.folder is not None or source.gguf is not None:
        return None
    folder = cached_folder(source.location, source.revision)
    if folder is None:
        return None
    if check is None:
        return folder if is_whole(folder, _named(source)) else None
    with named(f"cannot fetch {source.location}"), quiet():
        return fetch(source.location, folder, _named(source), check)


def _checked(source: ModelSource, needs: Requirements, quantization: Quantization) -> Path | None:
    """Where a hub model was fetched to, once its tensors are known to be what will be read.

    Those of a folder or a file are looked at too. Raises CheckpointError.
    """

    def check(tensors: Tensors) -> None:
        if needs.stored is not None or quantization.config is not None:
            check_shapes(source.config, tensors)
        else:
            check_floats(str(source.location), tensors)

    fetched = _fetched(source, check)
    if tensors := tensors_in(source):
        if reasons := quantization.misfits(tensors):
            raise CheckpointError(f"{source.location}: {'; '.join(reasons)}")
        if source.gguf is None:  # whose tensors were compared with the model when it was found
            check(tensors)
    return fetched


def load_model(
    source: ModelSource,
    needs: Requirements,
    where: Placement,
    quantization: Quantization,
    folder: Path | None = None,
    shard: Shard | None = None,
) -> PreTrainedModel:
    """Load the weights of `source`, as `needs` have them, to their places. Raises CheckpointError.

    What lies on disk stays in the checkpoint, or is written to `folder` where transformers stores
    it in another form. A weight that the checkpoint lacks is an error, not a random number. With
    `shard`, of which torch has a process group by now, only its part is read.
    """
    fetched = _checked(source, needs, quantization)
    quantized = stored_quantization(source.config) is not None or quantization.config is not None
    # Read to their device one by one: otherwise main memory would have to hold all of them first.
    # A quantizer puts weights where they belong as it makes them.
    device = torch.device(where.device)
    placed = where.spread or (device.type != "cpu" and (quantized or has_accelerate()))
    reading = quantization.reading()
    named_so = named(f"cannot load {source.location}")
    with named_so, quiet(), TRACING, reading, no_notes(), loading(shard) as how:
        of, what = _read_from(source, fetched)
        loaded: Any = of.from_pretrained(
            **what,
            dtype=getattr(torch, needs.dtype),
            attn_implementation="eager",  # the plan plugs in what was chosen
            experts_implementation=needs.experts_implementation,
            quantization_config=quantization.config,
            device_map=native(where) if placed and shard is None else None,
            **how,
            offload_folder=None if folder is None else str(folder),
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported, and refused below with the names
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    _check_complete(source, loaded[1])
    part = None if shard is None else part_of(source.config, shard)
    if part is not None:
        check_loaded(model, part)
    quantization.finish(model)
    if part is not None and shard is not None and quantized:
        connect(model, part, needs.weights, shard)
    if where.spread:
        check_placed(model, where)
    elif not placed and model.device != device:
        model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides nn.Module's signature
    model.eval()
    if not (quantized or where.spread):
        _tell_untied(source, model)
    return model


def _read_from(source: ModelSource, fetched: Path | None) -> tuple[Any, dict[str, Any]]:
    """Whose `from_pretrained` reads a model, and the arguments that say which."""
    if source.gguf is not None:
        return source.gguf.model_class, {
            "pretrained_model_name_or_path": None,
            "config": source.gguf.whole_config(),
            "state_dict": dict(source.gguf.weights),
        }
    return text_class(source.config), {
        "pretrained_model_name_or_path": source.location or "",
        "config": source.config,
        "revision": source.revision if fetched is None else fetched.name,
    }


def _check_complete(source: ModelSource, info: dict[str, Any]) -> None:
    mismatched = [f"{name} {tuple(theirs)}" for name, theirs, _ in info["mismatched_keys"]]
    for names, what in (
        (info["missing_keys"], "lacks"),
        (mismatched, "has the wrong shape for"),
    ):
        if names:
            raise CheckpointError(
                f"the checkpoint {source.location} {what} {_some(names)}; {source.origin} does "
                "not fit its weights"
            )
    if info["unexpected_keys"]:
        logger.warning(
            "the checkpoint %s has weights that %s has no place for: %s",
            source.location,
            source.config.model_type,
            _some(info["unexpected_keys"]),
        )


def _tell_untied(source: ModelSource, model: PreTrainedModel) -> None:
    """Say where a head that the config ties has other weights of its own, as transformers does."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    if tied and head is not None and head.weight is not embeddings.weight:
        logger.warning(
            "the checkpoint %s has weights of its own for the head, which its config ties to the "
            "embeddings; they are used as they are (tie_word_embeddings=false says so)",
            source.location,
        )


def _some(names: Iterable[str]) -> str:
    ordered = [shown(name) for name in sorted(names)]
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(ordered[:3]) + more
