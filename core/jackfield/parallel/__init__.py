"""Processes that share one model: who they are, how they meet, what they say to one another."""
