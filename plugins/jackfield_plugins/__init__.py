"""The built-in backends: ordinary plugins, one folder a kind, one file a backend."""
