"""What a request may say: prompts, settings, texts."""
