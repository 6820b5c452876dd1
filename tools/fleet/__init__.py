"""Thousands of replicas on one core: real schedulers, queues and routing, simulated models."""
