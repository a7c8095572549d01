"""What the operator refuses, and the sentence it refuses it with."""

import pytest

from helpers_bad_objects import BAD_OBJECTS, BadObject
from helpers_resources import MINIMAL, parse_minimal, read_sample, sample_names
from phasesplit.api.flags import OWNED_FLAGS, find_owned_flag
from phasesplit.api.validation import InvalidSpec, find_claim_problem, find_problems, parse_spec


@pytest.mark.parametrize("bad", BAD_OBJECTS, ids=lambda bad: bad.what)
def test_refused_with_field_value_and_remedy(bad: BadObject) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(bad.name, MINIMAL | bad.spec)
    assert bad.operator_says in str(refused.value)
    for problem in refused.value.problems:
        assert problem.message.startswith(problem.field)
        assert "\n" not in problem.message
        assert len(problem.message) < 400


@pytest.mark.parametrize("name", sample_names())
def test_samples_are_accepted(name: str) -> None:
    sample = read_sample(name)
    assert (
        find_problems(sample["metadata"]["name"], parse_spec(sample["metadata"]["name"], sample["spec"]))
        == ()
    )


def test_every_problem_is_named_at_once() -> None:
    raw = {
        "prefill": {"replicas": {"min": 2}},
        "decode": {"gpu": {"count": 4}},
        "engine": {"args": ["--port=1"]},
    }
    with pytest.raises(InvalidSpec) as refused:
        parse_spec("chat", MINIMAL | raw)
    assert [problem.field for problem in refused.value.problems] == [
        "spec.prefill.replicas.min",
        "spec.decode.gpu.count",
        "spec.engine.args",
    ]


@pytest.mark.parametrize(
    ("argument", "owned"),
    [
        ("--role", "--role"),
        ("--role=decode", "--role"),
        ("--trans", "--transfer-deadline-s"),
        ("--max-num-seqs", None),
        ("--kv-cache-bytes=100", None),
        ("--pace", None),
        ("value", None),
        ("--", None),
        ("-h", None),
    ],
)
def test_owned_flags(argument: str, owned: str | None) -> None:
    assert find_owned_flag(argument) == owned


def test_a_free_flag_is_no_abbreviation_of_an_owned_one() -> None:
    assert not any(
        owned.startswith(free) for owned in OWNED_FLAGS for free in ("--max-num-seqs", "--kv-ttl-s")
    )


@pytest.mark.parametrize(
    ("modes", "nodes", "workers", "says"),
    [
        (["ReadWriteOnce"], ["a"], 2, None),
        (["ReadWriteOnce"], ["a", "b"], 2, "nodes a, b need at once"),
        (["ReadWriteOncePod"], ["a"], 2, "2 workers need at once"),
        (["ReadWriteOncePod"], ["a"], 1, None),
        (["ReadOnlyMany"], ["a", "b"], 2, None),
        (["ReadWriteOnce", "ReadWriteMany"], ["a", "b"], 2, None),
        ([], ["a", "b"], 2, None),
    ],
)
def test_claim_needed_on_two_nodes(
    modes: list[str], nodes: list[str], workers: int, says: str | None
) -> None:
    spec = parse_minimal(model={"source": {"volume": {"claimName": "models"}}})
    problem = find_claim_problem(spec, modes, nodes, workers)
    if says is None:
        assert problem is None
    else:
        assert problem is not None
        assert says in problem.message


def test_a_downloaded_model_has_no_claim_problem() -> None:
    assert find_claim_problem(parse_minimal(), ["ReadWriteOnce"], ["a", "b"], 2) is None
