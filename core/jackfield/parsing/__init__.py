"""A model's text as parts: content, thoughts, and tool calls.

`formats.format_of(tokenizer)` finds the form of a model; a `Format` says what to ask an engine for
(`settings`), how the chat template wants calls (`messages`), and has a `parser` for each answer,
whose `push` and `finish` turn the text into parts (`parts`).
"""
