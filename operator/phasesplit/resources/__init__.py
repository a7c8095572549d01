"""Builders: what the operator wants to exist, as plain dicts. Values in, values out; no cluster, no clock."""
