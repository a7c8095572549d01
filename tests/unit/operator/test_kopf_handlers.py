"""What is registered with kopf: watches and indexes alone, so that no object is ever marked."""

import kopf
import pytest

from phasesplit.api import names
from phasesplit.cluster.kinds import CHILD_KINDS
from phasesplit.operator.registry import build_registry, configure


@pytest.fixture
def registry() -> kopf.OperatorRegistry:
    async def nothing() -> None:
        """Nothing was started."""

    return build_registry(lambda key: None, lambda: None, lambda indexes: None, nothing, lambda: None)


def test_nothing_that_marks_objects_is_registered(registry: kopf.OperatorRegistry) -> None:
    # Timers and daemons add a finalizer; create, update, resume and delete handlers an annotation.
    assert not registry._spawning.get_all_handlers()
    assert not registry._changing.get_all_handlers()
    assert not registry._webhooks.get_all_handlers()


def test_every_kind_is_watched_and_indexed_and_secrets_are_not(registry: kopf.OperatorRegistry) -> None:
    watched = {str(handler.selector) for handler in registry._watching.get_all_handlers()}
    indexed = {str(handler.selector) for handler in registry._indexing.get_all_handlers()}
    assert watched == indexed
    assert len(watched) == len(CHILD_KINDS) + 3
    assert not any("secrets" in selector for selector in watched)


def test_children_and_pods_are_selected_by_the_api_server() -> None:
    settings = kopf.OperatorSettings()
    configure(settings)
    selectors = settings.watching.label_selectors
    assert set(selectors.values()) == {names.LABEL_MODEL}
    assert len(selectors) == len(CHILD_KINDS) + 1
    assert settings.watching.client_timeout > settings.watching.server_timeout
    assert not settings.posting.enabled


def test_objects_are_not_copied_for_every_event() -> None:
    settings = kopf.OperatorSettings()
    configure(settings)
    body = kopf.Body({"metadata": {"name": "x"}, "spec": {"a": 1}})
    storage = settings.persistence.diffbase_storage
    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None
