"""Small models that read images, their processors, and chats for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import extras
import numpy as np
import pytest
import torch
import transformers

from jackfield.bridge.batch_trial import drawn
from jackfield.bridge.image_reader import check_takes_images
from jackfield.demo import MODEL_PATH

with extras.imports():
    from PIL import Image
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TEXT: dict[str, Any] = {
    "vocab_size": 800, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
_TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' ~ m['role'] ~ '|>' -}}"
    "{%- if m['content'] is string -%}{{- m['content'] -}}{%- else -%}"
    "{%- for p in m['content'] -%}"
    "{%- if p['type'] == 'image' -%}{{- 'IMAGE' -}}{%- else -%}{{- p['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def _tokenizer(*names: str, **own: str) -> Any:
    found: Any = transformers.AutoTokenizer.from_pretrained(MODEL_PATH)
    found.add_special_tokens({"additional_special_tokens": list(names)})
    found.chat_template = None
    for name, token in own.items():
        setattr(found, name, token)
        setattr(found, f"{name}_id", found.convert_tokens_to_ids(token))
    return found


class _NoVideo:
    """A processor without torchvision, which its video_processor needs."""

    def check_argument_for_proper_class(self, name: str, arg: Any) -> Any:
        if name == "video_processor":
            return None
        return super().check_argument_for_proper_class(name, arg)  # type: ignore[misc]


class _GotOcr2(transformers.GotOcr2Processor):
    """Says 4 tokens for an image; how many they are, its users tell it at each call."""

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        few = {**kwargs, "num_image_tokens": 4}
        return super().replace_image_token(image_inputs, image_idx, **few)  # type: ignore[no-any-return,no-untyped-call]


class _InternVL(_NoVideo, transformers.InternVLProcessor):
    pass


class _OneVision(_NoVideo, transformers.LlavaOnevisionProcessor):
    pass


class _Qwen2(_NoVideo, transformers.Qwen2VLProcessor):
    pass


class _Qwen25(_NoVideo, transformers.Qwen2_5_VLProcessor):
    pass


class _Qwen3(_NoVideo, transformers.Qwen3VLProcessor):
    pass


def _llava() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>")
    side = {"height": 24, "width": 24}
    processor = transformers.LlavaProcessor(
        image_processor=LlavaImageProcessorPil(size={"shortest_edge": 24}, crop_size=side),
        tokenizer=tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(**{**VISION, "image_size": 24}, projection_dim=16)
    return transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    ), processor  # fmt: skip


_TILES = [[32, 64], [64, 32], [64, 64]]


def _llava_next() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>")
    side = {"height": 32, "width": 32}
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=side, image_grid_pinpoints=_TILES
    )
    vision = transformers.CLIPVisionConfig(**VISION, projection_dim=16)
    return transformers.LlavaNextConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), image_grid_pinpoints=_TILES,
    ), transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


def _llava_onevision() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<image>", "<video>")
    images = LlavaOnevisionImageProcessorPil(
        size={"height": 32, "width": 32}, image_grid_pinpoints=_TILES
    )
    vision = transformers.SiglipVisionConfig(**VISION, vision_use_head=False)
    return transformers.LlavaOnevisionConfig(
        vision_config=vision, text_config=transformers.Qwen2Config(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"), image_grid_pinpoints=_TILES,
        vision_feature_select_strategy="full", vision_feature_layer=-1,
    ), _OneVision(
        images, tokenizer, None, num_image_tokens=16, vision_feature_select_strategy="full"
    )  # fmt: skip


def _got_ocr2() -> tuple[Any, Any]:
    tokenizer = _tokenizer("<img>", "</img>", "<imgpad>")
    images = GotOcr2ImageProcessorPil(size={"height": 64, "width": 64})
    vision = {
        "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 2, "mlp_dim": 32,
        "num_attention_heads": 2, "image_size": 64, "patch_size": 8, "window_size": 4,
        "global_attn_indexes": [1],
    }  # fmt: skip
    return transformers.GotOcr2Config(
        vision_config=vision, text_config={"model_type": "qwen2", **TEXT},
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"), image_seq_length=4,
    ), _GotOcr2(images, tokenizer)  # fmt: skip


def _idefics3() -> tuple[Any, Any]:
    tiles = [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)]
    own = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
    tokenizer = _tokenizer(*own, *tiles)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    return transformers.Idefics3Config(
        vision_config={**VISION, "hidden_size": 32}, text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2, pad_token_id=0,
    ), transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)  # fmt: skip


def _internvl() -> tuple[Any, Any]:
    tokenizer = _tokenizer(
        "<img>", "</img>", "<IMG_CONTEXT>", "<video>", start_image_token="<img>",
        end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>",
    )  # fmt: skip
    images = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    return transformers.InternVLConfig(
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        text_config=transformers.Qwen2Config(**TEXT), image_seq_length=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
    ), _InternVL(images, tokenizer, None, image_seq_length=4)  # fmt: skip


def _gemma3() -> tuple[Any, Any]:
    tokenizer = _tokenizer(
        "<boi>", "<eoi>", "<soft>", boi_token="<boi>", eoi_token="<eoi>", image_token="<soft>"
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**TEXT, "num_hidden_layers": 3, "layer_types": layers, "head_dim": 8}
    return transformers.Gemma3Config(
        vision_config={**VISION, "vision_use_head": False},
        text_config={**text, "sliding_window": 8}, mm_tokens_per_image=16,
        tie_word_embeddings=False,  # else it repeats the last token, whatever it has read
        image_token_id=tokenizer.convert_tokens_to_ids("<soft>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<boi>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<eoi>"),
    ), transformers.Gemma3Processor(images, tokenizer, image_seq_length=16)  # fmt: skip


class _Gemma4(_NoVideo, transformers.Gemma4Processor):
    """A processor without the package that its feature_extractor, for sound, needs."""

    def check_argument_for_proper_class(self, name: str, arg: Any) -> Any:
        if name == "feature_extractor":
            return None
        return super().check_argument_for_proper_class(name, arg)  # type: ignore[no-untyped-call]


def _gemma4() -> tuple[Any, Any]:
    names = {
        f"{name}_token": f"<{name}>" for name in ("image", "boi", "eoi", "boa", "eoa", "audio")
    }
    tokenizer = _tokenizer("<|video|>", *names.values(), **names)
    images = Gemma4ImageProcessorPil(patch_size=8, max_soft_tokens=70, pooling_kernel_size=2)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    layers = ["sliding_attention", "full_attention"] * 2
    text = {**TEXT, "num_hidden_layers": 4, "layer_types": layers, "head_dim": 8}
    text |= {"global_head_dim": 16, "sliding_window": 8, "hidden_size_per_layer_input": 0}
    text |= {"num_kv_shared_layers": 2}  # those of the smaller Gemma 4
    vision = {**VISION, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2}
    return transformers.Gemma4Config(
        vision_config={**vision, "position_embedding_size": 64},
        text_config={**text, "use_bidirectional_attention": "vision"}, audio_config=None,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"), tie_word_embeddings=False,
        **ids,
    ), _Gemma4(None, images, tokenizer, None)  # fmt: skip


def _qwen(kind: type[Any]) -> tuple[dict[str, int], Any]:
    names = {
        "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    }  # fmt: skip
    tokenizer = _tokenizer(*names.values())
    images = Qwen2VLImageProcessorPil(
        min_pixels=16 * 16, max_pixels=32 * 64, patch_size=8, merge_size=2
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    return ids, kind(images, tokenizer, None)


_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 8,
    "spatial_merge_size": 2, "out_hidden_size": 32,
}  # fmt: skip


def _qwen2() -> tuple[Any, Any]:
    ids, processor = _qwen(_Qwen2)
    vision = {
        "embed_dim": 32, "hidden_size": 32, "depth": 2, "num_heads": 2, "patch_size": 8,
        "spatial_merge_size": 2, "mlp_ratio": 2,
    }  # fmt: skip
    return transformers.Qwen2VLConfig(
        vision_config=vision, text_config={**TEXT, "rope_parameters": _ROTARY}, **ids
    ), processor


def _qwen25() -> tuple[Any, Any]:
    ids, processor = _qwen(_Qwen25)
    vision = {**_QWEN_VISION, "depth": 2, "window_size": 32, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(
        vision_config=vision, text_config={**TEXT, "rope_parameters": _ROTARY}, **ids
    ), processor


def _qwen3() -> tuple[Any, Any]:
    ids, processor = _qwen(_Qwen3)
    vision = {**_QWEN_VISION, "depth": 3, "num_position_embeddings": 64}
    return transformers.Qwen3VLConfig(
        vision_config={**vision, "deepstack_visual_indexes": [0, 1]},
        text_config={**TEXT, "head_dim": 8, "rope_parameters": _ROTARY}, **ids,
    ), processor  # fmt: skip


#: type of a model -> its config, its processor
_MADE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gemma3": _gemma3, "gemma4": _gemma4, "got_ocr2": _got_ocr2, "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava, "llava_next": _llava_next, "llava_onevision": _llava_onevision,
    "qwen2_5_vl": _qwen25, "qwen2_vl": _qwen2, "qwen3_vl": _qwen3,
}  # fmt: skip


@torch.no_grad()
def build(model_type: str) -> tuple[Any, Any]:
    """A model of that type in float64, and its processor, which alone has the chat template."""
    config, processor = _MADE[model_type]()
    written = processor.boi_token if model_type == "gemma3" else processor.image_token
    if model_type.startswith("qwen"):  # transformers takes images side by side for one
        written = f"<|vision_start|>{written}<|vision_end|>"
    processor.chat_template = _TEMPLATE.replace("IMAGE", written)
    cls = transformers.AutoModelForImageTextToText._model_mapping[type(config)]
    if why := check_takes_images(cls, config):
        pytest.skip(why)
    torch.manual_seed(0)
    model = drawn(config, cls, torch.float64)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model, processor


def picture(seed: int, width: int = 50, height: int = 20) -> Image.Image:
    data = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype("uint8")
    return Image.fromarray(data)


def chat(*parts: str | Image.Image) -> list[dict[str, Any]]:
    """One message of the user's, of texts and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def sixteen() -> list[list[dict[str, Any]]]:
    """Chats of all lengths with no image, one, several, and the same ones."""
    a, b, c = picture(0), picture(1, 30, 45), picture(2, 33, 33)
    told = [{"role": "system", "content": "be brief"}, *chat("first ", a)]
    told += [{"role": "assistant", "content": "a thing"}, *chat("and this? ", b)]
    return [
        chat("what is ", a, " and ", b, " here"), chat("what is ", b, " and ", a, " here"),
        chat("no image at all"), chat(c, "say it"), chat("one two ", a), chat(b, a),
        [{"role": "user", "content": "plain"}], chat(a, b, c, a), told, chat(c), chat("hm"),
        chat("what is ", a), chat("what is ", c), chat("a longer text of several words ", b, "?"),
        chat(a, "x"), chat("once upon a time there was"),
    ]  # fmt: skip


def given(processor: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What the processor returns for a chat, as its users call it."""
    how = {"return_tensors": "pt", "add_special_tokens": False}
    found = processor.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, processor_kwargs=how
    )
    return dict(found)


def generated(
    model: Any, processor: Any, messages: list[dict[str, Any]], **settings: Any
) -> list[int]:
    """The new tokens of transformers' `generate`, of one chat alone."""
    inputs = given(processor, messages)
    rows = model.generate(**inputs, **{"do_sample": False, **settings})
    return rows[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def published(model_type: str) -> tuple[Any, Any]:
    """A config of the size that is published, and a processor for it; no model is built."""
    config, processor = _MADE[model_type]()
    images = processor.image_processor
    wide = {"hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 151936}
    wide |= {"num_hidden_layers": 28, "intermediate_size": 6144}
    ids = {"image_token_id": config.image_token_id}
    for name in ("video_token_id", "vision_start_token_id", "vision_end_token_id"):
        if isinstance(token := getattr(config, name, None), int):
            ids[name] = token
    if model_type == "llava":
        images.size, images.crop_size = {"shortest_edge": 336}, {"height": 336, "width": 336}
        processor.patch_size = 14
        return transformers.LlavaConfig(**ids), processor
    if model_type == "internvl":
        images.size, images.max_patches = {"height": 448, "width": 448}, 12
        processor.image_seq_length = 256
        return transformers.InternVLConfig(**ids), processor
    if model_type == "gemma3":
        images.size = {"height": 896, "width": 896}
        tower: dict[str, Any] = {"image_size": 896, "patch_size": 14, "vision_use_head": False}
        return transformers.Gemma3Config(
            text_config={"vocab_size": 262208}, vision_config=tower, **ids
        ), transformers.Gemma3Processor(images, processor.tokenizer)  # fmt: skip
    images.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    if model_type == "qwen2_5_vl":
        images.patch_size = 14
        turns = {**_ROTARY, "mrope_section": [16, 24, 24]}
        text = {**wide, "num_key_value_heads": 2, "rope_parameters": turns}
        vision: dict[str, Any] = {"hidden_size": 1280, "out_hidden_size": 2048}
        return transformers.Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, **ids
        ), processor
    images.patch_size = 16
    turns = {**_ROTARY, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {**wide, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": turns}
    vision = {"hidden_size": 1024, "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids), processor
