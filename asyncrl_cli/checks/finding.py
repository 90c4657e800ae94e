"""The findings of `asyncrl doctor`, `train --dry-run` and every start, and the functions that run the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from asyncrl_cli.core.errors import ConfigError, UserError
from asyncrl_cli.core.imports import missing_package


class Status(StrEnum):
    OK = "ok"
    WARNING = "warning"  # some runs fail or are slow
    FAILURE = "failure"  # every run fails


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result. ``hint`` names a remedy; it is empty if the status is ``OK``."""

    check: str
    status: Status
    found: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.check}: {self.found}. {self.hint}"


@dataclass(frozen=True, slots=True)
class Warned:
    """Returned by a check to warn instead of passing."""

    text: str
    hint: str


Result = str | Warned


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``look`` returns its result, or raises ``UserError`` for a failure. ``needs``: the checks that must
    pass first."""

    name: str
    look: Callable[[], Result]
    needs: tuple[str, ...] = ()


def run_check(check: Check) -> Finding:
    """Run one check. Raises ``UserError`` for a failure. Unexpected exceptions become a ``ConfigError``."""
    try:
        result = check.look()
    except UserError:
        raise
    except Exception as error:  # for unusual values, libraries raise many types of errors
        if isinstance(error, ModuleNotFoundError) and (package_error := missing_package(error)) is not None:
            raise package_error from None
        message = f"the check failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        hint = "change that part of the spec, or report this with the spec"
        raise ConfigError(message, location=check.name, hint=hint) from error
    if isinstance(result, Warned):
        return Finding(check.name, status=Status.WARNING, found=result.text, hint=result.hint)
    return Finding(check.name, Status.OK, result)


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run the checks one after another. A check that needs a failed one is skipped, with a warning."""
    failed: set[str] = set()
    for check in checks:
        if failed_needs := failed.intersection(check.needs):
            failed.add(check.name)
            text = f"not checked, because it needs {', '.join(sorted(failed_needs))}, which failed"
            yield Finding(check.name, Status.WARNING, text)
            continue
        try:
            yield run_check(check)
        except UserError as error:
            failed.add(check.name)
            location = f"{error.location}: " if error.location else ""
            yield Finding(check.name, status=Status.FAILURE, found=f"{location}{error.message}", hint=error.hint)


def joined(*results: Result) -> Result:
    """Join several results. The joined result is a warning if any of them is a warning."""
    texts = (result.text if isinstance(result, Warned) else result for result in results)
    text = "; ".join(filter(None, texts))
    hints = [result.hint for result in results if isinstance(result, Warned)]
    return Warned(text, "; ".join(hints)) if hints else text
