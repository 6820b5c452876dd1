"""Built-in decoding backends."""
