"""Fields that other servers read (vLLM, SGLang, llama.cpp, TGI), and what there is here instead."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from jackfield.contracts.decoding import SAMPLER_SETTINGS
from jackfield.requests import neutral

#: the engine's setting -> what others call the field that asks for it
_SAME = {
    "max_new_tokens": "max_tokens max_completion_tokens max_output_tokens max_new_tokens n_predict "
    "num_predict max_length",
    "json_schema": "guided_json json_schema response_format structured_outputs guided_decoding "
    "format",
    "regex": "guided_regex",
    "choices": "guided_choice",
    "grammar": "guided_grammar ebnf",
    "repetition_penalty": "repeat_penalty",
    "num_return_sequences": "n best_of num_return_sequences n_cmpl",
    "stop": "stop_strings stop_sequences",
    "sequence_bias": "bad_words sequence_bias",
    "guidance_scale": "cfg_scale",
    "negative_prompt": "cfg_negative_prompt negative_prompt_ids",
    "seed": "random_seed",
    "logprobs": "n_probs top_n_tokens top_logprobs_num",
}
_NONE = "there is nothing like it here; drop it"
_END = "a text goes on where logit_bias has the id of the EOS token at -100, up to its length"
#: answer -> the fields that it answers
_ANSWERS = {
    _END: "ignore_eos min_tokens min_new_tokens min_length",
    "there is none; in Python: engine.generate(…, NAME=…)": "priority skip_special_tokens "
    "no_repeat_ngram_size typical_p epsilon_cutoff eta_cutoff",
    _NONE: "tfs_z mirostat mirostat_tau mirostat_eta dynatemp_range dynatemp_exponent "
    "xtc_probability xtc_threshold dry_multiplier dry_base dry_allowed_length dry_penalty_last_n "
    "dry_sequence_breakers top_n_sigma samplers top_a watermark length_penalty early_stopping "
    "diversity_penalty quadratic_sampling min_keep n_keep n_discard "
    "id_slot slot_id penalize_nl repeat_last_n "
    "detokenize vllm_xargs kv_transfer_params logits_processors return_hidden_states "
    "thinking_token_budget "
    "return_token_ids return_tokens_as_token_ids include_stop_str_in_output no_stop_trim "
    "spaces_between_special_tokens add_special_tokens "
    "mm_processor_kwargs guided_decoding_backend guided_whitespace_pattern",
    "the prompt of /v1/completions may be token ids": "prompt_token_ids",
    "texts end where stop says; token ids are not looked for": "stop_token_ids",
    "write choices or regex, which leave only those": "allowed_token_ids",
    "a prompt that is too long is refused; shorten it": "truncate truncate_prompt_tokens",
    "prompts have no log-probabilities here; drop it": "prompt_logprobs decoder_input_details",
    "write include_report=true, which tells what ran": "details timings_per_token",
    "fields stand in the body itself": "parameters generation_config sampling_params extra_body "
    "options",
    "the model's own chat template is used": "chat_template",
    "write chat_template_kwargs={'enable_thinking': …}": "enable_thinking thinking think",
    "write temperature=0 for the likeliest text, or more": "do_sample greedy temp",
    "write decoding='beam', where the server offers it": "use_beam_search num_beams beam_width",
    "write decoding, with the name of one that drafts so, where the server offers it": ""
    "assistant_early_exit num_assistant_tokens prompt_lookup_num_tokens use_mtp",
    "write adapter, with the name of one of --adapters": "adapter_id lora_path lora_name lora "
    "lora_request",
    "send it as the header X-Request-ID": "request_id rid",
    "the server has one for all requests: --deadline SECONDS": "t_max_predict_ms timeout max_time",
    "prompts are always kept for the next, within one key; cache_salt parts them": "cache_prompt",
    "thoughts come apart, as reasoning_content: leave it unread": "include_reasoning",
    "thoughts always come apart, as reasoning_content; put both together yourself": ""
    "separate_reasoning reasoning_format",
    "calls are always read out of the text, as tool_calls; give no tools to have none": ""
    "parse_tool_calls",
    "a stream has thoughts as they come": "stream_reasoning",
    "it is a field of /v1/completions; continue_final_message goes on with a text": "echo "
    "return_full_text",
    "it is a field of /v1/completions": "prompt inputs suffix",
    "it is a field of /v1/chat/completions": "messages",
    "it is a field of /v1/responses": "input instructions previous_response_id",
}
_FIELDS = {name: answer for answer, names in _ANSWERS.items() for name in names.split()}
_SETTINGS = {name: setting for setting, names in _SAME.items() for name in names.split()}


#: Where special tokens are added, and where a chat template writes them.
_ADDING = {"prompt": True, "messages": False, "input": False}
#: Of a field that says several structures: which field of ours each is.
_WITHIN = {"regex": "regex", "choice": "choices", "grammar": "grammar"}


#: Field -> its values that change nothing here. What a model's own config may say otherwise is
#: taken of a field alone, where `meant` puts it in its place.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **neutral.REQUESTS, "cfg_scale": (1,), "repeat_penalty": (1,)
}  # fmt: skip


def asks_for_nothing(name: str, value: Any, fields: Container[str]) -> bool:
    """Whether a field of other servers, in a body of `fields`, has a value that is so anyway."""
    if name == "add_special_tokens":
        return any(value is adds for field, adds in _ADDING.items() if field in fields)
    if name in fields:  # what it may be is said there; -1 keeps all tokens
        return name == "top_k" and value == -1 and type(value) in (int, float)
    known = name in _FIELDS or name in _SETTINGS
    return known and neutral.asks_for_nothing(NEUTRAL, name, value)


#: Fields that are settings of the engine by another name.
_MEANT = {
    "cfg_scale": "guidance_scale", "min_tokens": "min_new_tokens",
    "repeat_penalty": "repetition_penalty",
}  # fmt: skip


def meant(name: str, value: Any) -> dict[str, Any]:
    """The setting that a field with a neutral number stands for, if the engine has it: what the
    model's own config says otherwise is not so then.
    """
    setting = _MEANT.get(name, name)
    if setting not in SAMPLER_SETTINGS | {"num_beams"} or type(value) not in (int, float):
        return {}
    return {setting: 0 if name == "top_k" else value}


def instead_of_field(
    name: str, names: Mapping[str, str], fields: Container[str], value: Any = None
) -> str | None:
    """What a body of `fields` has in place of the field `name`; None: no idea.

    `names` maps the engine's settings to fields.
    """
    if name in ("structured_outputs", "guided_decoding") and isinstance(value, Mapping):
        for theirs, ours in _WITHIN.items():
            if value.get(theirs) is not None and ours in fields:
                return f"write {ours}"
    ours = names.get(_SETTINGS.get(name, ""), "")
    if ours.partition(".")[0] in fields and ours != "model":
        return f"write {ours}"
    return of_a_body(name)


def of_a_body(name: str) -> str | None:
    """What any body has in place of the field `name`; None: it may have just that."""
    answer = _FIELDS.get(name)
    return answer.replace("NAME", name) if answer else None
