"""The role this worker has now and the routing table version that says so.

Pure state: the newest version wins, whoever brings it (admin endpoint or a leg's headers).
"""

from dataclasses import dataclass, replace

from phasesplit.api.names import Role
from phasesplit.api.reports import RoleAssignment


@dataclass(frozen=True)
class RoleState:
    """A role with its limits. Version 0 is the role from the command line."""

    role: Role
    version: int = 0
    max_batched_tokens: int | None = None
    max_step_s: float | None = None
    awaits_limits: bool = False  # a leg's headers announced this version; its limits may still come

    def adopt(self, assignment: RoleAssignment, *, has_limits: bool) -> "RoleState":
        """The newer of both. Without limits (a leg's headers) the present limits stay."""
        is_newer = assignment.version > self.version
        completes = has_limits and self.awaits_limits and assignment.version == self.version
        if not is_newer and not completes:
            return self
        state = replace(self, role=assignment.role, version=assignment.version, awaits_limits=not has_limits)
        if not has_limits:
            return state
        return replace(
            state, max_batched_tokens=assignment.max_batched_tokens, max_step_s=assignment.max_step_s
        )


def assignment_from_headers(role: str | None, version: str | None) -> RoleAssignment | None:
    """The role that a router's leg announces; malformed or missing headers announce nothing."""
    if role not in list(Role) or version is None or not version.isdecimal() or len(version) > 18:
        return None
    return RoleAssignment(role=Role(role), version=int(version))
