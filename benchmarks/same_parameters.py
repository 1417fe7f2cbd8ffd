"""Whether this checkout learns the same parameters as another one, to the bit.

    git worktree add /tmp/before COMMIT
    .venv/bin/python benchmarks/same_parameters.py --other /tmp/before

Trains each case in both, and compares `params_sha256`. Exits 1 if one differs. Both use this virtual environment.
"""

from __future__ import annotations

import pathlib
import tempfile

import common
import pairs

PRESETS = (
  'catch',
  'cartpole',
  'dqn-cartpole',
  'r2d2-memory',
  'sac-pendulum',
  'muzero-catch',
  'muesli-catch',
)
SEBULBA = {
  'sebulba': ('train', 'catch', '--architecture', 'sebulba'),
  'sebulba-envpool': ('train', 'cartpole', '--env', 'envpool:CartPole-v1', '--num-envs', '16'),
  'sebulba-replay': ('train', 'dqn-cartpole', '--env', 'gymnasium:CartPole-v1'),
  'sebulba-pong': ('train', 'pong', '--agent.network.hidden', '8'),
}
CASES = {name: ('train', name) for name in PRESETS}
CASES |= SEBULBA | {'discover': ('discover', 'lpg-grid-worlds')}


def params_sha256(tree: pathlib.Path, case: str, steps: int) -> str:
  """Returns the hash of the parameters that a checkout learns."""
  with tempfile.TemporaryDirectory() as folder:
    run_dir = pathlib.Path(folder) / 'run'
    pairs.run(
      tree, '-m', 'podrace', *CASES[case], '--total-steps', steps, '--run-dir', run_dir, '--quiet'
    )
    return common.summary_of(run_dir)['params_sha256']


def main() -> None:
  """Compares the cases."""
  args = common.arguments(__doc__, CASES, other='', steps=50_000)
  trees = dict(this=common.ROOT, other=pathlib.Path(args.other))
  equal = True
  for case in args.cases:
    hashes = {name: params_sha256(tree, case, args.steps) for name, tree in trees.items()}
    same = len(set(hashes.values())) == 1
    equal &= same
    print(f'{case}: {"equal" if same else hashes}', flush=True)
    common.keep(
      'same_parameters',
      case,
      dict(**hashes, steps=args.steps, other_commit=common.head(trees['other'])),
      CASES,
    )
  raise SystemExit(not equal)


if __name__ == '__main__':
  main()
