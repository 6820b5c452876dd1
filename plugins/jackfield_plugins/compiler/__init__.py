"""Built-in compilers."""
