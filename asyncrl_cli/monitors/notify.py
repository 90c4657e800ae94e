"""Notices to a webhook and to a command: the run finished, failed, or has been waiting for long.

Invariant: a notice neither delays nor ends a run. Each notice has its own thread and a time limit, and a failed
delivery is only a warning. The end of a run waits for its notices.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from asyncrl_cli.core.secrets import hide
from asyncrl_cli.monitors.base import Ending, Monitor
from asyncrl_cli.runs.directory import RunDirectory
from asyncrl_cli.spec.sections import Notice, NotifySpec
from asyncrl_cli.system.reaper import MARK
from asyncrl_cli.system.user_command import run_command

WEBHOOK_S = 10.0
COMMAND_S = 30.0
"""Seconds that a delivery may take."""
WAIT_S = 45.0
"""Seconds that a run waits at its end for all deliveries. ``WEBHOOK_S`` limits only the wait for each byte, so a server
that answers byte by byte can exceed it."""
AT_ONCE = 20
"""Largest number of concurrent deliveries; more notices are not sent."""
FROM_ENVIRONMENT = "env:"
LOG = "logs/notify.log"
"""The file for the command's output, in the run's folder."""


class Notifier(Monitor):
    """Sends the notices that ``spec`` asks for. An event loop may call all methods except ``finish`` and ``wait``."""

    name = "notify"

    def __init__(self, spec: NotifySpec, run: RunDirectory, warn: Callable[[str], None]) -> None:
        self._spec = spec
        self._run = run
        self._warn = warn
        self._under_way: list[Thread] = []

    def tell(self, event: Notice, message: str) -> None:
        """Send a notice if the spec asks for this event."""
        if event not in self._spec.on:
            return
        notice = _notice(event, message, self._run)
        if self._spec.webhook is not None:
            self._start(_post, self._spec.webhook, notice)
        if self._spec.command is not None:
            self._start(_execute, self._spec.command, notice, self._run.path / LOG)

    @property
    def pending(self) -> bool:
        return any(thread.is_alive() for thread in self._under_way)

    def stalled(self, text: str) -> None:
        self.tell("stall", text)

    def finish(self, ending: Ending) -> None:
        if ending.phase == "finished":
            self.tell("finish", ending.message)
        elif ending.phase == "failed":  # a run that its user interrupted sends no notice
            self.tell("failure", ending.message)
            if self.pending:
                self._warn(f"the run failed: {ending.message}")  # now, because the error is shown after all deliveries
        self.wait()

    def wait(self) -> None:
        """Wait until every delivery has succeeded or failed, at most ``WAIT_S`` seconds."""
        deadline = time.monotonic() + WAIT_S
        for thread in self._under_way:
            thread.join(max(0.0, deadline - time.monotonic()))
        if late := sum(thread.is_alive() for thread in self._under_way):
            self._warn(f"notify: {late} not delivered within {WAIT_S:.0f} s")
        self._under_way.clear()

    def _start(self, deliver: Callable[..., None], *arguments: Any) -> None:
        def work() -> None:
            try:
                deliver(*arguments)
            except Exception as error:  # whatever fails, the run continues
                self._warn(hide(f"notify: {error}"))

        self._under_way = [thread for thread in self._under_way if thread.is_alive()]
        if len(self._under_way) >= AT_ONCE:
            self._warn(f"notify: not sent, {AT_ONCE} others are still being delivered")
            return
        thread = Thread(target=work, name="notify", daemon=True)
        thread.start()
        self._under_way.append(thread)


def _notice(event: Notice, message: str, run: RunDirectory) -> dict[str, Any]:
    state = run.state
    return {
        "event": event,
        "run": run.run_id,
        "message": message,
        "text": f"{run.run_id}, {event}: {message}",  # Slack, Mattermost and others show this key
        "step": state.step,
        "steps": state.steps,
        "folder": str(run.path),
        "host": os.uname().nodename,
    }


def _post(webhook: str, notice: Mapping[str, Any]) -> None:
    address = webhook
    if webhook.startswith(FROM_ENVIRONMENT):
        name = webhook.removeprefix(FROM_ENVIRONMENT)
        address = os.environ.get(name, "")
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"the environment variable {name} has no http address")
    headers = {"Content-Type": "application/json", "User-Agent": "asyncrl"}
    request = urllib.request.Request(address, json.dumps(notice).encode(), headers)
    try:
        urllib.request.urlopen(request, timeout=WEBHOOK_S).close()
    except OSError as error:
        raise OSError(f"the webhook did not accept the notice: {error}") from None


def _execute(command: str, notice: Mapping[str, Any], log: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    environment |= {
        "ASYNCRL_EVENT": notice["event"],
        "ASYNCRL_RUN_ID": notice["run"],
        "ASYNCRL_MESSAGE": notice["message"],
        "ASYNCRL_FOLDER": notice["folder"],
    }
    run_command(command, environment, stdin=json.dumps(notice).encode(), log=log, limit_s=COMMAND_S)
