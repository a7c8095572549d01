"""The command line `phasesplit`, also installed as `kubectl-phasesplit`. Reads, never writes."""
