"""``int4-cpu``: linear layers with weights of 4 bits in groups, for activations of bfloat16."""
