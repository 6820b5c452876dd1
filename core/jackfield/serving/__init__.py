"""A server that speaks OpenAI's protocol: engines behind HTTP, one loop for all who ask."""
