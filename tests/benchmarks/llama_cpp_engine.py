"""llama.cpp on the weights of a transformers model: conversion, quantization, greedy decoding.

Needs `gguf` and `llama-cpp-python`, compiled for the machine.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import llama_cpp
import numpy as np
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def convert(model: PreTrainedModel, path: Path) -> None:
    """Qwen2's weights as a GGUF file in float32 without a tokenizer; tied embeddings are one."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(known, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, kind: str) -> None:
    """To a type as llama.cpp's own tool names it (Q4_0, Q4_K_M, BF16, …), with its choice of
    another one for single tensors, as for the head."""
    params = llama_cpp.llama_model_quantize_default_params()
    whole = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
    params.nthread, params.ftype = 2, getattr(llama_cpp, f"LLAMA_FTYPE_{whole}")
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    if failed:
        raise RuntimeError(f"llama.cpp cannot quantize {source}")


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silent(level: int, text: bytes, data: int) -> None:
    """The log of llama.cpp, which is long."""


llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))


class LlamaCpp:
    """A loaded GGUF file. All sequences of a call are decoded together, greedily."""

    def __init__(self, path: Path, *, sequences: int, context: int, threads: int) -> None:
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context * sequences
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """The most likely tokens, `new` for each prompt; prompts are of one length."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        fed = [list(prompt) for prompt in prompts]
        cached = 0  # tokens of each sequence
        for _ in range(new):
            ends = self._feed(fed, cached)
            cached += len(fed[0])
            for output, end in zip(outputs, ends, strict=True):
                output.append(int(self._logits(end).argmax()))
            fed = [output[-1:] for output in outputs]
        return outputs

    def logits(self, prompt: list[int]) -> torch.Tensor:
        """Of the token after `prompt`: float32 `[vocab_size]`."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        (end,) = self._feed([prompt], 0)
        return torch.from_numpy(self._logits(end).copy())

    def _feed(self, rows: list[list[int]], cached: int) -> list[int]:
        """Decode the next tokens of each sequence; says where their logits are."""
        batch = llama_cpp.llama_batch_init(sum(map(len, rows)), 0, 1)
        ends, at = [], 0
        for sequence, row in enumerate(rows):
            for position, token in enumerate(row, cached):
                batch.token[at], batch.pos[at] = token, position
                batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, False
                at += 1
            batch.logits[at - 1] = True
            ends.append(at - 1)
        batch.n_tokens = at
        failed = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama.cpp ends with {failed}")
        return ends

    def _logits(self, end: int) -> np.ndarray:
        found = llama_cpp.llama_get_logits_ith(self.context, end)
        return np.ctypeslib.as_array(found, shape=(self.vocab_size,))
