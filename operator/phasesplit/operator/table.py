"""The routing table of one object. Pure: decisions and the live table in, the next table out.

The version grows only when the content changes, and beyond any version that a router or worker has
seen, so that a deleted ConfigMap or a restart of the operator loses nothing.
"""

import math
from collections.abc import Mapping, Sequence

from phasesplit.api.names import Pool, Role
from phasesplit.api.routing import LatencyClass, LinkEstimate, RoutingTable, ServedMode
from phasesplit.api.v1alpha1 import DisaggregatedModelSpec
from phasesplit.planner.facts import LinkFacts

# An estimate in the table is renewed when the link is this many times faster or slower.
LINK_CHANGE = 2.0

SPLIT_ROLES: Mapping[Pool, Role] = {Pool.PREFILL: Role.PREFILL, Pool.DECODE: Role.DECODE}
COLOCATED_ROLES: Mapping[Pool, Role] = {Pool.PREFILL: Role.COLOCATED, Pool.DECODE: Role.COLOCATED}


def latency_classes(spec: DisaggregatedModelSpec) -> tuple[LatencyClass, ...]:
    """The user's classes in seconds."""
    return tuple(
        LatencyClass(
            name=item.name,
            priority=item.priority,
            ttft_s=item.ttft_milliseconds / 1000,
            tpot_s=item.tpot_milliseconds / 1000,
            percentile=item.percentile,
            when_infeasible=item.when_infeasible,
        )
        for item in spec.slo
    )


def default_roles(mode: ServedMode) -> Mapping[Pool, Role]:
    """Role of a worker that the table does not name."""
    return SPLIT_ROLES if mode is ServedMode.SPLIT else COLOCATED_ROLES


def exceptional_roles(
    roles: Mapping[str, Role], pools: Mapping[str, Pool], mode: ServedMode
) -> dict[str, Role]:
    """Roles that differ from their pool's default. `pools` by pod name."""
    defaults = default_roles(mode)
    return {
        pod: role for pod, role in sorted(roles.items()) if pod in pools and role is not defaults[pools[pod]]
    }


def keep_sentence(live: str, reason: str, message: str) -> str:
    """`reason: message`, with the sentence of the moment at which the reason became true."""
    if live == reason or live.startswith(f"{reason}: "):
        return live
    return f"{reason}: {message}" if message else reason


def merge_links(
    live: Sequence[LinkEstimate], known: Sequence[LinkFacts], *, busy: bool
) -> tuple[LinkEstimate, ...]:
    """Estimates that are still about right stay as they are, and all of them while nothing flows.

    So noise changes nothing, and an idle object's table is never written for the sake of a probe.
    """
    before = {(item.from_node, item.to_node): item for item in live}
    merged = {} if busy else dict(before)
    for fact in known:
        pair = (fact.from_node, fact.to_node)
        old = before.get(pair)
        if old is not None and (
            not busy or 1 / LINK_CHANGE < fact.bytes_per_s / old.bytes_per_s < LINK_CHANGE
        ):
            merged[pair] = old
        elif fact.bytes_per_s > 0:
            merged[pair] = LinkEstimate(
                from_node=fact.from_node, to_node=fact.to_node, bytes_per_s=_round(fact.bytes_per_s)
            )
    return tuple(merged[pair] for pair in sorted(merged))


def next_table(live: RoutingTable | None, content: RoutingTable, newest_seen: int) -> RoutingTable:
    """The content with its version: the live one if nothing changed."""
    if live is not None and live.model_copy(update={"version": 0}) == content.model_copy(
        update={"version": 0}
    ):
        return live
    version = max(live.version if live else 0, newest_seen) + 1
    return content.model_copy(update={"version": version})


def changed_fields(before: RoutingTable | None, after: RoutingTable) -> str:
    """Which fields differ, for the log."""
    if before is None:
        return "new"
    fields = [name for name in RoutingTable.model_fields if getattr(before, name) != getattr(after, name)]
    return ", ".join(name for name in fields if name != "version")


def _is_about(one: float, other: float) -> bool:
    return other / LINK_CHANGE < one < other * LINK_CHANGE


def _round(value: float) -> float:
    digits = 1 - math.floor(math.log10(value))
    return float(round(value, digits))
