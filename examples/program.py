"""A program of one's own: replay, a learner, acting processes, and a function of this file that watches the run.

python examples/program.py runs/mine
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from podrace.launch import run
from podrace.program import Node, Program, literal

TASK = ('cartpole', '--agent', 'dqn', '--num-envs', '16')


def program(run_dir: Path) -> Program:
  """Each node is a command. What is in braces is known once the program runs."""
  at = ('--connect-replay', '{replay}')
  keep = ('--run-dir', literal(str(run_dir)), '--total-steps', '20000')
  service = ('--replay', 'service', '--lag', 'async')
  return Program((
    Node('replay', ('podrace', 'replay', '--listen', '{listen}'), listens=('replay',)),
    Node(
      'learner',
      ('podrace', 'train', *TASK, *keep, *service, *at, '--listen', '{listen}'),
      listens=('params',),
      main=True,
    ),
    Node(
      'act',
      ('podrace', 'act', *TASK, *at, '--params', '{learner}', '--local-envs', '8'),
      replicas=2,
    ),
    Node('best', (sys.executable, literal(__file__), 'best', literal(str(run_dir)))),
  ))  # fmt: skip


def best(run_dir: Path) -> None:
  """Says each time when the run has become better, until it is ended with the program."""
  most = float('-inf')
  while True:
    path = run_dir / 'metrics.jsonl'
    for line in path.read_text().splitlines() if path.exists() else ():
      found = json.loads(line)
      if (found['episode_return'] or most) > most:
        most = found['episode_return']
        print(f'step {found["step"]:,}: a return of {most:.1f}, the best so far', flush=True)
    time.sleep(1)


if __name__ == '__main__':
  if sys.argv[1] == 'best':
    best(Path(sys.argv[2]))
  sys.exit(run(program(Path(sys.argv[1])), sys.argv[1]))
