"""What a flag of others is on our command line, where the answer for Python is of no use there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

SO = "drop it: it is so anyway"
_PROMPT = "the prompt is an argument, without a name"
_TOKENIZER = "it is the tokenizer's: write it into the tokenizer_config.json of the model's folder"

#: Keyword -> the answer. Where it has a "{set}", the flag is a setting of a text, `--set` has it.
WORDS: Mapping[str, str] = {
    **dict.fromkeys(
        ("model_path", "model_id", "model_name", "hf_repo", "hf_repo_id", "repo_id", "filename",
         "model_url", "pretrained_model_name_or_path"), "write --model MODEL",
    ),
    **dict.fromkeys(
        ("mirostat", "mirostat_lr", "mirostat_ent", "mirostat_mode", "mirostat_tau", "mirostat_eta",
         "samplers", "repeat_last_n", "tfs", "tfs_z", "dry_multiplier", "dry_base",
         "dry_allowed_length", "dry_penalty_last_n", "xtc_probability", "xtc_threshold",
         "dynatemp_range", "top_n_sigma", "watermark"),
        "there is none; in Python a logits_processor of your own can do it",
    ),
    "typical": "{set}",
    "think": "write --set 'chat_template_kwargs={\"enable_thinking\": false}'",
    "hidethinking": "drop it: what a model thinks is a part of its text",
    "nowordwrap": "drop it: lines are never broken",
    "display_prompt": SO,
    "warmup": "drop it: nothing is tried before a step comes; `jackfield warm` traces them ahead",
    "lora": "write --adapter FOLDER",
    "system": "there is none: a server and Python take messages of the role system",
    "jinja": "drop it: a chat always goes through the model's own template",
    **dict.fromkeys(("inputs", "input_ids", "prompt", "prompts", "text_inputs"), _PROMPT),
    **dict.fromkeys(
        ("stream", "streamer"), "drop it: a text is shown as it grows"
    ),
    **dict.fromkeys(
        ("attention_mask", "args_parser", "negative_prompt_attention_mask"),
        "drop it: a prompt is one text here",
    ),
    **dict.fromkeys(
        ("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria"),
        "it is code, which only Python can give",
    ),
    **dict.fromkeys(("beam_width", "use_beam_search"), "write --decoding beam"),
    **dict.fromkeys(
        ("extra_body", "options", "parameters", "params", "sampling_params"),
        "write each of its fields as a flag of its own",
    ),
    **dict.fromkeys(
        ("add_generation_prompt", "continue_final_message", "skip_special_tokens",
         "enable_thinking"), "{set}true, or false",
    ),
    "documents": "{set}[…]",
    "tools": "{set}[…]",
    "stop_sequence": "write --stop TEXT",
    "negative_prompt_ids": "write --set 'negative_prompt=\"…\"'",
    "lora_request": "write --adapter FOLDER",
    "output_loading_info": "`jackfield explain` says it",
    "chat_template": "there is none: the tokenizer's own is used; write yours into the model's "
    "folder, as chat_template.jinja",
    "trust_remote_code": "there is none: code from a model's repository is never run",
    "tokenizer": "there is none: the tokenizer in the model's folder is used",
    "verbose": "write `jackfield --debug COMMAND`, or nothing",
    "quiet": "write 2>/dev/null behind it: what is said about a text goes to standard error",
    "truncate": "a prompt that is too long is an error; shorten it",
    "override_generation_config": "write --set key=value for each of its settings",
    "prompt_cache": "drop it: prompts are kept while a command runs, and in no file",
    "prompt_token_ids": "a prompt is a text here; Python and a server take token ids",
    "single_turn": "drop it: `jackfield generate` answers once",
    "conversation": "`jackfield chat` goes on; `generate --chat` answers once",
    "no_conversation": "drop it: `jackfield generate` answers once",
    "system_prompt": "there is none: a server and Python take messages of the role system",
    "reverse_prompt": "write --stop TEXT",
    "grammar_file": "write --set 'grammar=\"…\"', a grammar as Lark has them",
    "file": "write \"$(cat FILE)\" as the prompt",
    "color": "drop it: nothing is coloured",
    "mlock": "drop it: memory is not locked",
}  # fmt: skip

#: What begins with "no": the keyword without it -> the answer.
NEGATED: Mapping[str, str] = {
    "cb_use_cuda_graph": "write --compile none",
    "compile": "write --compile none",
    "warmup": SO,
    "display_prompt": "drop it: the prompt is never shown",
    "enable_cors": "drop it: no other site may ask without --cors-origin",
    "json": "drop it: a text is shown as text without --json",
    "non_blocking": SO,
    "stream": "write --json: the text is shown when it has ended",
    "truncate": "drop it: a prompt that is too long is refused, never cut",
}

#: Short flags of llama.cpp, which all its commands have, by what they are called in full.
SHORT: Mapping[str, str] = {
    "-c": "n_ctx", "-ctk": "cache_type_k", "-ctv": "cache_type_v", "-fa": "flash_attn",
    "-m": "model_id", "-n": "n_predict", "-ngl": "n_gpu_layers", "-p": "prompt",
    "-s": "random_seed", "-t": "n_threads", "-b": "n_batch", "-ub": "n_ubatch",
    "-q": "quiet", "-v": "verbose", "-cnv": "conversation", "-no-cnv": "no_conversation",
    "-sys": "system_prompt", "-md": "model_draft", "-r": "reverse_prompt", "-hf": "model_id",
    "-i": "conversation", "-f": "file", "-np": "n_parallel", "-sm": "split_mode",
    "-st": "single_turn", "-ts": "tensor_split", "-tb": "n_threads_batch", "-e": "escape",
    "-dev": "device", "-ot": "override_tensor", "-bf": "binary_file", "-mg": "main_gpu",
    "-l": "logit_bias",
}  # fmt: skip


#: What `warm` calls what others give to a server by these names.
OF_WARM: Mapping[str, str] = dict.fromkeys(
    ("batch_size", "max_batch_size", "parallel", "n_parallel", "max_num_seqs",
     "max_running_requests"), "--rows",
)  # fmt: skip

#: What `bench` calls what others give to a benchmark by these names.
OF_BENCH: Mapping[str, str] = {
    "batch_size": "--batch", "max_batch_size": "--batch", "n_predict": "--new-tokens",
    "n_gen": "--new-tokens", "max_tokens": "--new-tokens", "max_new_tokens": "--new-tokens",
    "output_len": "--new-tokens", "prompt": "--prompt-tokens", "n_prompt": "--prompt-tokens",
    "input_len": "--prompt-tokens", "num_prompts": "--requests", "reverse_prompt": "--rounds",
    "repetitions": "--rounds", "num_iters": "--rounds",
}  # fmt: skip


def for_a_command(answer: str) -> str:
    """An answer of `KEYWORDS` as a command line has it."""
    return _TOKENIZER if "jackfield.load(tokenizer=" in answer else answer


#: Advice of an engine for Python -> the same for a command line.
_ADVICE = (
    (re.compile(r"lift it with (\w+)=None"), r"lift it with --set \1=null"),
    (re.compile(r"jackfield\.load\(decoding=\{[^}]*'([\w-]+)': '[^']*'\}\)"), r"--decoding \1"),
)


def on_a_command_line(message: str) -> str:
    """What an engine says, its advice being such that it can be typed there."""
    for python, typed in _ADVICE:
        message = python.sub(typed, message)
    return message


def value_beside(flag: str, arguments: Sequence[str]) -> Any:
    """What stands behind a flag, as JSON reads it or as a text; True: nothing does."""
    for at, word in enumerate(arguments):
        written, mark, text = word.partition("=")
        if written.replace("_", "-") != flag.replace("_", "-"):
            continue
        if not mark:
            text = arguments[at + 1] if at + 1 < len(arguments) else "--"
            if text.startswith("-") and not text[1:2].isdigit():
                return True
        try:
            return json.loads(text)
        except ValueError:
            return text
    return True
