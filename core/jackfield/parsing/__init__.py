"""What a model says, as parts: content, thoughts, and calls of tools.

`formats.format_of(tokenizer)` finds the form of a model; a `Format` says what to ask an engine for
(`settings`), how the chat template wants calls (`messages`), and has a `parser` for each answer,
whose `push` and `finish` turn the text into parts (`parts`).
"""
