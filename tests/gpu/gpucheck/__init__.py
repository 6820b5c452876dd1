"""All that waits for a GPU, in one command: `make gpu`.

`python tests/gpu/gpucheck` needs neither an installed jackfield nor a network. Each stage is a
process with a time limit, and writes each result as a line of JSON the moment it is known.
"""
