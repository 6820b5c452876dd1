"""Built-in quantizers: one file a backend."""
