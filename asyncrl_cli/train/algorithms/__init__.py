"""The mathematics of a step: pure functions of tensors, from rewards to the loss.

The modules, in a step's order (docs/one-step.md explains a step with numbers):

    objective.py     the names in a spec's ``algorithm`` become functions
    advantages.py    rewards of groups -> advantages of tokens
    corrections.py   old and behaviour log-probs -> importance weights
    policy_loss.py   current and old log-probs, advantages, weights -> the policy's loss
    kl.py            the KL penalty in the loss, or in the rewards
    value_loss.py    values and returns -> the critic's loss
    reduced_sums.py  sums for metrics, over micro-batches and ranks

``precompute.py`` and ``update.py``, one level up, call them with the models' outputs.
"""
