"""Batch jobs: files of requests in OpenAI's format, answered as the server answers them."""
