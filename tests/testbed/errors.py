"""The one error that the testbed raises on purpose: a sentence for a person."""


class TestbedError(Exception):
    """Says what failed and, where there is one, the remedy. Shown without a stack trace."""

    __test__ = False  # pytest would take the name for a test class
