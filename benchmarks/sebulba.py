"""Sebulba against its ceilings: environments, inference and learner alone, and the run itself.

Each setting is `podrace bench sebulba`, in a process of its own and repeated; medians are told. On a
CPU the stages share the cores, so the run is compared with 1/(1/e + 1/i + 1/l). The lags are
measured as the combined rate of one setting with each. Settings that are not named keep what the result
file has of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
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
  'gymnasium-cartpole': [*GYMNASIUM, '--num-envs', '128'],
  'gymnasium-cartpole, 1 thread, 256 environments': [*GYMNASIUM, *ONE, '256'],
  'gymnasium-acrobot, 1 thread': ['--env', 'gymnasium:Acrobot-v1', *MLP, *ONE, '128'],
}
LAGS = ('0', '1', 'async')
RATES = ('environment', 'inference', 'learner', 'combined', 'parallel')


def bench(args: list[str], seconds: float) -> dict[str, Any]:
  command = [sys.executable, '-m', 'podrace.cli', 'bench', 'sebulba', *args]
  command += ['--seconds', str(seconds)]
  if '--learner-devices' in args:
    return common.last_json(command, XLA_FLAGS='--xla_force_host_platform_device_count=8')
  return common.last_json(command)


def measure(args: list[str], repeats: int, seconds: float) -> dict[str, Any]:
  runs = [bench(args, seconds) for _ in range(repeats)]
  return dict(
    args=args,
    rates={k: common.summary([r[k] for r in runs]) for k in RATES},
    combined_over_parallel=statistics.median(r['combined_over_parallel'] for r in runs),
    combined_over_environment=statistics.median(r['combined_over_environment'] for r in runs),
    actor_time=runs[-1]['actor_time'],
    actor_time_by_thread=runs[-1]['actor_time_by_thread'],
    bytes=runs[-1]['bytes'],
    origin=common.origin(),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('settings', nargs='*', help=f'of {[*SETTINGS, "lags"]}; none: all')
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--seconds', type=float, default=5.0)
  args = parser.parse_args()
  path = common.RESULTS / 'sebulba.json'
  results: dict[str, Any] = json.loads(path.read_text())['results'] if path.exists() else {}
  for name in args.settings or [*SETTINGS, 'lags']:
    if name == 'lags':
      continue
    r = results[name] = measure(SETTINGS[name], args.repeats, args.seconds)
    told = ', '.join(f'{k} {r["rates"][k]["median"]:,.0f}' for k in RATES)
    print(f'{name}: {told}; {r["combined_over_parallel"]:.2f} of parallel', flush=True)
    common.record('sebulba', results)
  if 'lags' in (args.settings or ['lags']):
    lags: dict[str, list[float]] = {lag: [] for lag in LAGS}
    for _ in range(args.repeats):
      for lag in LAGS:
        lags[lag].append(bench([*PONG, '--lag', lag], args.seconds)['combined'])
    results['lags'] = {lag: common.summary(rates) for lag, rates in lags.items()}
    print({lag: round(r['median']) for lag, r in results['lags'].items()}, flush=True)
  common.record('sebulba', results)


if __name__ == '__main__':
  main()
