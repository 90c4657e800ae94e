"""What a spec's algorithm means in functions and numbers: its names resolved, the user's own functions imported."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrl_cli.core.errors import ConfigError
from asyncrl_cli.core.user_imports import import_beside
from asyncrl_cli.spec.algorithm import AlgorithmSpec, CorrectionSpec
from asyncrl_cli.train.algorithms.advantages import ADVANTAGES, Estimator
from asyncrl_cli.train.algorithms.corrections import Correction
from asyncrl_cli.train.algorithms.kl import KL, KLEstimator
from asyncrl_cli.train.algorithms.policy_losses import LOSSES, LossSettings, PolicyLoss

Function = TypeVar("Function")


@dataclass(frozen=True, slots=True)
class Objective:
    """The functions that an ``AlgorithmSpec`` names. ``estimator`` is None where a critic estimates advantages."""

    algorithm: AlgorithmSpec
    estimator: Estimator | None
    loss: PolicyLoss
    settings: LossSettings
    kl: KLEstimator
    correction: Correction

    @classmethod
    def of(cls, algorithm: AlgorithmSpec, search_path: Path) -> Objective:
        """Modules of the user's own functions are sought in ``search_path`` first.

        Raises ``ConfigError`` when one cannot be imported, or does not take the arguments that it is called with.
        """
        estimator = None
        if not algorithm.needs_critic:
            estimator = _function(ADVANTAGES, algorithm.advantage, "algorithm.advantage", search_path, ("rewards",))
        return cls(
            algorithm,
            estimator,
            _function(LOSSES, algorithm.loss, "algorithm.loss", search_path, LOSS_ARGUMENTS),
            LossSettings(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip, algorithm.sapo_temperatures),
            KL[algorithm.kl_estimator],
            Correction(
                **{key: getattr(algorithm.correction, key) for key in CorrectionSpec.model_fields if key != "preset"}
            ),
        )


LOSS_ARGUMENTS = ("logprobs", "proximal_logprobs", "advantages", "mask", "settings")
"""What a ``PolicyLoss`` is called with."""


def _function(
    known: Mapping[str, Function], name: str, location: str, search_path: Path, arguments: tuple[str, ...]
) -> Function:
    if name in known:
        return known[name]
    module, _, attribute = name.partition(":")
    try:
        function: Any = getattr(import_beside(module, search_path), attribute)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be imported: {type(error).__name__}: {error}",
            location=location,
            hint=f"put {module.replace('.', '/')}.py with the function {attribute} beside the spec file",
        ) from error
    if not callable(function):
        raise ConfigError(
            f"{name} is no function but {type(function).__name__}", location=location, hint="name a function"
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
