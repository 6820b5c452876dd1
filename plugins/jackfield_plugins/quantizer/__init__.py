"""Built-in quantizer backends."""
