"""Mutated specs: none may crash the reader, keep it busy for more than two seconds, or end with a wrong exit code.

`python -m tests.spec.fuzz --specs 25000 --seed 0` prints a table of outcomes, and exits with 1 after such a
fault. tests/spec/test_fuzz.py runs a few hundred.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from jsonschema import Draft202012Validator

from asyncrl_cli.cli.app import main
from asyncrl_cli.spec.load import dump_spec, load_spec
from asyncrl_cli.spec.problems import Location, Problem, SpecError
from asyncrl_cli.spec.schema import json_schema
from asyncrl_cli.spec.yaml_nodes import read_yaml
from tests.spec.mutations import Case, Mutator

LIMIT_S = 2.0
NO_LINE = "errors without a line"
COMMAND_LINE_EVERY = 10
"""One in this many specs is also checked by the command line, as text or as JSON."""


class Hang(BaseException):
    """The limit of CPU time is reached."""


@dataclass
class Report:
    """The outcomes of the cases: their counts by kind of case, and the first faults."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    FAULTS = ("crash", "hang", "wrong exit code", "resolved differs", "schema refuses")

    def add(self, case: Case, outcome: str, detail: str = "") -> None:
        self.counts[case.kind, outcome] += 1
        if outcome in (*self.FAULTS, NO_LINE) and len(self.findings) < 20:
            content = case.path.read_bytes()[:1500]
            self.findings.append(f"{outcome} ({case.kind}) {case.overrides}\n{content!r}\n{detail}")

    def outcome(self, name: str) -> int:
        return sum(count for (_, outcome), count in self.counts.items() if outcome == name)

    @property
    def faults(self) -> int:
        return sum(map(self.outcome, self.FAULTS))

    def table(self) -> str:
        return "\n".join(f"{kind:22} {outcome:22} {count:8,}" for (kind, outcome), count in sorted(self.counts.items()))


def try_case(case: Case, report: Report, schema: Draft202012Validator, by_command: str | None) -> None:

    def over(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    started = time.process_time()
    try:
        loaded = load_spec(case.path, case.overrides, user_code=True)
        valid, problems = True, loaded.warnings
    except SpecError as error:
        str(error)
        valid, problems = False, error.problems
    except Hang:
        report.add(case, "hang")
        return
    except Exception:
        report.add(case, "crash", traceback.format_exc())
        return
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        report.slowest_s = max(report.slowest_s, time.process_time() - started)
    report.add(case, "accepted" if valid else "refused")
    for problem in problems:
        if problem.severity == "error":
            report.add(case, "errors")
            if problem.line is None and not problem.file.startswith("--set"):
                report.add(case, NO_LINE, str(problem))
    if valid:
        again = case.path.with_name("resolved.yaml")
        again.write_text(dump_spec(loaded.spec, loaded.references), encoding="utf-8")
        if load_spec(again).spec != loaded.spec:
            report.add(case, "resolved differs")
        if not case.overrides:
            check_schema(case, report, schema)
    if by_command:
        check_command(case, report, valid, by_command)


def check_schema(case: Case, report: Report, schema: Draft202012Validator) -> None:
    """A valid spec matches the JSON schema, as in an editor: variables are not yet replaced."""
    problems: list[Problem] = []
    node = read_yaml(case.path.read_text(encoding="utf-8-sig"), Location("x", 1, 1), problems)
    assert node is not None
    error = next(schema.iter_errors(node.plain()), None)
    if error is not None:
        report.add(case, "schema refuses", f"{error.json_path}: {error.message}")


def check_command(case: Case, report: Report, valid: bool, form: str) -> None:
    """`asyncrl validate-spec` exits with 0 or 2, and its JSON is valid and has the same result."""
    sets = [part for override in case.overrides for part in ("--set", override)]
    arguments = ["asyncrl", "validate-spec", str(case.path), *(["--json"] if form == "json" else []), *sets]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    before = sys.argv
    sys.argv = arguments
    code: object = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code or 0
    except Exception:
        report.add(case, "crash", traceback.format_exc())
        return
    finally:
        sys.argv = before
    out.flush()
    text = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if code != (0 if valid else 2):
        report.add(case, "wrong exit code", f"{code}: {text[:500]}")
    elif form == "json" and json.loads(text)["valid"] is not valid:
        report.add(case, "wrong exit code", text[:500])


def fuzz(specs: int, seed: int) -> Report:
    report, schema = Report(), Draft202012Validator(json_schema())
    with tempfile.TemporaryDirectory() as folder:
        mutator = Mutator(seed, Path(folder))
        here = os.getcwd()
        os.chdir(folder)
        try:
            for index in range(specs):
                form = mutator.random.choice(["json", "text"]) if index % COMMAND_LINE_EVERY == 0 else None
                try_case(mutator.case(), report, schema, form)
        finally:
            os.chdir(here)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--specs", type=int, default=25_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = fuzz(options.specs, options.seed)
    print("\n\n".join([*found.findings, found.table()]))
    print(f"\n{options.specs:,} specs, seed {options.seed}; slowest {found.slowest_s:.2f} s of processor time")
    sys.exit(1 if found.faults else 0)
