"""The engine: scheduler, model runner and sampler on one thread, behind a thread-safe interface."""
