"""Built-in cache backends."""
