"""Models over a paged KV cache: loading, attention, the reference path and the fused path."""
