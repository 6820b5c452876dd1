"""Prompts that are features: what a model's processor made of a sound or an image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jackfield.errors import PromptError

#: Names that processors and models have for features -> how many dimensions one prompt has.
DIMENSIONS: Mapping[str, int] = {"input_features": 2, "input_values": 1, "pixel_values": 3}

#: A sound of which the model's own feature extractor makes features: samples of one channel.
AUDIO = "audio"
_RATE = "sampling_rate"
_MASK = "attention_mask"
_BEGINNING = "decoder_input_ids"
#: What a processor returns beside them: what its own `decode` reads is nothing to the model.
_BESIDE = (_MASK, _BEGINNING, "audio_chunk_index")


#: Names that begin what a processor returns of an image or a video beside token ids.
_OF_IMAGES = (
    "aspect_ratio_", "cross_attention_mask", "image_attention_", "image_bound", "image_grid_",
    "image_num_", "image_patches", "image_position_", "image_sizes", "images", "mm_token_type_ids",
    "num_crops", "patch_attention_mask", "pixel_", "second_per_grid_ts", "spatial_shapes",
    "video_grid_",
)  # fmt: skip
_OF_SOUNDS = ("audio_", "feature_attention_mask", "input_features", "input_values")

#: How a prompt with images is written.
A_CHAT_WITH_IMAGES = (
    "[{'role': 'user', 'content': [{'type': 'image', 'image': …}, {'type': 'text', 'text': '…'}]}]"
)


def check_text_alone(names: Iterable[str]) -> None:
    """Raise PromptError where one of `names` is of an image or a sound beside a text."""
    known = sorted(names)
    if of_images := [name for name in known if name.startswith(_OF_IMAGES)]:
        raise PromptError(
            f"{of_images[0]} stands beside a text, and images are given in a chat: "
            f"{A_CHAT_WITH_IMAGES}"
        )
    if of_sounds := [name for name in known if name.startswith(_OF_SOUNDS)]:
        raise PromptError(
            f"{of_sounds[0]} stands beside a text, and a sound is a prompt by itself, of a "
            "model whose encoder reads sounds: {'audio': samples, 'sampling_rate': 16000}"
        )


@dataclass(frozen=True, eq=False)
class FeaturesPrompt:
    """The features of one prompt, as they were given: tensors, arrays or lists.

    Attributes:
        name: What they are called, one of `DIMENSIONS`, or `AUDIO`.
        values: Without a dimension for the batch.
        attention_mask: 1 where there is something, 0 where it was padded; None: all of it is.
        decoder_input_ids: What the decoder begins with; None: what the model says.
        sampling_rate: Of a sound, in samples a second.
    """

    name: str
    values: Any
    attention_mask: Any = None
    decoder_input_ids: Any = None
    sampling_rate: Any = None


def features_in(
    prompts: Any, settings: dict[str, Any], reads: str | None
) -> list[FeaturesPrompt] | FeaturesPrompt | None:
    """The prompts that are features, also out of `settings`; None: there are none.

    `reads` is what the model calls them: a bare array of floating-point numbers is that. A mapping
    may have a row for each of several prompts, as a processor returns it. Raises PromptError.
    """
    if "input_ids" in settings or (isinstance(prompts, Mapping) and "input_ids" in prompts):
        return None  # a text, whatever its processor returned beside it
    asked = [name for name in DIMENSIONS if settings.get(name) is not None]
    named = {name: settings.pop(name) for name in asked}
    if named:
        if prompts is not None:
            if reads is None:
                check_text_alone(named)
            raise PromptError(f"there is a prompt and {min(named)} beside it; give one of the two")
        prompts = named
    elif reads is not None and _is_array(prompts):
        prompts = {reads: prompts}
    if _are_features(prompts):
        beside = {name: settings.pop(name) for name in _BESIDE if name in settings}
        return _split({**prompts, **beside})
    if not isinstance(prompts, list | tuple) or not prompts:
        return None
    if reads is not None:
        prompts = [{reads: one} if _is_array(one) else one for one in prompts]
    if not any(map(_are_features, prompts)):
        return None
    return [_one(number, prompt) for number, prompt in enumerate(prompts)]


def _is_array(value: Any) -> bool:
    """Whether it is a tensor or an array of floating-point numbers."""
    return hasattr(value, "shape") and "float" in str(getattr(value, "dtype", ""))


def _are_features(value: Any) -> bool:
    return isinstance(value, Mapping) and (
        AUDIO in value or not DIMENSIONS.keys().isdisjoint(value)
    )


def _one(number: int, prompt: Any) -> FeaturesPrompt:
    if not _are_features(prompt):
        raise PromptError(f"prompt {number} is no features, and others are; give those by itself")
    found = _split(prompt)
    if isinstance(found, FeaturesPrompt):
        return found
    if len(found) != 1:
        raise PromptError(f"prompt {number} has {len(found)} rows; give each as a prompt")
    return found[0]


def _split(given: Mapping[str, Any]) -> list[FeaturesPrompt] | FeaturesPrompt:
    """One prompt, or one for each row where there is a dimension for the batch."""
    names = [name for name in (AUDIO, *DIMENSIONS) if name in given]
    if len(names) > 1:
        raise PromptError(f"there are {' and '.join(names)}; give the one that the model reads")
    beside = {*names, *_BESIDE, *([_RATE] if AUDIO in given else [])}
    if others := sorted(map(str, given.keys() - beside)):
        raise PromptError(f"nothing here reads {', '.join(map(repr, others))} of features; drop it")
    name, own = names[0], DIMENSIONS.get(names[0])
    values, depth = given[name], _depth(given[name])
    if own is None or depth == own:
        one = given.get(_MASK), given.get(_BEGINNING), given.get(_RATE)
        return FeaturesPrompt(name, values, *one)
    if depth != own + 1:
        raise PromptError(
            f"{name} has {depth} dimensions; of one prompt it has {own}, of several {own + 1}"
        )
    rows = len(values)
    masks, begun = (_rows(given.get(beside), beside, name, rows) for beside in (_MASK, _BEGINNING))
    return [FeaturesPrompt(name, *row) for row in zip(values, masks, begun, strict=True)]


def _rows(value: Any, beside: str, name: str, rows: int) -> Sequence[Any]:
    if value is None:
        return [None] * rows
    if _depth(value) != 2 or len(value) != rows:
        raise PromptError(f"{beside} must have {rows} rows, as {name} has")
    return list(value)


def _depth(value: Any) -> int:
    """How many dimensions it has: those of its first entries, where it is of lists."""
    if (shape := getattr(value, "shape", None)) is not None:
        return len(shape)
    if not isinstance(value, list | tuple):
        return 0
    return 1 + (_depth(value[0]) if value else 0)
