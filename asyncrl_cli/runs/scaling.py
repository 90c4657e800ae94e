"""Requests to change a live run's number of engines, and the answers, as files (decision 0039).

The run's folder is the only thing that a command and the driver always share. The files are replaced atomically. Each
request is answered once, with its id in the answer. The number outlives the driver: it is written before the answer,
and the run's next driver starts with it.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl_cli.core.errors import RunError
from asyncrl_cli.runs.directory import ACTIVE, RunDirectory

REQUEST, ANSWER, WANTED = "scale.json", "scale-answer.json", "engines.json"
ANSWER_S = 60.0
"""Seconds that a request waits for its answer. A starting run answers only when its engines serve."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class ScaleAnswer:
    """The driver's answer to the request with this id; ``message``: why it was refused."""

    id: str
    accepted: bool
    message: str = ""


def forget_requests(run: RunDirectory) -> None:
    """Remove requests that an earlier driver did not answer."""
    for name in (REQUEST, ANSWER):
        (run.path / name).unlink(missing_ok=True)


def wanted_engines(run: RunDirectory, bounds: tuple[int, int]) -> int | None:
    """The number requested last; None if there is none, or if the spec's bounds have changed since the request."""
    match _read(run, WANTED):
        case {"engines": int(engines), "bounds": [int(least), int(most)]} if (least, most) == bounds:
            return engines if least <= engines <= most else None
    return None


def answer_request(run: RunDirectory, bounds: tuple[int, int]) -> int | None:
    """In the driver: answer a waiting request. Returns the number of engines if it is accepted, otherwise None. Raises
    ``OSError``."""
    match _read(run, REQUEST):
        case {"id": str(name), "engines": int(engines)} if _answer(run, name) is None:
            least, most = bounds
            refused = "" if least <= engines <= most else f"{engines} is not between {least} and {most}"
            if not refused:
                run.write_json(WANTED, {"engines": engines, "bounds": bounds})
            run.write_json(ANSWER, asdict(ScaleAnswer(name, not refused, refused)))
            return None if refused else engines
    return None


def request_engines(run: RunDirectory, engines: int, timeout_s: float = ANSWER_S) -> ScaleAnswer:
    """Ask a live run to change its number of engines; returns the driver's answer.

    Raises ``RunError`` if the run is not running or ends, or if it gives no answer within ``timeout_s`` seconds.
    """
    name = secrets.token_hex(8)
    _check_running(run)
    try:
        run.write_json(REQUEST, {"id": name, "engines": engines})
    except OSError as error:
        raise RunError(
            f"the request cannot be written: {error.strerror}",
            location=str(run.path / REQUEST),
            hint="make the run's folder writable: requests to a run are files in it",
        ) from None
    deadline = time.monotonic() + timeout_s
    while (answer := _answer(run, name)) is None:
        _check_running(run)
        match _read(run, REQUEST):
            case {"id": other} if other != name:
                raise RunError("another request replaced this one", location=run.run_id, hint="ask again")
        if time.monotonic() > deadline:
            (run.path / REQUEST).unlink(missing_ok=True)  # it must not take effect later
            raise RunError(
                f"the run gave no answer within {timeout_s:.0f} s, and the request is withdrawn",
                location=run.run_id,
                hint="a run answers only after its start, and not if an older asyncrl drives it: ask again later",
            )
        time.sleep(POLL_S)
    return answer


def _check_running(run: RunDirectory) -> None:
    status = run.status
    if status not in ACTIVE:
        raise RunError(
            f"the run is not running, its phase is {status}",
            location=run.run_id,
            hint=f"set the number when you continue it: asyncrl resume {run.argument} --set rollout.engines=2",
        )


def _answer(run: RunDirectory, name: str) -> ScaleAnswer | None:
    match _read(run, ANSWER):
        case {"id": str(found), "accepted": bool(accepted), "message": str(message)} if found == name:
            return ScaleAnswer(name, accepted, message)
    return None


def _read(run: RunDirectory, name: str) -> Any:
    try:
        return json.loads((run.path / name).read_bytes())
    except (OSError, ValueError):
        return None
