"""Hashes that decide what restarts a pod and what changes a template.

They are computed from the user's spec, never from builder output: an operator upgrade that builds
pods differently must not look like a change by the user. Values equal to their default are left out,
so that a field that a newer operator adds does not look like a change either.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

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
            "slo": _dump(spec, include={"slo"}),
            "colocated": _dump(spec, include={"colocated"}),
            "placement": _dump(spec, include={"placement"}),
            "drain_seconds": spec.rollout.drain_seconds,
            "pull_secrets": _dump(spec.engine, include={"image_pull_secrets"}),
        }
    )


def router_spec_hash(context: BuildContext) -> str:
    """Hash of everything in the user's spec that the router's pod template is built from."""
    router = context.spec.router
    return hash_value(
        {
            "api_keys": _dump(router, include={"api_keys_secret_ref"}),
            "resources": router.resources,
            "drain_seconds": context.spec.rollout.drain_seconds,
            "pull_secrets": _dump(context.spec.engine, include={"image_pull_secrets"}),
        }
    )


def _restart_parts(context: BuildContext, pool: Pool) -> Mapping[str, Any]:
    spec = context.spec
    return {
        "model": _dump(spec.model, exclude={"name"}),
        "model_name": context.model_name,
        "engine": _dump(spec.engine, exclude={"image_pull_secrets"}),
        "pool": _dump(spec.pool(pool), exclude={"replicas"}),
        "transfer_deadline": spec.transfer.deadline_milliseconds,
    }


def _dump(model: BaseModel, include: set[str] | None = None, exclude: set[str] | None = None) -> Any:
    return model.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, include=include, exclude=exclude
    )
