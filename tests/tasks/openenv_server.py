"""An OpenEnv server for tests: OpenEnv's echo environment, and one that counts down. Needs a Python with ``openenv``.

python openenv_server.py FOLDER    where `openenv init echo_env` was run in FOLDER
"""

from __future__ import annotations

import sys
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

sys.path.insert(0, sys.argv[1])
from echo_env.models import EchoAction, EchoObservation
from echo_env.server.echo_env_environment import EchoEnvironment


class Take(Action):
    """Take some away."""

    many: int
    why: str = ""


class Left(Observation):
    left: int


class CountDown(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    closed = 0
    """The environments that have been closed."""

    def __init__(self) -> None:
        self.left = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, more: int = 0, **_: Any) -> Left:
        self.left = (seed or 0) + more
        return Left(left=self.left, done=not self.left)

    def step(self, action: Take, timeout_s: float | None = None, **_: Any) -> Left:
        if action.many > self.left:
            raise RuntimeError("not so many")
        self.left -= action.many
        return Left(left=self.left, reward=0.5, done=not self.left)

    def close(self) -> None:
        time.sleep(0.3)  # a simulator may take so long
        CountDown.closed += 1

    @property
    def state(self) -> State:
        return State()


app = FastAPI()
app.get("/closed")(lambda: CountDown.closed)
app.mount("/echo", create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=8))
app.mount("/count", create_fastapi_app(CountDown, Take, Left, max_concurrent_envs=1))
uvicorn.run(app, host="127.0.0.1", port=0)
