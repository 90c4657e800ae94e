"""Resolves the names in a spec's ``algorithm`` to functions, and imports the user's functions."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.spec.algorithm import GAE, RUNNING_BASELINE, AlgorithmSpec
from asyncrl_cli.train.algorithms.advantages import ADVANTAGES, BASELINES_OF_TURNS, AdvantageFunction, running_baseline
from asyncrl_cli.train.algorithms.kl import KL, KLEstimator
from asyncrl_cli.train.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss


@dataclass(frozen=True, slots=True)
class Objective:
    """The functions that an ``AlgorithmSpec`` names.

    ``advantage``: None unless a group is the baseline. ``asks``: its arguments in addition to the rewards.
    """

    algorithm: AlgorithmSpec
    advantage: AdvantageFunction | None
    loss: PolicyLoss
    kl: KLEstimator
    asks: tuple[str, ...] = ()

    @classmethod
    def of(cls, algorithm: AlgorithmSpec, search_path: Path) -> Objective:
        """Resolve the names. Modules of the user's functions are searched in ``search_path`` first.

        Raises ``ConfigError`` when a function cannot be imported, or does not take its arguments.
        """
        advantage: AdvantageFunction | None = None
        asks: tuple[str, ...] = ()
        if algorithm.advantage not in ("none", GAE):
            advantage, asks = _advantage(algorithm.advantage, search_path)
        loss = POLICY_LOSSES.get(algorithm.loss) or _own_loss(algorithm.loss, search_path)
        return cls(algorithm, advantage, loss, KL[algorithm.kl_estimator], asks)


REWARDS, FURTHER = "rewards", ("lengths", "metrics")
"""Parameters of a user's ``AdvantageFunction``: the required one, and the optional ones."""


def _advantage(name: str, search_path: Path) -> tuple[AdvantageFunction, tuple[str, ...]]:
    """Return the function, and its arguments in addition to the rewards."""
    location = "algorithm.advantage"
    hint = f"name a function f({REWARDS}); it may also have the parameters {' and '.join(FURTHER)}"
    if name == RUNNING_BASELINE:
        return running_baseline, ("baseline",)
    if builtin_function := (ADVANTAGES | BASELINES_OF_TURNS).get(name):
        return builtin_function, ()
    function = _imported(name, location=location, search_path=search_path, hint=hint)
    parameters = inspect.signature(function).parameters
    required_names = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    if REWARDS not in parameters or not required_names <= {REWARDS, *FURTHER}:
        raise ConfigError(f"{name} has the parameters {', '.join(parameters)}", location=location, hint=hint)
    return function, tuple(further for further in FURTHER if further in parameters)


def _own_loss(name: str, search_path: Path) -> PolicyLoss:
    call, location = "f(logprobs, proximal_logprobs, advantages, mask, settings)", "algorithm.loss"
    function: PolicyLoss = _imported(name, location=location, search_path=search_path, hint=f"name a function {call}")
    try:
        inspect.signature(function).bind(*range(5))
    except TypeError as error:
        message, hint = f"{name} cannot be called as {call}: {error}", "give it these parameters, in this order"
        raise ConfigError(message, location=location, hint=hint) from None
    return function


def _imported(name: str, location: str, search_path: Path, hint: str) -> Any:
    function = import_named(name, folder=search_path, location=location, hint=hint)
    if not callable(function):
        raise ConfigError(f"{name} is not a function (got {type(function).__name__})", location=location, hint=hint)
    return function
