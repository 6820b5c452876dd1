"""Small models that read features, with weights that make all that was read count."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from jackfield.bridge.batch_trial import drawn
from jackfield.bridge.features import shape_of

START, EOS, VOCAB = 2, 1, 97
_WHISPER = {
    "vocab_size": VOCAB, "num_mel_bins": 8, "encoder_layers": 3, "decoder_layers": 2, "d_model": 32,
    "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64, "max_source_positions": 30, "max_target_positions": 64,
}  # fmt: skip
_OTHER = ("num_mel_bins", "max_source_positions")
_TOKENS = {
    "bos_token_id": 0, "eos_token_id": EOS, "pad_token_id": 0, "decoder_start_token_id": START,
}  # fmt: skip
_PARAKEET = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "num_mel_bins": 16, "subsampling_conv_channels": 8, "max_position_embeddings": 64,
}  # fmt: skip
_DECODER = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
_BART = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
_CONVOLUTIONS = {
    "conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (20, 16),
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_WAV2VEC = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "num_feat_extract_layers": 2, **_CONVOLUTIONS,
}  # fmt: skip
_BLOCK = {"hidden_size": 32, "intermediate_size": 64}


def _config(kind: str) -> Any:
    t = transformers
    match kind:
        case "whisper":
            return t.WhisperConfig(**_WHISPER, **_TOKENS)
        case "speech_to_text":
            return t.Speech2TextConfig(
                **{k: v for k, v in _WHISPER.items() if k not in _OTHER}, **_TOKENS,
                max_source_positions=400, input_feat_per_channel=8, conv_channels=32,
            )  # fmt: skip
        case "moonshine":
            return t.MoonshineConfig(
                vocab_size=VOCAB, **_BLOCK, encoder_num_hidden_layers=2,
                decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
                decoder_num_attention_heads=4, encoder_num_key_value_heads=4,
                decoder_num_key_value_heads=4,
            )  # fmt: skip
        case "moonshine_streaming":
            encoder = {
                **_BLOCK, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
                "num_key_value_heads": 4, "sliding_windows": [[4, 2], [4, 0]],
            }  # fmt: skip
            own = {**_DECODER, "head_dim": 8, "rope_parameters": _ROPE}
            return t.MoonshineStreamingConfig(encoder_config=encoder, **own)
        case "canary":
            return t.CanaryConfig(
                encoder_config=dict(_PARAKEET), decoder_config=dict(_DECODER), vocab_size=VOCAB
            )
        case "cohere_asr":
            return t.CohereAsrConfig(encoder_config=dict(_PARAKEET), **_DECODER, head_dim=8)
        case "speecht5":
            return t.SpeechT5Config(
                vocab_size=VOCAB, hidden_size=32, encoder_layers=2, decoder_layers=2,
                encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
                decoder_ffn_dim=64, **_CONVOLUTIONS,
            )  # fmt: skip
        case "wav2vec2-bart":
            return t.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
                t.Wav2Vec2Config(**_WAV2VEC), t.BartConfig(**_BART)
            )
        case "wav2vec2bert-bart":
            encoder = t.Wav2Vec2BertConfig(
                hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                feature_projection_input_dim=16,
            )  # fmt: skip
            return t.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
                encoder, t.BartConfig(**_BART)
            )
        case "vit-trocr":
            encoder = t.ViTConfig(
                **_BLOCK, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
            )
            decoder = t.TrOCRConfig(**_BART)
            return t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        case "donut":
            encoder = t.DonutSwinConfig(
                image_size=[64, 32], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
            )
            decoder = t.MBartConfig(**_BART)
            return t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    raise ValueError(kind)


_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

KINDS = (
    "whisper", "speech_to_text", "moonshine", "moonshine_streaming", "canary", "cohere_asr",
    "speecht5", "wav2vec2-bart", "wav2vec2bert-bart", "vit-trocr", "donut",
)  # fmt: skip


@torch.no_grad()
def build(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of that kind, whose texts begin with `START`; `changes` are fields of its config."""
    config = _config(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = drawn(config, None, dtype)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=START, pad_token_id=0, eos_token_id=EOS
    )
    return model


def prompts(model: Any, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """What its processor would return of so many prompts, each of another length.

    The last one is padded, with a mask. Rows of a batch of one, in float32.
    """
    shape = shape_of(model.config)
    assert shape is not None
    made = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        length = _length(shape, number)
        sizes = [length if size is None else size for size in shape.sizes]
        found.append({shape.name: torch.randn([1, *sizes], generator=made)})
    if shape.along is not None and not shape.padded:
        values = found[-1][shape.name]
        size = values.shape[1 + shape.along]
        gone = size // 4 // shape.multiple * shape.multiple
        values.narrow(1 + shape.along, size - gone, gone).zero_()
        mask = torch.ones(1, size, dtype=torch.long)
        mask[:, size - gone :] = 0
        found[-1]["attention_mask"] = mask
    return found


def _length(shape: Any, number: int) -> int:
    if shape.along is None:
        return 0
    if shape.padded:
        return int(shape.most)
    unit = {"samples": 480, "frames": 16}[shape.axes[shape.along]]
    return int(unit * (9 + 4 * (number % 3)))


def generated(model: Any, prompt: dict[str, Any], **settings: Any) -> list[int]:
    """The new tokens of transformers' `generate`, of one prompt alone."""
    given = {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in prompt.items()
    }
    # What Whisper returns otherwise is cut at tokens for times, which random weights say too.
    asked = {"do_sample": False, "return_dict_in_generate": True, **settings}
    out = model.generate(**given, **copy.deepcopy(asked))
    found: list[int] = out["sequences"][0].tolist()
    return found[1:]
