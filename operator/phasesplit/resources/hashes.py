"""Hashes that decide what restarts a pod and what changes a template.

They are computed from the user's spec, never from builder output: an operator upgrade that builds
pods differently must not look like a change by the user.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from phasesplit.api import names
from phasesplit.api.names import Pool
from phasesplit.resources.context import BuildContext

ANNOTATION_SPEC_HASH = f"{names.GROUP}/spec-hash"
HASH_LENGTH = 10


def hash_value(value: Any) -> str:
    """Short digest of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


def template_hash(context: BuildContext, pool: Pool) -> str:
    """Hash of what the user's spec says about this pool's pods and needs a restart to act.

    Left out, because it acts without a restart: replicas, roles, targets, the colocated chunk
    budget, binding. Left out, because it is not worth one: the drain time.
    """
    return hash_value(_restart_parts(context, pool))


def pool_spec_hash(context: BuildContext, pool: Pool) -> str:
    """Hash of everything in the user's spec that the pool's pod template is built from."""
    spec = context.spec
    return hash_value(
        {
            "restart": _restart_parts(context, pool),
            "slo": _dump(spec, "slo"),
            "colocated": _dump(spec, "colocated"),
            "placement": _dump(spec, "placement"),
            "drain_seconds": spec.rollout.drain_seconds,
            "pull_secrets": _dump(spec.engine, "image_pull_secrets"),
        }
    )


def router_spec_hash(context: BuildContext) -> str:
    """Hash of everything in the user's spec that the router's pod template is built from."""
    router = context.spec.router
    return hash_value(
        {
            "api_keys": _dump(router, "api_keys_secret_ref"),
            "resources": router.resources,
            "drain_seconds": context.spec.rollout.drain_seconds,
            "pull_secrets": _dump(context.spec.engine, "image_pull_secrets"),
        }
    )


def _restart_parts(context: BuildContext, pool: Pool) -> Mapping[str, Any]:
    spec = context.spec
    pool_parts = spec.pool(pool).model_dump(mode="json", by_alias=True, exclude={"replicas"})
    engine_parts = spec.engine.model_dump(mode="json", by_alias=True, exclude={"image_pull_secrets"})
    return {
        "model": spec.model.model_dump(mode="json", by_alias=True),
        "model_name": context.model_name,
        "engine": engine_parts,
        "pool": pool_parts,
        "transfer_deadline": spec.transfer.deadline_milliseconds,
    }


def _dump(model: Any, field: str) -> Any:
    return model.model_dump(mode="json", by_alias=True, include={field})
