"""Chooses the tokens that come next, verifies drafts, keeps to structures."""
