"""Fixtures that every test may use."""

pytest_plugins = ("helpers_cluster",)
