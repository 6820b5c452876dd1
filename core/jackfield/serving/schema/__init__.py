"""The bodies of requests: every field takes effect, or the request is refused by its name."""
