"""Findings from measurements of several hosts: each problem names its hosts and has a hint."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.checks.finding import Finding, Status
from asyncrl_cli.checks.hosts import verdicts
from asyncrl_cli.checks.hosts.probe import Facts, Failure
from asyncrl_cli.checks.hosts.verdicts import SHOWN, WHY
from asyncrl_cli.checks.machine import GIB

pytestmark = pytest.mark.slow

VERSIONS = {"asyncrl": "0.2", "python": "3.11.9", "torch": "2.11.0+cpu", "ray": "2.60.0", "mlflow": "3.10"}
FACTS = Facts(port=1, versions=VERSIONS, code="c" * 64, memory=8 * GIB, token=True, clock=0.0)
FAST = 1e9
pairs_of_hosts = st.integers(2, 9).map(lambda count: list(permutations([f"h{index}" for index in range(count)], 2)))


def with_versions(**versions: str | None) -> Facts:
    return replace(FACTS, versions={k: v for k, v in (VERSIONS | versions).items() if v is not None})


def statuses(findings: list[Finding]) -> list[str]:
    return [finding.status for finding in findings]


def test_hosts_with_an_old_driver_are_named_together() -> None:
    old = replace(FACTS, driver=("the NVIDIA driver is 550", "install driver 580"))
    (finding,) = verdicts.judge_drivers({"a": old, "b": FACTS, "c": old})
    assert finding == Finding("GPUs", Status.FAILURE, "a; c: the NVIDIA driver is 550", "install driver 580")
    assert verdicts.judge_drivers({"b": FACTS}) == []


def test_a_clock_that_is_wrong_is_named_with_its_offset() -> None:
    assert verdicts.judge_clocks({"a": 0.4, "b": -0.9}).status == "ok"
    finding = verdicts.judge_clocks({"a": 0.0, "b": -3.0, "c": 7.0})
    assert (finding.status, finding.found) == ("warning", "not the driver's time on b: -3.0 s; c: +7.0 s")


def test_versions_that_cannot_work_together_are_failures_and_name_both_hosts() -> None:
    assert statuses(verdicts.judge_versions({"a": FACTS, "b": FACTS})) == ["ok"]
    for package, there, status in (
        ("torch", "2.12.0+cpu", "failure"),
        ("torch", "2.11.0+cu130", "warning"),
        ("torch", None, "warning"),
        ("ray", "2.61.0", "failure"),
        ("python", "3.12.9", "failure"),
        ("python", "3.11.2", "warning"),
        ("mlflow", "3.11", "warning"),
        ("vllm", "0.32.0", "warning"),
    ):
        (finding,) = verdicts.judge_versions({"a": FACTS, "b": with_versions(**{package: there}), "c": FACTS})
        assert finding.status == status and finding.hint
        here = VERSIONS.get(package, "missing")
        assert finding.found == f"{package}: {here} on a, {there or 'missing'} on b"


def test_other_code_is_a_failure_even_with_equal_versions() -> None:
    (finding,) = verdicts.judge_versions({"a": FACTS, "b": replace(FACTS, code="d" * 64)})
    assert finding.status == "failure" and "on a: b" in finding.found


@given(pairs_of_hosts, st.data())
def test_a_pair_that_fails_is_named_with_both_ends_and_a_hint(
    pairs: list[tuple[str, str]], data: st.DataObject
) -> None:
    kinds: list[Failure] = list(WHY)
    failed = data.draw(st.dictionaries(st.sampled_from(pairs), st.sampled_from(kinds)))
    hosts = list(dict.fromkeys(pair[0] for pair in pairs))
    findings = verdicts.judge_pairs(hosts, failed, {pair: FAST for pair in pairs if pair not in failed})
    failures = [finding for finding in findings if finding.status == "failure"]
    assert bool(failures) == bool(failed)
    for (source, target), failure, finding in zip(failed, failed.values(), failures[:SHOWN], strict=False):
        assert finding.found.startswith(f"{source} -> {target}: {target} {WHY[failure][0]}")
        assert finding.hint == WHY[failure][1]
    assert len(failures) == min(len(failed), SHOWN + 1)
    if len(failed) > SHOWN:
        assert failures[-1].found.startswith(f"{len(failed) - SHOWN} more pairs fail; ")
    assert ("ok" in statuses(findings)) == (len(failed) < len(pairs))


def test_the_host_that_fails_with_all_others_is_pointed_out() -> None:
    hosts = [f"h{index}" for index in range(6)]
    failed: dict[tuple[str, str], Failure] = {pair: Failure.SILENT for pair in permutations(hosts, 2) if "h3" in pair}
    rest = verdicts.judge_pairs(hosts, failed, {})[SHOWN]
    assert rest.found == "4 more pairs fail; h3 is in 10 of all 10" and "h3 first" in rest.hint


def test_slow_pairs_are_a_warning_with_their_figures() -> None:
    slow, summary = verdicts.judge_pairs(list("abc"), {}, {("a", "b"): 1e9, ("b", "c"): 1e9, ("c", "a"): 5e6})
    assert (slow.status, slow.found) == ("warning", "slow: c -> a: 5.0 MB/s")
    assert summary.status == "ok"
    assert summary.found.startswith("6 of 6 pairs; slowest measured pair: c -> a, 5 MB/s")


def test_hosts_with_weights_need_two_versions_of_them() -> None:
    whole = {"a": 8 * GIB, "b": 8 * GIB, "driver": 0}
    assert verdicts.judge_memory({"a": 8 * GIB}, whole).status == "ok"
    finding = verdicts.judge_memory({"a": 8 * GIB, "b": 7 * GIB}, whole)
    assert finding.status == "failure" and "b has 7.0 GiB available and needs 8.0" in finding.found
    assert "a has" not in finding.found
    shards = verdicts.judge_memory({"a": 9 * GIB, "b": 3 * GIB}, {"a": 8 * GIB, "b": 1 * GIB})
    assert shards.status == "ok" and "9.0 GiB available (a); its share of two versions takes 8.0 GiB" in shards.found
    assert verdicts.judge_memory({"a": 1}, {"a": 0}).status == "ok", "without a spec the size of the weights is unknown"
    assert verdicts.judge_memory({}, {}).status == "ok"


def test_a_cluster_without_a_token_is_a_warning() -> None:
    assert verdicts.judge_token({"a": FACTS, "b": FACTS}).status == "ok"
    finding = verdicts.judge_token({"a": FACTS, "b": replace(FACTS, token=False)})
    assert finding.status == "warning" and "on b" in finding.found and "RAY_AUTH_MODE" in finding.hint


def test_lost_hosts_and_unshared_folders_are_failures() -> None:
    lost, left = verdicts.judge_lost(dict.fromkeys("ab", ("the process died", "look")), {"b"})
    assert (lost.status, lost.found, lost.hint) == ("failure", "a: the process died", "look")
    assert (left.status, left.found) == ("warning", "b has left the cluster during the check") and left.hint
    assert verdicts.judge_folder("/runs", {}).found == "all hosts read and write /runs"
    unshared = verdicts.judge_folder("/runs", {"b": "has no folder /runs"})
    assert unshared.status == "failure" and unshared.found == "b has no folder /runs" and "runs_dir" in unshared.hint
