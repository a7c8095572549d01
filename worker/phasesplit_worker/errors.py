"""Typed errors of the worker. Every message is one sentence for a person; knows no HTTP."""


class WorkerError(Exception):
    """Base of everything the worker raises on purpose."""


class ConfigError(WorkerError):
    """A flag or an environment variable is missing or wrong."""


class ModelLoadError(WorkerError):
    """The model is not there, does not fit, or is of a kind that cannot be served."""


class ModelUnreachableError(ModelLoadError):
    """The model could not be fetched now; a later attempt may succeed."""


class RequestError(WorkerError):
    """A request that can never be served. `parameter` names the field at fault."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class EngineBusyError(WorkerError):
    """The engine's waiting queue is full; try again later."""


class EngineStoppedError(WorkerError):
    """The engine is draining, stopped or dead and takes nothing new."""


class IntegrityError(WorkerError):
    """An internal invariant of the block pool does not hold."""
