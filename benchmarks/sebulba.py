"""Sebulba against its ceilings: environments, inference and learner alone, and the run itself.

Each setting is `podrace bench sebulba`, in a process of its own and repeated; figures are medians. On a CPU the
stages share the cores, so the run is compared with 1/(1/e + 1/i + 1/l). `lags` is the combined rate of one
setting with each lag. Settings that are not run keep their results.
"""

from __future__ import annotations

from typing import Any

import common

PONG = ['pong', '--num-envs', '32', '--unroll-length', '20', '--actor-threads', '2']
MLP = ['--agent', 'impala', '--agent.network.hidden', '64', '64', '--unroll-length', '20']
ENVPOOL = ['--env', 'envpool:CartPole-v1', *MLP]
GYMNASIUM = ['--env', 'gymnasium:CartPole-v1', *MLP]
ONE = ['--actor-threads', '1', '--num-envs']
APART = ['--actor-devices', '0,1', '--learner-devices', '2,3,4,5,6,7']
SETTINGS = {
  'pong-impala': PONG,
  'pong-nature': [*PONG, '--agent.network.torso', 'nature', '--agent.network.hidden', '512'],
  'pong-impala, 2 fake devices act, 6 learn': [*PONG, *APART, *ONE, '48'],
  'envpool-cartpole': [*ENVPOOL, '--num-envs', '128'],
  'envpool-cartpole, 1 thread': [*ENVPOOL, *ONE, '128'],
  'envpool-cartpole, 1 thread, 1,024 environments': [*ENVPOOL, *ONE, '1024'],
  'envpool-cartpole, 1 thread, 4,096 environments': [*ENVPOOL, *ONE, '4096'],
  'envpool-cartpole, 1 thread, 2 groups, 4,096 environments': [
    *ENVPOOL,
    *ONE,
    '4096',
    '--actor-groups',
    '2',
  ],
  'gymnasium-cartpole': [*GYMNASIUM, '--num-envs', '128'],
  'gymnasium-cartpole, 1 thread, 256 environments': [*GYMNASIUM, *ONE, '256'],
  'gymnasium-acrobot, 1 thread': ['--env', 'gymnasium:Acrobot-v1', *MLP, *ONE, '128'],
}
LAGS = ('0', '1', 'async')
RATES = ('environment', 'inference', 'learner', 'combined', 'parallel')


def bench(args: list[str], seconds: float) -> dict[str, Any]:
  """Runs `podrace bench sebulba`."""
  flags = '--xla_force_host_platform_device_count=8' if '--learner-devices' in args else ''
  command = [*common.PODRACE, 'bench', 'sebulba', *args, '--seconds', str(seconds)]
  return common.last_json(command, **({'XLA_FLAGS': flags} if flags else {}))


def measure(args: list[str], repeats: int, seconds: float) -> dict[str, Any]:
  """Returns the medians of runs, and shares and bytes of the last one."""
  runs = [bench(args, seconds) for _ in range(repeats)]
  ratios = common.columns(runs, 'combined_over_parallel', 'combined_over_environment')
  over = {k: one['median'] for k, one in ratios.items()}
  last = {k: runs[-1][k] for k in ('actor_time', 'actor_time_by_thread', 'bytes')}
  return dict(args=args, rates=common.columns(runs, *RATES), **over, **last, origin=common.origin())


def main() -> None:
  args = common.arguments(__doc__, [*SETTINGS, 'lags'], repeats=3, seconds=5.0)
  for name in args.cases:
    if name == 'lags':
      lags: dict[str, list[float]] = {lag: [] for lag in LAGS}
      for _ in range(args.repeats):
        for lag, rates in lags.items():
          rates.append(bench([*PONG, '--lag', lag], args.seconds)['combined'])
      result: dict[str, Any] = common.summaries(lags)
      shown = result
    else:
      result = measure(SETTINGS[name], args.repeats, args.seconds)
      shown = result['rates']
    print(f'{name}:', {k: round(r['median']) for k, r in shown.items()}, flush=True)
    common.keep('sebulba', name, result)


if __name__ == '__main__':
  main()
