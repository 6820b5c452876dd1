"""Built-in scheduler backends."""
