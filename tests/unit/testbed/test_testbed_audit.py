"""Reading the audit log."""

import json
from pathlib import Path

import pytest

from testbed.audit import MUTATING_VERBS, AuditLog, service_account
from testbed.errors import TestbedError

OPERATOR = service_account("phasesplit-system", "phasesplit-operator")


def line(
    user: str, verb: str, resource: str = "pods", group: str = "", stage: str = "ResponseComplete"
) -> str:
    return json.dumps(
        {
            "stage": stage,
            "verb": verb,
            "user": {"username": user},
            "objectRef": {"resource": resource, "apiGroup": group, "namespace": "ns", "name": "x"},
            "responseStatus": {"code": 200},
            "requestReceivedTimestamp": "2026-01-02T03:04:05.678901Z",
            "userAgent": "test",
        }
    )


def test_events_are_read_from_a_mark_by_user_and_verb(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_text(line(OPERATOR, "create") + "\n")
    log = AuditLog(path)
    mark = log.mark()
    with path.open("a") as file:
        for text in (
            line("admin", "delete"),
            line(OPERATOR, "get"),
            line(OPERATOR, "patch", "leases", "coordination.k8s.io"),
        ):
            file.write(text + "\n")
    assert len(log.events()) == 4
    [write] = log.events(since=mark, user=OPERATOR, verbs=MUTATING_VERBS)
    assert write.is_mutating
    assert write.is_lease
    assert str(write) == f"03:04:05 {OPERATOR} patch leases ns/x -> 200"


def test_a_reader_follows_a_log_that_is_put_aside(tmp_path: Path) -> None:
    """As the API server does it: the full file gets a name with the time, a new one takes its place."""
    path = tmp_path / "audit.log"
    path.write_text(line("a", "create") + "\n")
    log = AuditLog(path)
    before = log.mark()
    for number, verb in enumerate(("update", "patch", "delete")):
        with path.open("a") as file:
            file.write(line("a", verb) + "\n")
        path.rename(tmp_path / f"audit-2026-01-02T03-04-0{number}.678.log")
        path.write_text(line("a", f"get{number}") + "\n")
    (tmp_path / "other-2026.log").write_text("no JSON")
    expected = ["update", "get0", "patch", "get1", "delete", "get2"]
    assert [event.verb for event in log.events(since=before)] == expected
    assert [event.verb for event in log.events()] == ["create", *expected]
    after = log.mark()
    assert log.events(since=after) == []
    (tmp_path / "audit-2026-01-02T03-04-00.678.log").unlink()
    assert [event.verb for event in log.events()] == expected[1:]
    with pytest.raises(TestbedError, match="rotated away"):
        log.events(since=before)


def test_a_line_being_written_and_the_start_of_a_watch_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_text(
        line("a", "watch", stage="ResponseStarted") + "\n" + line("a", "get") + "\n" + '{"verb": "cre'
    )
    assert [event.verb for event in AuditLog(path).events()] == ["get"]


def test_a_request_for_no_object_is_named_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    content = json.loads(line("a", "get"))
    del content["objectRef"]
    path.write_text(json.dumps({**content, "requestURI": "/version"}) + "\n")
    assert AuditLog(path).events()[0].resource == "/version"
