"""Reads from and writes to the cluster, Prometheus, routers and workers. Decides nothing."""
