"""One step at a time: run it, pace it, measure it, learn from it. Lives on the engine thread."""

import logging
import time
from collections.abc import Callable
from functools import partial

from phasesplit.api.reports import StepProfile
from phasesplit_worker.engine.calibration import calibrate
from phasesplit_worker.engine.core import EngineCore
from phasesplit_worker.engine.pace import remaining_s
from phasesplit_worker.engine.profiler import StepProfiler, record_of, since
from phasesplit_worker.requests import StepRecord
from phasesplit_worker.scheduling.scheduler import StepPlan

logger = logging.getLogger(__name__)

# A first idea of a step until real ones have been measured; marked as guessed.
GUESS = StepProfile(base_s=0.005, per_prefill_token_s=0.002, per_decode_sequence_s=0.005, guessed=True)
_MAX_FAILED_STEPS = 3
_BEAT_INTERVAL_S = 0.5
_LONGEST_STEP_DECAY = 0.999


class Stepper:
    """Runs the core's steps. `heartbeat_s` and `profile` may be read from any thread."""

    def __init__(
        self,
        core: EngineCore,
        pace: StepProfile | None,
        on_step: Callable[[StepRecord], None] | None,
        clock: Callable[[], float],
        processor_clock: Callable[[], float | None],
    ) -> None:
        """`processor_clock` counts the engine thread's processor seconds, where steps run there."""
        self.is_stopping = False
        self.heartbeat_s = clock()
        self.longest_step_s = 0.0  # of recent ones
        self._core = core
        self._pace = pace
        self._on_step = on_step
        self._clock = clock
        self._processor_clock = processor_clock
        self._profiler = StepProfiler(GUESS)
        self._num_failed = 0  # in a row
        core.scheduler.profile = self.profile

    @property
    def profile(self) -> StepProfile:
        """The declared profile when paced, else the fitted one."""
        return self._pace if self._pace is not None else self._profiler.profile

    def beat(self) -> None:
        """A sign of life."""
        self.heartbeat_s = self._clock()

    def calibrate(self, vocabulary_size: int) -> None:
        """Measure some made-up steps, unless the profile is declared."""
        if self._pace is None:
            calibrate(
                self._core,
                self._profiler,
                vocabulary_size,
                clock=self._clock,
                processor_clock=self._processor_clock,
                beat=self.beat,
            )
            self._core.scheduler.profile = self.profile

    def run(self) -> bool:
        """Run one step; False when nothing can be computed now.

        A step that fails ends the sequences in it; the error comes out when it happens repeatedly.
        """
        started_s, processor_started_s = self._clock(), self._processor_clock()
        # Tokens and KV come out at the end of the declared time: a device has nothing to give before.
        pace = None if self._pace is None else partial(self._sleep, self._pace, started_s)
        try:
            plan = self._core.step(pace)
        except (RuntimeError, MemoryError) as error:  # torch's own: out of memory, a bad kernel
            self._note_failure(error)
            return True
        if plan is None:
            return False
        self._num_failed = 0
        processor_s = since(processor_started_s, self._processor_clock())
        self._record(plan, self._clock() - started_s, processor_s)
        return True

    def _note_failure(self, error: BaseException) -> None:
        logger.exception("a step failed")
        self._num_failed += 1
        self._core.fail_running(f"a step of the engine failed: {type(error).__name__}")
        if self._num_failed >= _MAX_FAILED_STEPS:
            raise error

    def _sleep(self, pace: StepProfile, started_s: float, plan: StepPlan) -> None:
        """Stay in the step for its declared time."""
        while not self.is_stopping:
            rest_s = remaining_s(pace, plan.load, self._clock() - started_s)
            if rest_s <= 0:
                return
            time.sleep(min(rest_s, _BEAT_INTERVAL_S))
            self.beat()

    def _record(self, plan: StepPlan, seconds: float, processor_s: float | None) -> None:
        record = record_of(plan.load, seconds)
        self.longest_step_s = max(seconds, self.longest_step_s * _LONGEST_STEP_DECAY)
        if self._pace is None:
            now_s = self._clock()
            self._profiler.add(record, now_s, processor_s)
            if self._profiler.refit_if_due(now_s):
                self._core.scheduler.profile = self._profiler.profile
        if self._on_step is not None:
            self._on_step(record)
