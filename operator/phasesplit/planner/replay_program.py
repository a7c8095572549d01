"""`python -m phasesplit.planner.replay_program`: one replay job on stdin, its answer as lines on stdout.

Run by the operator as a process of its own, so that seconds of simulation never hold up its loop. Gives
way to everything else on the machine, and ends by itself when nobody stops it.
"""

import os
import resource
import sys
from collections.abc import Iterator

from pydantic import ValidationError

from phasesplit.planner.flips import find_replay_flips
from phasesplit.planner.replay import replay
from phasesplit.planner.replay_job import MAX_JOB_BYTES, ReplayJob, ReplayLine

_NICE = 5  # behind the operator itself, but not starved by a busy node
_MAX_CPU_S = 120


def main() -> int:
    """Entry point; 2 for a job that cannot be read."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    try:
        job = ReplayJob.model_validate_json(sys.stdin.buffer.read(MAX_JOB_BYTES + 1))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        sys.stderr.write(f"the replay job is not understood: {where}: {first['msg']}\n")
        return 2
    for line in run_job(job):
        sys.stdout.write(line.model_dump_json(exclude_none=True) + "\n")
        sys.stdout.flush()
    return 0


def run_job(job: ReplayJob) -> Iterator[ReplayLine]:
    """The outcome, then what would turn it; nothing when there is nothing to compare."""
    outcome = replay(job.given)
    if outcome is None:
        return
    yield ReplayLine(outcome=outcome)
    for flip in find_replay_flips(job.given, outcome, job.minimum_gain_percent):
        yield ReplayLine(flip=flip)


if __name__ == "__main__":
    sys.exit(main())
