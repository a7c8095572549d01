"""What workers report to a router, for tests of what it makes of it."""

from phasesplit.api.manifest import KVLayout
from phasesplit.api.names import Pool, Role
from phasesplit.api.reports import ModelFacts, WorkerReport, WorkerState

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


def report(pod: str = "a", **fields: object) -> WorkerReport:
    """A ready decode worker's, with some fields changed."""
    facts = ModelFacts(name="m", fingerprint="f", weights_bytes=1, kv_layout=LAYOUT, max_model_length=100)
    known: dict[str, object] = {
        "pod": pod,
        "node": "n",
        "pool": Pool.DECODE,
        "role": Role.DECODE,
        "role_version": 1,
        "state": WorkerState.READY,
        "engine_id": "e",
        "model": facts,
        "kv_total_blocks": 100,
    }
    return WorkerReport.model_validate(known | fields)
