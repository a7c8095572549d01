"""How the programs read their command lines: whole names only, and one sentence for what is wrong."""

import argparse
from typing import NoReturn


class FlagError(Exception):
    """A flag is missing, unknown or has a value that it cannot have. The message is for a person."""


class FlagParser(argparse.ArgumentParser):
    """Raises `FlagError` instead of exiting, so that the entry point alone decides what to print."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """What argparse found wrong."""
        raise FlagError(f"{message}; see {self.prog} --help")
