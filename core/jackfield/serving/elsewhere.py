"""Paths of other servers, and of OpenAI's endpoints that are not here: what there is instead."""

from __future__ import annotations

_CHAT = "POST /v1/chat/completions goes on with a conversation"
_TEXT = "POST /v1/completions goes on with a text"
_NO_EMBEDDINGS = "texts are made here, and no embeddings or scores"
_RUNS = "GET /v1/models, /v1/plan and /v1/report say what runs"
_HEALTH = "GET /health says whether requests are answered, /health/live whether it lives"
_TOKENS = "POST /v1/completions with max_tokens 0 and echo true counts the tokens of a prompt"

#: path -> what there is
_PATHS = {
    **dict.fromkeys(
        ("/api/chat", "/chat/completions", "/v1/messages", "/v1/chat", "/v1/threads"), _CHAT
    ),
    **dict.fromkeys(
        ("/api/generate", "/completion", "/completions", "/generate", "/generate_stream", "/infill",
         "/invocations"), _TEXT,
    ),
    **dict.fromkeys(
        ("/api/embed", "/api/embeddings", "/classify", "/embed", "/embedding", "/embeddings",
         "/pooling", "/rerank", "/score", "/v1/embeddings", "/v1/rerank", "/v1/score",
         "/v1/moderations"), _NO_EMBEDDINGS,
    ),
    **dict.fromkeys(
        ("/api/ps", "/api/show", "/api/tags", "/api/version", "/get_model_info", "/info", "/models",
         "/props", "/slots", "/v1/version", "/version"), _RUNS,
    ),
    "/apply-template": _CHAT,
    **dict.fromkeys(("/v1/health", "/healthz", "/readyz", "/livez"), _HEALTH),
    **dict.fromkeys(("/tokenize", "/detokenize", "/v1/messages/count_tokens"), _TOKENS),
    **dict.fromkeys(
        ("/load_lora_adapter", "/lora-adapters", "/unload_lora_adapter", "/v1/load_lora_adapter",
         "/v1/unload_lora_adapter"), "adapters are named when the server starts: --adapters",
    ),
}  # fmt: skip

#: What OpenAI has below a path that is one of responses here.
_POSTED = {
    "/v1/responses/compact": "POST /v1/responses goes on with a conversation",
    "/v1/responses/input_tokens": _TOKENS,
}


def elsewhere_here(method: str, path: str) -> str | None:
    """What there is in place of a path of others; None: no idea."""
    path = path.rstrip("/")
    return _PATHS.get(path) or (_POSTED.get(path) if method == "POST" else None)
