"""Runs a plan: engine, worker, loop, sequences, reports."""
