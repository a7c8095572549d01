"""The contracts between user, operator, router and worker: pydantic models and constants, no I/O."""
