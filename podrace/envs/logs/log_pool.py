"""Logs for environments on the host."""

from __future__ import annotations

from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.spaces import i32
from podrace.envs.logs.log_environment import LogEnvironment
from podrace.envs.logs.recorded import Log
from podrace.envs.logs.share import Share
from podrace.envs.spaces import convert
from podrace.errors import UsageError
from podrace.types import HostEnvironment


def host_spec(log: Log, share: Share, env: HostSpec | None) -> HostSpec:
  """Return a kind of environment on the host, of which a share replays a log.

  Args:
    log: the recorded episodes.
    share: p of every q environments replay the log.
    env: the environment that the rest act in; None if all replay the log.
  """
  if env is not None and env.jax is None and share[0] < share[1]:
    raise UsageError(f'--log-share {share[0]}/{share[1]}: not yet with {env.name}')
  pure = LogEnvironment(log, share, None if env is None else env.jax)
  observation, action = (convert(i32, s) for s in (pure.observation_space, pure.action_space))

  def no_pool(args: PoolArgs) -> HostEnvironment:
    raise TypeError('environments in JAX make their pool from keys, see podrace.envs.host.jax')

  name = log.name if env is None else env.name
  return HostSpec(name, observation, action, no_pool, ordered_only=True, jax=pure)
