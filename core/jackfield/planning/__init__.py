"""From what a caller asked for to a plan: which backends, with which weights, where."""
