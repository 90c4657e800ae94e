"""Resolves the names in a spec's ``algorithm`` to functions, and imports the user's own functions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.user_code import import_named
from asyncrl_cli.spec.algorithm import GAE, AlgorithmSpec
from asyncrl_cli.train.algorithms.advantages import ADVANTAGES, AdvantageFunction
from asyncrl_cli.train.algorithms.kl import KL, KLEstimator
from asyncrl_cli.train.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss

Function = TypeVar("Function")


@dataclass(frozen=True, slots=True)
class Objective:
    """The functions that an ``AlgorithmSpec`` names. ``advantage`` is None where a group is not the baseline."""

    algorithm: AlgorithmSpec
    advantage: AdvantageFunction | None
    loss: PolicyLoss
    kl: KLEstimator

    @classmethod
    def of(cls, algorithm: AlgorithmSpec, search_path: Path) -> Objective:
        """Modules of the user's own functions are looked up in ``search_path`` first.

        Raises ``ConfigError`` when one cannot be imported, or does not take the arguments that it is called with.
        """
        advantage = None
        if algorithm.advantage not in ("none", GAE):
            advantage = _function(
                ADVANTAGES,
                name=algorithm.advantage,
                location="algorithm.advantage",
                search_path=search_path,
                arguments=("rewards",),
            )
        loss = _function(
            POLICY_LOSSES,
            name=algorithm.loss,
            location="algorithm.loss",
            search_path=search_path,
            arguments=LOSS_ARGUMENTS,
        )
        return cls(algorithm, advantage, loss, KL[algorithm.kl_estimator])


LOSS_ARGUMENTS = ("logprobs", "proximal_logprobs", "advantages", "mask", "settings")
"""The names of the arguments of a ``PolicyLoss``."""


def _function(
    known: Mapping[str, Function], name: str, location: str, search_path: Path, arguments: tuple[str, ...]
) -> Function:
    if name in known:
        return known[name]
    hint = f"name a function f({', '.join(arguments)})"
    function = import_named(name, folder=search_path, location=location, hint=hint)
    if not callable(function):
        raise ConfigError(
            f"{name} is not a function (got {type(function).__name__})",
            location=location,
            hint=hint,
        )
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name} cannot be called as f({', '.join(arguments)}): {error}",
            location=location,
            hint="give it these parameters, in this order",
        ) from None
    except ValueError:  # a builtin without a signature: the first call will show
        pass
    return function  # type: ignore[no-any-return]
