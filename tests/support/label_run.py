"""A run whose learner is the test: publisher and replay service in this process, and its labels."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from label_agent import Regression

from podrace import errors
from podrace.architectures.sebulba import example_trajectory
from podrace.distributed import acting as acting_process
from podrace.distributed import label, parameters, run_identity, stage
from podrace.distributed.run_identity import to_leaves
from podrace.distributed.run_tables import train_table
from podrace.replay.layout import Layout
from podrace.settings.config import Config
from podrace.settings.resolved import resolve

SIZE = 16  # of a batch
CONFIG = Config(
  Regression(noise=0.0), env='podrace:catch', architecture='sebulba', num_envs=8, unroll_length=4,
  lag='async', replay='service', devices=1, actor_threads=1,
)  # fmt: skip


AGENT = [  # the same, on the command line
  'catch', '--agent', 'label_agent:Regression', '--agent.noise', '0', '--num-envs', '8',
  '--unroll-length', '4',
]  # fmt: skip


class Publishing:
  """A learner's publisher in this process, and threads of processes that take part in its run."""

  def __init__(self, folder: Path, config: Config) -> None:
    self.addresses = run_identity.Addresses((f'unix:{folder}/replay',), f'unix:{folder}/parameters')
    self.config, self.resolved = config, resolve(config)
    self.agent = self.resolved.agent
    self.publisher = parameters.Publisher(self.addresses.parameters, environments=8)
    self.ended: list[BaseException] = []
    self.threads: list[threading.Thread] = []

  def params(self, version: int) -> Any:
    raise NotImplementedError

  def publish(self, version: int, *more: Any, run: str = 'one-1') -> None:
    line = json.dumps({**run_identity.record(self.config), run_identity.RUN: run}).encode()
    record = run_identity.RECORD, np.frombuffer(line, np.uint8)
    self.publisher.publish(version, [*to_leaves(self.params(version)), record, *more])

  def start(self, process: Any) -> None:
    """Runs a process in a thread."""

    def work() -> None:
      try:
        process.run()
      except BaseException as e:
        self.ended.append(e)

    self.threads.append(threading.Thread(target=work, daemon=True))
    self.threads[-1].start()

  def act(self) -> None:
    self.start(acting_process.Acting(self.resolved, acting_process.Options(self.addresses)))

  def start_stage(self, duty: Any, **options: Any) -> None:
    self.start(stage.Stage(duty, self.resolved, stage.Options(self.addresses, **options)))

  def end(self, version: int, count: int) -> None:
    """The run is complete, which ends that many processes."""
    self.publish(version, (run_identity.FINISHED, np.ones(1, np.uint8)))
    for thread in self.threads:
      thread.join(120)
    assert [type(e) for e in self.ended] == [errors.RunFinished] * count, self.ended


class Run(Publishing):
  """A run with a learner's publisher and a replay service in this process."""

  def __init__(self, folder: Path, **changes: Any) -> None:
    super().__init__(folder, dataclasses.replace(CONFIG, **changes))
    example = example_trajectory(self.agent, self.resolved.env, 8, 4)
    self.layout = Layout(self.resolved.replay.windows, example)
    self.expected: Any = jax.jit(self.agent.label)
    self._params: dict[int, Any] = {}

  def params(self, version: int) -> Any:
    if version not in self._params:
      self._params[version] = jax.jit(self.agent.init)(jax.random.key(version)).params
    return self._params[version]

  def label(self) -> None:
    self.start_stage(label.DUTY)

  def train_table(self, client: Any) -> Any:
    return train_table(client, self.layout, self.resolved.env.action_space, 'one-1')


def check_numbers(labels: Iterable[dict[str, np.ndarray]]) -> dict[int, int]:
  """Checks that each source numbers its labels 0, 1, ..., none missing or twice; returns how many."""
  counts: dict[int, int] = {}
  for data in labels:
    for source, number in zip(data['source'].tolist(), data['number'].tolist(), strict=True):
      assert number == counts.setdefault(source, 0), f'{source}: {number} is not {counts[source]}'
      counts[source] += 1
  return counts


def check_labels(run: Run, data: dict[str, np.ndarray]) -> None:
  """Checks that labels of one version are those of its parameters."""
  version = int(data['version'][0])
  assert (data['version'] == version).all() and not data['logged'].any()
  window = run.layout.trajectory({k: jnp.asarray(x) for k, x in data.items()})
  expected = run.expected(run.params(version), window, jax.random.key(0))
  np.testing.assert_allclose(data['extras/label'][:, 0], expected, atol=1e-5)
  assert np.ptp(expected) > 0.01
