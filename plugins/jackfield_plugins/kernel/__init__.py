"""Built-in kernels: fused layers."""
