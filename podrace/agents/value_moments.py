"""Explained variance of values, and means over valid steps, from metrics that are averaged.

Explained variance is 1 - E[(target - value)^2] / Var[target]: 1 for perfect values, 0 for values
that are as good as a constant, below 0 for worse ones. A mean of such ratios over minibatches or
devices would be wrong, as would one of means over the valid steps of each. So agents report means
over all steps, with masked ones as 0, and the run divides them when it writes a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrace.types import Array, Metrics

NAMES = ('value_valid', 'value_target', 'value_target_square', 'value_error_square')
# Metrics that are 0 in the steps that the moments mask.
MASKED = ('entropy', 'approx_kl', 'clip_fraction', 'rho')
ROUNDING = 1e-4  # share of E[target^2] below which a variance is rounding of float32


def value_moments(target: Array, value: Array, mask: Array) -> Metrics:
  """Return terms of all steps, 0 in masked ones. Their means are metrics of an agent.

  Pass them to `podrace.learner.means`. A line of metrics has `explained_variance` in their place,
  and the metrics named in MASKED as means over the steps that count.

  Args:
    target: targets of values, f32 of any shape.
    value: values before the update, of the same shape.
    mask: f32 of the same shape: 1 for steps that count, else 0.
  """
  target, value = lax.stop_gradient((target, value))
  each = mask, mask * target, mask * jnp.square(target), mask * jnp.square(target - value)
  return dict(zip(NAMES, each, strict=True))


def means_of_valid(metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Return the MASKED metrics of each seed as means over its valid steps; NaN without any."""
  valid = np.asarray(metrics[NAMES[0]], np.float64)
  with np.errstate(all='ignore'):
    return {name: np.asarray(metrics[name]) / valid for name in MASKED if name in metrics}


def explained_variance(metrics: Mapping[str, Any]) -> np.ndarray:
  """Return the explained variance of each seed, from the means of `value_moments`.

  It is NaN if the targets are equal, as far as float32 can tell, or if no step counts.
  """
  valid, first, second, error = (np.asarray(metrics[name], np.float64) for name in NAMES)
  with np.errstate(all='ignore'):
    variance = second / valid - np.square(first / valid)
    ratio = 1 - error / valid / variance
    known = variance > ROUNDING * second / valid
  return np.where(known, ratio, np.nan)
