"""Explanations: every check is shown, and a flip boundary really turns the answer."""

from dataclasses import replace

from helpers_placement import make_node, make_request
from helpers_planner import auto_object, scaling_input, split_object
from phasesplit.api.conditions import Reason
from phasesplit.api.names import Pool
from phasesplit.planner.explain import explain, find_flips
from phasesplit.planner.mode import decide_mode
from phasesplit.planner.placement import plan_placement
from phasesplit.planner.scaling import plan_scaling


def test_explanation_answers_all_three_questions() -> None:
    given = auto_object()
    nodes = tuple(make_node(i, "a", "z", 1) for i in range(4))
    found = explain(
        given, decide_mode(given), plan_placement(make_request(nodes, 2, 2)), plan_scaling(scaling_input(0.5))
    )
    assert found.mode.answer == "Split is served"
    assert len(found.mode.checks) == 11
    assert all(check.passed for check in found.mode.checks)
    assert any("in target predicted" in line for line in found.mode.because)
    assert found.nodes.answer.startswith("prefill: n")
    assert found.workers.answer == "1 prefill, 1 decode"


def test_failed_check_carries_its_sentence() -> None:
    given = auto_object(loads=())
    mode = decide_mode(given)
    found = explain(given, mode, plan_placement(make_request((), 0, 0)), plan_scaling(scaling_input(0.5)))
    failed = {check.label: check.message for check in found.mode.checks if not check.passed}
    assert "enough traffic" in failed
    assert found.mode.flips == ()


def test_flip_boundaries_turn_the_answer_and_nothing_less_does() -> None:
    given = auto_object()
    flips = {flip.what: flip for flip in find_flips(given)}
    assert {"link", "load"} <= set(flips)
    factor = flips["link"].factor
    assert factor < 1
    for scale, pays in ((factor * 0.97, False), (factor * 1.05, True)):
        links = tuple(replace(link, bytes_per_s=link.bytes_per_s * scale) for link in given.links)
        assert (decide_mode(replace(given, links=links)).reason is Reason.SPLIT_PAYS) == pays
    assert "instead of" in flips["link"].message


def test_503_is_said_when_no_fallback_is_allowed() -> None:
    given = split_object(pools={})
    never = replace(given, fallback=type(given.fallback).NEVER)
    placement = plan_placement(make_request((), 1, 1))
    found = explain(never, decide_mode(never), placement, plan_scaling(scaling_input(0.5)))
    assert "503" in found.mode.answer
    assert "nowhere" in found.nodes.answer
    assert Pool.PREFILL in placement.nodes
