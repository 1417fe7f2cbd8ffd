"""Labels by a stage: rate of a labelling process, and its cost for the learner.

    python benchmarks/labels.py [process] [learner] [--pairs 5] [--seconds 10]

process: `podrace label` of the preset qtopt-grasp, with a replay service in a process of its own, from which the labels
are taken as they come. Labels/s is counted in the service.

learner: gradient steps/s of the same preset on ready labels, in this process, with a process beside it that labels at
the priority of `podrace label`, and with that process stopped, in turn. Both compute only: they exchange nothing.

Writes benchmarks/results/labels.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common

CASES = {'process': 'labels/s of a process', 'learner': 'the learner beside it'}
ARGUMENTS = ('qtopt-grasp', '--agent.labels', 'stage')


class Parts:
  """Agent, windows and parameters of the preset, and its compiled functions."""

  def __init__(self) -> None:
    import jax
    import numpy as np

    import podrace
    from podrace.architectures.sebulba import LearningProgram, example_trajectory
    from podrace.replay.layout import Layout
    from podrace.replay.refresh import Refresh
    from podrace.settings.resolved import Resolved
    from podrace.topology import learner_mesh

    config = podrace.configure(ARGUMENTS[0])
    agent = dataclasses.replace(config.agent, labels='stage')
    resolved = Resolved(dataclasses.replace(config, agent=agent, architecture='sebulba'))
    example = example_trajectory(
      resolved.agent, resolved.env, config.num_envs, config.unroll_length
    )
    layout = Layout(resolved.replay.windows, example)
    self.size = layout.windows.buffer.batch_size
    self.program = LearningProgram(resolved.agent, learner_mesh(1), layout, example)
    self.state = self.program.init(jax.random.split(jax.random.key(0), 1))
    rng = np.random.default_rng(0)
    self.data = {k: rng.integers(0, 2, x.shape).astype(x.dtype) for k, x in layout.batch().items()}
    self._refresh = jax.jit(Refresh(resolved.agent, layout))
    self._key = jax.random.key(1)

  def learn(self) -> None:
    """Make 20 gradient steps."""
    import jax

    from podrace.architectures.sebulba import Batch

    for _ in range(20):
      self.state, _ = self.program.learn(self.state, Batch(self.data))
    jax.block_until_ready(self.state.train.params)

  def label(self) -> None:
    """Label one batch."""
    import jax

    windows = {k: x for k, x in self.data.items() if k != 'weight'}
    jax.block_until_ready(self._refresh(self.state.train.params, windows, self._key))


def label_forever() -> None:
  """The process beside the learner."""
  from podrace.system.scheduling import give_way

  give_way()
  parts = Parts()
  parts.label()
  print('ready', flush=True)
  while True:
    parts.label()


def serve() -> None:
  """The service, with acting and a learner that takes the labels; prints their number each second."""
  import json

  import jax
  import numpy as np

  import podrace
  from podrace.architectures.sebulba import example_trajectory
  from podrace.distributed import parameters, replay, run_identity
  from podrace.distributed.acting import Acting
  from podrace.distributed.acting import Options as ActingOptions
  from podrace.distributed.replay.server import ReplayServer
  from podrace.distributed.run_tables import train_table
  from podrace.replay.layout import Layout
  from podrace.settings.resolved import resolve
  from podrace.system.threads import Worker

  folder = Path(sys.argv[-1])
  config = podrace.configure(ARGUMENTS[0])
  buffer = dataclasses.replace(config.agent.buffer, min_size=512)
  agent = dataclasses.replace(config.agent, labels='stage', buffer=buffer)
  config = dataclasses.replace(
    config, agent=agent, architecture='sebulba', lag='async', replay='service'
  )
  resolved = resolve(config)
  example = example_trajectory(resolved.agent, resolved.env, config.num_envs, config.unroll_length)
  layout = Layout(resolved.replay.windows, example)
  at = run_identity.Addresses((f'unix:{folder}/replay',), f'unix:{folder}/parameters')
  line = json.dumps({**run_identity.record(config), run_identity.RUN: 'one'}).encode()
  record = run_identity.RECORD, np.frombuffer(line, np.uint8)
  params = resolved.agent.init(jax.random.key(0)).params
  with (
    parameters.Publisher(at.parameters, environments=config.num_envs) as publisher,
    ReplayServer(at.replay[0]) as server,
    replay.connect(at.replay[0]) as client,
  ):
    publisher.publish(0, [*run_identity.to_leaves(params), record])
    Worker('act', Acting(resolved, ActingOptions(at)).run)
    table = train_table(client, layout, resolved.env.action_space, 'one')
    with table.sampler(buffer.batch_size) as samples:
      last = 0.0
      for _ in samples:
        if time.monotonic() - last > 1:
          last = time.monotonic()
          print(last, server.tables['train'].contents.counts.samples, flush=True)


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
  """Starts a process of this benchmark, and kills it."""
  process = subprocess.Popen(
    [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True,
    env=common.child_environ(JAX_PLATFORMS='cpu'), stderr=subprocess.DEVNULL,
  )  # fmt: skip
  try:
    yield process
  finally:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


def rate(work: Callable[[], None], seconds: float) -> float:
  """Returns the calls per second over `seconds`."""
  calls, began = 0, time.perf_counter()
  while time.perf_counter() < began + seconds:
    work()
    calls += 1
  return calls / (time.perf_counter() - began)


def measure_process(pairs: int, seconds: float) -> dict[str, Any]:
  """Returns labels/s of `podrace label`, over `pairs` spans."""
  rates = []
  with tempfile.TemporaryDirectory(prefix='podrace-labels-') as folder:
    at = ['--connect-replay', f'unix:{folder}/replay', '--params', f'unix:{folder}/parameters']
    buffer = ['--agent.buffer.min-size', '512']
    with started('--worker', 'serve', folder) as server:
      process = common.start_podrace(Path(folder) / 'label.txt', 'label', *ARGUMENTS, *buffer, *at)
      try:
        assert server.stdout is not None
        points = [tuple(map(float, server.stdout.readline().split())) for _ in range(3)]
        while len(rates) < pairs:
          points.append(tuple(map(float, server.stdout.readline().split())))
          span = points[-1][0] - points[2][0]
          if span >= seconds:
            rates.append((points[-1][1] - points[2][1]) / span)
            points[2] = points[-1]
      finally:
        process.kill()
        process.wait()
  return dict(labels_per_s=common.summary(rates))


def measure_learner(pairs: int, seconds: float) -> dict[str, Any]:
  """Returns the learner's gradient steps/s with and without a labelling process beside it."""
  parts = Parts()
  parts.program.compile()
  parts.learn()
  rates: dict[str, list[float]] = {'without': [], 'with': []}
  with started('--worker', 'label') as process:
    assert process.stdout is not None and process.stdout.readline() == 'ready\n'
    for i in range(pairs):
      for case in ('without', 'with') if i % 2 else ('with', 'without'):
        process.send_signal(signal.SIGCONT if case == 'with' else signal.SIGSTOP)
        rates[case].append(20 * rate(parts.learn, seconds))
  return dict(
    steps_per_s=common.summaries(rates),
    with_over_without=common.pair_ratio(rates['with'], rates['without']),
  )


def main() -> None:
  if sys.argv[1:2] == ['--worker']:
    serve() if sys.argv[2] == 'serve' else label_forever()
    return
  args = common.arguments(__doc__, CASES, pairs=5, seconds=10.0)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  for case in args.cases:
    measure = measure_process if case == 'process' else measure_learner
    result = measure(args.pairs, args.seconds)
    print(case, result, flush=True)
    common.keep('labels', case, result | common.origin(), CASES)


if __name__ == '__main__':
  main()
