"""phasesplit: serve a language model in prefill and decode pools, and measure whether that pays."""

__version__ = "0.1.0"
