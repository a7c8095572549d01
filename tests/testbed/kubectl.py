"""kubectl with a kubeconfig and a bound on every call."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.errors import TestbedError
from testbed.processes import run


@dataclass(frozen=True)
class Kubectl:
    """Calls one cluster: by a kubeconfig of its own, or by a context of the user's."""

    program: Path
    kubeconfig: Path | None = None
    context: str | None = None

    def __call__(self, *arguments: object, timeout_s: float = 30.0, stdin: str | None = None) -> str:
        """Standard output of a call; a TestbedError with kubectl's own words when it fails."""
        return self._run(arguments, timeout_s, stdin, check=True)

    def apply(self, *objects: dict[str, Any], subresource: str = "", timeout_s: float = 30.0) -> None:
        """Server-side apply of plain objects, or of a subresource of them."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        flags = [
            "--server-side",
            "--force-conflicts",
            *([f"--subresource={subresource}"] if subresource else []),
        ]
        self("apply", *flags, "-f", "-", timeout_s=timeout_s, stdin=json.dumps(items))

    def get(self, *arguments: object, timeout_s: float = 30.0) -> dict[str, Any]:
        """`kubectl get … -o json`, parsed."""
        content: dict[str, Any] = json.loads(self("get", *arguments, "-o", "json", timeout_s=timeout_s))
        return content

    def find(self, *arguments: object, timeout_s: float = 30.0) -> dict[str, Any] | None:
        """Like `get`, but None for an object that is not there."""
        text = self("get", *arguments, "--ignore-not-found", "-o", "json", timeout_s=timeout_s)
        return json.loads(text) if text.strip() else None

    def is_serving(self, timeout_s: float = 5.0) -> bool:
        """Does the API server call itself ready?"""
        try:
            return self._run(("get", "--raw=/readyz"), timeout_s, None, check=False) == "ok"
        except TestbedError:
            return False  # it did not answer in time

    @property
    def argv(self) -> list[str]:
        """The beginning of every call, for those who start kubectl themselves (port-forward, exec -i)."""
        words = [str(self.program)]
        if self.kubeconfig is not None:
            words.append(f"--kubeconfig={self.kubeconfig}")
        if self.context is not None:
            words.append(f"--context={self.context}")
        return words

    def _run(self, arguments: tuple[object, ...], timeout_s: float, stdin: str | None, check: bool) -> str:
        return run(*self.argv, *arguments, timeout_s=timeout_s, stdin=stdin, check=check).stdout
