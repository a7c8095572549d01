"""Decisions, pure: values in, values out. No clock, no network, no randomness of their own.

facts            what is known about nodes, pods, links, load, workers
reading          plain Kubernetes objects and reports -> facts
placement        plan_placement(PlacementRequest) -> PlacementPlan; binding_for(...)
performance      what a step, a prompt, an answer takes; capacity holds what a worker sustains
scaling          plan_scaling(ScalingInput) -> ScalingDecision
metrics_health   judge_metrics(MetricsInput) -> MetricsVerdict
mode             decide_mode(ModeInput) -> ModeDecision
explain          explain(...) -> Explanation
"""
