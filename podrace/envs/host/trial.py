"""Checks of one environment of Gymnasium, and the layer to blame. Imports no JAX.

Wrappers unpack the results of an environment, so that checks around them see too little. In the
trial before a run each layer is checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium import wrappers

from podrace.errors import RunError, UsageError
from podrace.system.blame import describe, failed, label, of_the_user, refuse

RETURNS = {
  'reset': '(observation, info)',
  'step': '(observation, reward, terminated, truncated, info)',
}


def is_gymnasiums(env: Any) -> bool:
  """Return whether an environment is part of Gymnasium."""
  return type(env).__module__.partition('.')[0] == 'gymnasium'


def has_wrappers(env: Any) -> bool:
  """Return whether an environment has wrappers that Gymnasium does not add by itself."""
  while isinstance(env, wrappers.OrderEnforcing | wrappers.PassiveEnvChecker | wrappers.TimeLimit):
    env = env.env
  return isinstance(env, gymnasium.Wrapper)


def owner(env: Any) -> Any:
  """Return the outermost layer that is not Gymnasium's own; errors name its `reset` and `step`."""
  while isinstance(env, gymnasium.Wrapper) and is_gymnasiums(env):
    env = env.env
  return env


def blame_exception(of: Any, name: str, inputs: str, error: BaseException) -> UsageError | RunError:
  """Return the error for an exception in a function of an environment, or in its wrappers."""
  if isinstance(error, UsageError):
    return error
  unpacks = isinstance(error, ValueError | TypeError) and 'unpack' in str(error)
  if unpacks and not of_the_user(of, error):
    return UsageError(f'{label(of, name)} returned what is not {RETURNS[name]}: {error}')
  return failed(of, name, inputs, error)


def watch_layers(env: Any) -> Any:
  """Return the environment with checks of each layer's results, except Gymnasium's wrappers."""
  if not isinstance(env, gymnasium.Wrapper):
    return WatchedEnvironment(env)
  env.env = watch_layers(env.env)
  return env if is_gymnasiums(env) else WatchedEnvironment(env)


class WatchedEnvironment:
  """An environment that checks the form of its own results."""

  _env: Any

  def __init__(self, env: Any) -> None:
    object.__setattr__(self, '_env', env)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._env, name)

  def __setattr__(self, name: str, value: Any) -> None:
    setattr(self._env, name, value)

  def reset(self, **arguments: Any) -> Any:
    """Call `reset`, and check its arguments and its result."""
    self._check_takes(arguments)
    return self._checked('reset', self._env.reset(**arguments))

  def step(self, action: Any) -> Any:
    """Call `step`, and check its result."""
    return self._checked('step', self._env.step(action))

  def _check_takes(self, arguments: Mapping[str, Any]) -> None:
    try:
      signature = inspect.signature(self._env.reset)
    except (TypeError, ValueError):  # not written in Python
      return
    try:
      signature.bind(**arguments)
    except TypeError as error:
      raise UsageError(
        f'{label(self._env, "reset")} takes {signature}, expected (self, *, seed=None, '
        f'options=None): {error}'
      ) from error

  def _checked(self, name: str, came: Any) -> Any:
    expected = RETURNS[name]
    count = expected.count(',') + 1
    if not isinstance(came, tuple):
      refuse(self._env, name, describe(came), expected)
    if len(came) != count:
      refuse(self._env, name, f'a tuple of {len(came)}', expected)
    if not isinstance(came[-1], Mapping):
      refuse(self._env, name, f'the info {describe(came[-1])}', 'a dict')
    return came
