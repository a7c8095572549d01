"""Scheduling: KV blocks, prefix cache, and which tokens each step computes. Plain Python."""
