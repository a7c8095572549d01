"""The Secret with the keys that router and workers of one object share."""

from base64 import b64encode

from phasesplit.api import names
from phasesplit.api.names import Component
from phasesplit.api.v1alpha1 import Manifest
from phasesplit.resources.context import BuildContext
from phasesplit.resources.labels import build_metadata


def build_transfer_secret(context: BuildContext, transfer_key: str, admin_token: str) -> Manifest:
    """Keys shared by router and workers; created once by the operator, never changed.

    The values are random text made by the caller. A new value would cut off every running worker.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": build_metadata(
            context, names.transfer_secret_name(context.name, context.uid), Component.WORKER
        ),
        "type": "Opaque",
        "immutable": True,
        "data": {
            names.SECRET_KEY_TRANSFER: b64encode(transfer_key.encode()).decode(),
            names.SECRET_KEY_ADMIN: b64encode(admin_token.encode()).decode(),
        },
    }
