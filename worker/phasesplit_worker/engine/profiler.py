"""Fits the step profile from measured steps. Cheap: a least-squares fit at most every few seconds.

Rows are divided by their measured duration, so that errors are relative, and reweighted (Huber), so
that a step during which the machine did something else counts little. When a processor is shared for
minutes, most steps are like that and no weight helps: steps that are known to have been hindered are
kept apart, and count only where there are no others.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from phasesplit.api.reports import StepProfile
from phasesplit_worker.requests import StepRecord
from phasesplit_worker.scheduling.cost import StepLoad, decode_s, prefill_s

_MAX_ROWS_PER_MIX = 256
_MIN_ROWS = 8
_FIT_INTERVAL_S = 2.0
_HUBER = 0.15  # relative error beyond which a row counts less
_ROUNDS = 8
_MIN_MIXED_ROWS = 6
# A step that had its processor for less than this share of its time was hindered by others.
_FREE_SHARE = 0.8
# So many unhindered steps of a mix say more than all hindered ones ...
_MIN_FREE_ROWS = 4
# ... until nothing but hindrance has been seen for so long: then that is this worker's speed.
_HINDERED_FOR_GOOD_S = 600.0

Array = npt.NDArray[np.float64]


def record_of(load: StepLoad, seconds: float) -> StepRecord:
    """A step's load with what it took."""
    return StepRecord(
        prefill_tokens=load.prefill_tokens,
        prefill_context=load.prefill_context,
        decode_sequences=load.decode_sequences,
        decode_context_tokens=load.decode_context_tokens,
        seconds=seconds,
    )


def uncounted() -> float | None:
    """The processor clock of a worker whose steps run elsewhere."""
    return None


def since(started_s: float | None, now_s: float | None) -> float | None:
    """Processor seconds spent, None where they are not counted."""
    return None if started_s is None or now_s is None else now_s - started_s


class _Rows:
    """Recent steps of one mix, those that others hindered apart."""

    def __init__(self) -> None:
        self._free: deque[StepRecord] = deque(maxlen=_MAX_ROWS_PER_MIX)
        self._hindered: deque[StepRecord] = deque(maxlen=_MAX_ROWS_PER_MIX)
        self._free_at_s = 0.0

    def add(self, record: StepRecord, now_s: float, *, is_hindered: bool) -> None:
        """Remember one step that ended at `now_s`."""
        if is_hindered:
            self._hindered.append(record)
            if now_s - self._free_at_s > _HINDERED_FOR_GOOD_S:
                self._free.clear()
        else:
            self._free.append(record)
            self._free_at_s = now_s

    def believed(self) -> list[StepRecord]:
        """The steps to fit to."""
        if len(self._free) >= _MIN_FREE_ROWS:
            return list(self._free)
        return [*self._free, *self._hindered]


class StepProfiler:
    """Keeps recent steps of each mix and the profile fitted to them. Owned by the engine thread."""

    def __init__(self, guess: StepProfile) -> None:
        self.profile = guess
        self._rows = {mix: _Rows() for mix in ("prefill", "decode", "mixed")}
        self._num_samples = 0
        self._fitted_at_s = float("-inf")

    def add(self, record: StepRecord, now_s: float, processor_s: float | None = None) -> None:
        """Remember one step that ended at `now_s`.

        `processor_s` is how long it had its processor; None where that says nothing, as on a GPU.
        """
        is_hindered = processor_s is not None and processor_s < _FREE_SHARE * record.seconds
        self._rows[record.mix].add(record, now_s, is_hindered=is_hindered)
        self._num_samples += 1

    def refit_if_due(self, now_s: float) -> bool:
        """Fit again when the last fit is old enough; True when `profile` changed."""
        if now_s - self._fitted_at_s < _FIT_INTERVAL_S:
            return False
        self._fitted_at_s = now_s
        return self.refit()

    def refit(self) -> bool:
        """Fit now; False while there are too few steps."""
        rows_of = {mix: rows.believed() for mix, rows in self._rows.items()}
        pure, mixed = [*rows_of["prefill"], *rows_of["decode"]], rows_of["mixed"]
        if len(pure) + len(mixed) < _MIN_ROWS:
            return False
        # Pure steps say what each part costs; mixed ones are needed for that only without them.
        rows = pure if rows_of["prefill"] and rows_of["decode"] else [*pure, *mixed]
        coefficients = _fit(rows)
        profile = StepProfile(
            base_s=coefficients[0],
            per_prefill_token_s=coefficients[1],
            per_prefill_context_s=coefficients[2],
            per_decode_sequence_s=coefficients[3],
            per_decode_context_s=coefficients[4],
        )
        overlap = _fit_overlap(profile, mixed) if len(mixed) >= _MIN_MIXED_ROWS and rows is pure else 0.0
        profile = profile.model_copy(update={"overlap": overlap, "num_samples": self._num_samples})
        residual = _residual(profile, [*pure, *mixed])
        self.profile = profile.model_copy(update={"residual": residual})
        return True


def _features(record: StepRecord) -> list[float]:
    return [
        1.0,
        record.prefill_tokens,
        record.prefill_context,
        record.decode_sequences,
        record.decode_context_tokens,
    ]


def _fit(rows: list[StepRecord]) -> list[float]:
    """Non-negative coefficients of the five features, robust against outliers."""
    features = np.array([_features(row) for row in rows], dtype=np.float64)
    seconds = np.array([max(row.seconds, 1e-7) for row in rows], dtype=np.float64)
    relative: Array = features / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-30)
    weights = np.ones(len(rows))
    solution = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        solution = _non_negative(relative / scale, np.ones(len(rows)), weights)
        error = np.abs((relative / scale) @ solution - 1.0)
        weights = np.minimum(1.0, _HUBER / np.maximum(error, 1e-9))
    return [float(value) for value in solution / scale]


def _non_negative(matrix: Array, target: Array, weights: Array) -> Array:
    """Ridge least squares; coefficients that come out negative are dropped, worst first."""
    active = [column for column in range(matrix.shape[1]) if matrix[:, column].any()]
    root = np.sqrt(weights)[:, None]
    solution = np.zeros(matrix.shape[1])
    while active:
        part = matrix[:, active] * root
        gram = part.T @ part + 1e-9 * len(target) * np.eye(len(active))
        values = np.linalg.solve(gram, part.T @ (target * root[:, 0]))
        if values.min() >= 0:
            solution[active] = values
            break
        active.pop(int(values.argmin()))
    return solution


def _fit_overlap(profile: StepProfile, rows: list[StepRecord]) -> float:
    """How much of the smaller part is hidden by the larger in mixed steps (median)."""
    estimates: list[float] = []
    for row in rows:
        load = _load(row)
        prefill, decode = prefill_s(profile, load), decode_s(profile, load)
        smaller = min(prefill, decode)
        if smaller > 0.02 * row.seconds:
            hidden = profile.base_s + prefill + decode - row.seconds
            estimates.append(hidden / smaller)
    return float(np.clip(np.median(estimates), 0.0, 1.0)) if estimates else 0.0


def _load(row: StepRecord) -> StepLoad:
    return StepLoad(row.prefill_tokens, row.prefill_context, row.decode_sequences, row.decode_context_tokens)


def _residual(profile: StepProfile, rows: list[StepRecord]) -> float:
    errors: list[float] = []
    for row in rows:
        load = _load(row)
        prefill, decode = prefill_s(profile, load), decode_s(profile, load)
        fitted = profile.base_s + max(prefill, decode) + (1 - profile.overlap) * min(prefill, decode)
        errors.append(abs(row.seconds - fitted) / max(row.seconds, 1e-9))
    return float(np.median(errors)) if errors else 0.0
