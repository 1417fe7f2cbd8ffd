"""A program of one's own: Acme's distributed experiment (Hoffman et al. 2020, arXiv 2006.00979).

    python examples/program.py runs/mine

Replay, two processes that learn as one, actors; and a counter, an evaluator and a saver, which are functions of this
file. Acme's inference server, which acts for processes of environments, is the learner of `podrace launch --as seed`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from podrace.launch import run
from podrace.launch.program import Node, Program, literal
from podrace.policy.export import export
from podrace.run.evaluate import evaluate

TASK = ('cartpole', '--agent', 'dqn', '--num-envs', '16')
LENGTH = ('--total-steps', '10000', '--checkpoint-every', '2000')


def program(run_dir: str) -> Program:
  """Each node is a command. Names in braces are addresses that are known once the program runs."""
  replay, at = ('--connect-replay', '{replay}'), literal(run_dir)
  learner = (
    'podrace', 'train', *TASK, *LENGTH, '--replay', 'service', '--lag', 'async', *replay, '--run-dir', at,
    '--coordinator', '{coordinator}', '--num-processes', '2', '--process-id',
  )  # fmt: skip
  act = ('podrace', 'act', *TASK, *replay, '--params', '{learner}', '--local-envs', '8')
  mine = (sys.executable, literal(__file__))
  return Program((
    Node('replay', ('podrace', 'replay', '--listen', '{listen}'), listens=('replay',)),
    Node('learner', (*learner, '0', '--listen', '{listen}', '--announce', '{announce}'), listens=('params',), main=True),
    Node('second-learner', (*learner, '1', '--listen', '{learner}')),
    Node('actor', act, replicas=2),
    Node('counter', (*mine, 'counter', '{replay}')),
    Node('evaluator', (*mine, 'evaluator', at)),
    Node('saver', (*mine, 'saver', at)),
  ))  # fmt: skip


def counter(address: str) -> None:
  while True:
    top = subprocess.check_output((sys.executable, '-m', 'podrace', 'top', address, '--once'))
    print({x['name']: x['inserts'] for x in json.loads(top)['tables']}, flush=True)
    time.sleep(5)


def evaluator(run_dir: str) -> None:
  for step in checkpoints(run_dir):
    found = evaluate(Path(run_dir), 20, 0, ['greedy'])
    print(f'step {step:,}: a return of {found["episode_return_mean"]:.1f}', flush=True)


def saver(run_dir: str) -> None:
  for step in checkpoints(run_dir):
    export(Path(run_dir), Path(run_dir, 'policies', str(step)))


def checkpoints(run_dir: str) -> Iterator[int]:
  newest = 0
  while True:
    steps = [int(x.name) for x in Path(run_dir, 'checkpoints').glob('*') if x.name.isdigit()]
    if max(steps, default=0) > newest:
      yield (newest := max(steps))
    time.sleep(1)


if __name__ == '__main__':
  nodes = {f.__name__: f for f in (counter, evaluator, saver)}
  if sys.argv[1] in nodes:
    nodes[sys.argv[1]](sys.argv[2])
  sys.exit(run(program(sys.argv[1]), sys.argv[1]))
