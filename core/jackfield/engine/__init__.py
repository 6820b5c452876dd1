"""A plan at work: the engine, its loop, and what it keeps a record of."""
