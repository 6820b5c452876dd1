"""Everything that touches transformers' own internals. Nothing else in jackfield does."""
