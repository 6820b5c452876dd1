"""What a caller may say, prompts, settings, keywords, checked."""
