"""What is remembered of requests whose KV is gone or only promised. Bounded; not thread-safe.

A late pull gets the reason instead of "unknown", an early one waits, and `kv inspect` still shows
the last manifests.
"""

from collections import OrderedDict

from phasesplit.api.manifest import KVManifest, ManifestState

MAX_MANIFESTS = 64
MAX_STATES = 4096
MAX_PROMISES = 4096
PROMISE_S = 30.0  # by then a promised prefill has been accepted or never will be


class EndedExports:
    """End states by request id, the newest manifests in full."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, ManifestState] = OrderedDict()
        self._manifests: OrderedDict[str, KVManifest] = OrderedDict()

    def add(self, request_id: str, state: ManifestState, manifest: KVManifest | None = None) -> None:
        """Remember an end."""
        self._states[request_id] = state
        if manifest is not None:
            self._manifests[request_id] = manifest
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)
        if len(self._manifests) > MAX_MANIFESTS:
            self._manifests.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """The id lives again."""
        self._states.pop(request_id, None)
        self._manifests.pop(request_id, None)

    def state(self, request_id: str) -> ManifestState | None:
        """How the request's KV ended."""
        return self._states.get(request_id)

    def manifest(self, request_id: str) -> KVManifest | None:
        """Its last manifest, while remembered."""
        return self._manifests.get(request_id)


class Promises:
    """Requests that a peer was told of and the engine has not accepted yet."""

    def __init__(self) -> None:
        self._promised_s: OrderedDict[str, float] = OrderedDict()

    def add(self, request_id: str, now_s: float) -> None:
        """Promise a request."""
        self._promised_s[request_id] = now_s
        if len(self._promised_s) > MAX_PROMISES:
            self._promised_s.popitem(last=False)

    def settle(self, request_id: str) -> bool:
        """The request is accepted or ended; whether it was promised."""
        return self._promised_s.pop(request_id, None) is not None

    def is_open(self, request_id: str, now_s: float) -> bool:
        """Whether it may still be accepted."""
        promised_s = self._promised_s.get(request_id)
        return promised_s is not None and now_s - promised_s < PROMISE_S
