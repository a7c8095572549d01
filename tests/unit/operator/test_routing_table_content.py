"""The routing table: its version, its roles, its sentence and its links."""

from phasesplit.api.names import Pool, Role
from phasesplit.api.routing import LinkEstimate, RoutingTable, ServedMode
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.operator.table import (
    exceptional_roles,
    keep_sentence,
    latency_classes,
    merge_links,
    next_table,
)
from phasesplit.planner.facts import LinkFacts


def test_the_version_grows_only_with_the_content() -> None:
    live = RoutingTable(version=7, name="chat", mode=ServedMode.COLOCATED)
    same = RoutingTable(name="chat", mode=ServedMode.COLOCATED)
    other = RoutingTable(name="chat", mode=ServedMode.SPLIT)
    assert next_table(live, same, newest_seen=7) is live
    assert next_table(live, other, newest_seen=7).version == 8


def test_a_lost_table_gets_a_version_beyond_what_routers_and_workers_have_seen() -> None:
    assert next_table(None, RoutingTable(name="chat"), newest_seen=0).version == 1
    assert next_table(None, RoutingTable(name="chat"), newest_seen=12).version == 13
    assert next_table(RoutingTable(version=3), RoutingTable(name="chat"), newest_seen=12).version == 13


def test_only_roles_that_differ_from_the_default_are_named() -> None:
    pools = {"p0": Pool.PREFILL, "p1": Pool.PREFILL, "d0": Pool.DECODE}
    roles = {"p0": Role.PREFILL, "p1": Role.DECODE, "d0": Role.DECODE, "gone": Role.DECODE}
    assert exceptional_roles(roles, pools, ServedMode.SPLIT) == {"p1": Role.DECODE}
    colocated = dict.fromkeys(pools, Role.COLOCATED)
    assert exceptional_roles(colocated, pools, ServedMode.COLOCATED) == {}


def test_the_sentence_stays_that_of_the_moment_of_the_change() -> None:
    first = keep_sentence("", "LinkDegraded", "50 Mbit/s, needs 129")
    assert first == "LinkDegraded: 50 Mbit/s, needs 129"
    assert keep_sentence(first, "LinkDegraded", "51 Mbit/s, needs 128") == first
    assert keep_sentence(first, "Mismatch", "x against y") == "Mismatch: x against y"


def test_noise_of_a_link_changes_nothing_and_a_real_change_does() -> None:
    live = (LinkEstimate(from_node="a", to_node="b", bytes_per_s=1e9),)
    assert merge_links(live, [LinkFacts("a", "b", 1.9e9)], busy=True) == live
    assert merge_links(live, [LinkFacts("a", "b", 0.6e9)], busy=True) == live
    (slow,) = merge_links(live, [LinkFacts("a", "b", 6_234_567.0)], busy=True)
    assert slow.bytes_per_s == 6_200_000
    assert merge_links(live, [], busy=True) == ()


def test_an_idle_tables_links_only_ever_grow() -> None:
    live = (LinkEstimate(from_node="a", to_node="b", bytes_per_s=1e9),)
    assert merge_links(live, [LinkFacts("a", "b", 1e6)], busy=False) == live
    assert merge_links(live, [], busy=False) == live
    assert len(merge_links(live, [LinkFacts("a", "c", 1e6)], busy=False)) == 2


def test_classes_in_seconds() -> None:
    spec = DisaggregatedModelSpec.model_validate(
        {
            "model": {"source": {"path": "/m"}},
            "slo": [{"name": "fast", "ttftMilliseconds": 500, "tpotMilliseconds": 80, "percentile": 90}],
        }
    )
    (item,) = latency_classes(spec)
    assert (item.name, item.ttft_s, item.tpot_s, item.percentile) == ("fast", 0.5, 0.08, 90)
