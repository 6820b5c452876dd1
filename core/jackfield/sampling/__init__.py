"""Which tokens come next: sampled, searched, drafted, confined."""
