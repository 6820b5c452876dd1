"""A model's processor: what it makes of an image, for the model and in place of it in a text."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import transformers
from transformers import AutoProcessor, ProcessorMixin

from jackfield.bridge.encoders import text_class
from jackfield.bridge.image_encoder import TAKEN
from jackfield.bridge.image_parts import Picture
from jackfield.bridge.processor_files import read_from_files
from jackfield.errors import PromptError, UsageError, error_text

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from jackfield.bridge.image_hosts import ImageHosts
    from jackfield.bridge.source import ModelSource
    from jackfield.contracts import Requirements

#: What a processor returns that is of its text and no image.
OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids",
     "text_replacement_offsets"}
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ReadImage:
    """An image as its model reads it.

    Attributes:
        digest: Equal for equal images.
        text: What stands for it in a text.
        fields: What `get_image_features` of the model is called with, among others.
    """

    digest: bytes
    text: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class ImageRules:
    """What a model needs of prompts with images, and of the steps that read them.

    Attributes:
        alone: Why a chat may have one image and no more; None: it may have several.
        token_types: The argument that tells the model which tokens are an image's, in a step that
            reads prompts whole; None: it need not be told.
        blocks_in: The types of layers in which an image's tokens see one another, for steps in the
            packed layout; none: each sees what is before it.
    """

    alone: str | None = None
    token_types: str | None = None
    blocks_in: frozenset[str] = frozenset()


class ImageReader:
    """The processor of a model that reads images; `token` is what its template writes for one.

    `hosts` are those that images are fetched from; None: none are. `rules` are what a trial found.
    """

    def __init__(self, processor: Any, hosts: ImageHosts | None = None) -> None:
        self.processor, self.hosts = processor, hosts
        self.rules = ImageRules()
        self.token: str = processor.image_token
        self._lock = threading.Lock()  # a processor's tokenizer is for one thread
        self._read: WeakValueDictionary[bytes, ReadImage] = WeakValueDictionary()

    def windows(self, requirements: Requirements) -> frozenset[int | None]:
        """Those of layers in whose types an image's tokens see one another."""
        layers = zip(requirements.windows, requirements.layer_types, strict=True)
        return frozenset(window for window, kind in layers if kind in self.rules.blocks_in)

    def read(self, where: str, picture: Picture) -> ReadImage:
        """What the processor makes of an image, once while anybody has it. Raises PromptError."""
        with self._lock:
            found = self._read.get(picture.digest)
            if found is None:
                found = self._read[picture.digest] = self._processed(where, picture)
        return found

    def _processed(self, where: str, picture: Picture) -> ReadImage:
        try:
            found = self.processor(
                text=[self.token],
                images=[picture.image],
                add_special_tokens=False,
                padding=False,  # which would stay on in a tokenizer that others use
                return_text_replacement_offsets=True,
                images_kwargs={"return_tensors": "pt"},
            )
            ((place,),) = found["text_replacement_offsets"]
        except Exception as error:
            raise PromptError(
                f"{where}: {type(self.processor).__name__} cannot read the image: "
                f"{error_text(error)[:300]}"
            ) from error
        fields = {name: value for name, value in found.items() if name not in OF_TEXT}
        return ReadImage(picture.digest, place["replacement"], fields)


def class_of(source: ModelSource) -> Any:
    """The class of a model's that generates text; None: transformers has none."""
    if source.live is not None:
        return type(source.live)
    found = text_class(source.config)._model_mapping.get(type(source.config), None)
    return found[0] if isinstance(found, tuple) else found


def reads_images(source: ModelSource) -> bool:
    """Whether models of its class say something of images."""
    return source.gguf is None and hasattr(class_of(source), "get_image_features")


def check_takes_images(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Why images are not put into the steps of a model of this class; None: they can be."""
    taken = inspect.signature(cls.forward).parameters
    if TAKEN not in taken:
        return (
            f"{cls.__name__} of transformers {transformers.__version__} takes no {TAKEN}, by which "
            "they are put into its steps; a later transformers may"
        )
    token = getattr(config, "image_token_id", None)
    if not isinstance(token, int) or token <= 0:
        return f"its config says {token!r} for image_token_id, the token that stands for them"
    return None


def processor_of(given: Any, source: ModelSource) -> Any:
    """The processor that was given as the tokenizer, or the one of the same files.

    Raises UsageError, with a reason that is to stand behind why no image is read.
    """
    if isinstance(given, ProcessorMixin):
        return given
    hint = "; install that, with pip install torchvision where that is it"
    found = read_from_files(AutoProcessor, "processor", given, source, hint)
    if not isinstance(found, ProcessorMixin):
        raise UsageError("it comes without a processor of images (processor_config.json)")
    return found


def lacks(processor: Any) -> str | None:
    """Why a processor is of no use here; None: it is."""
    if getattr(processor, "image_processor", None) is None:
        return f"{type(processor).__name__} has no image_processor"
    if not isinstance(getattr(processor, "image_token", None), str):
        return f"{type(processor).__name__} names no image_token"
    return None


def stacked(processor: Any, text: str, images: list[Any]) -> dict[str, torch.Tensor]:
    """All that `processor` returns for a text with several images, as its own users call it.

    That is `apply_chat_template(tokenize=True)`, which gives it a list of images for each text:
    LLaVA-OneVision makes other tokens of one that has several.
    """
    how = {"return_tensors": "pt", "add_special_tokens": False, "padding": False}
    return dict(processor(text=[text], images=[images], **how))
