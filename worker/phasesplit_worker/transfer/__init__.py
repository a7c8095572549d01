"""KV between workers: what a prefill exports, how a decode pulls it, and what the links carry.

Knows blocks as bytes, requests as ids and tokens, peers as sockets. Does not know models, steps,
HTTP or Kubernetes; engine and server meet it through the protocols of `phasesplit_worker.requests`.

The channel is authenticated at its start and checked by checksums; it is not encrypted.
"""
