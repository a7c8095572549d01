"""The operator process: kopf wiring, the work queue, the reconcile loop, composition."""
