"""The whole of Sebulba: IMPALA learns Catch, with two actor threads and a learner.

    python examples/sebulba.py

    pools of environments -> actor threads -> pipe -> source -> learner
                                  ^                                |
                                  +--------- parameters -----------+

`podrace train catch --architecture sebulba` runs the same parts, with checkpoints and a log.
"""

from __future__ import annotations

import jax

from podrace.agents.impala import Impala
from podrace.architectures.sebulba import (
  ActingProgram,
  ActorSource,
  LearningProgram,
  State,
  example_trajectory,
)
from podrace.envs.host import base as host
from podrace.replay import on_policy
from podrace.settings.agents import bind
from podrace.topology import split_devices

NUM_ENVS, UNROLL_LENGTH, UPDATES = 64, 18, 400


def main(updates: int = UPDATES) -> float:
  """Trains; returns the mean return of the episodes in the last tenth of the updates."""
  # An environment, an agent for its spaces, and devices that act or learn.
  spec = host.make('podrace:catch')
  agent = bind(Impala(learning_rate=3e-3), spec, updates, NUM_ENVS)
  topology = split_devices(num_devices=1)  # of many, a quarter acts and the rest learns
  mesh = topology.learners

  # The acting half knows no learner, only the destination of its unrolls.
  acting = ActingProgram(
    agent=agent,
    spec=spec,
    devices=topology.actors,
    destinations=tuple(topology.local_learners),
    num_envs=NUM_ENVS,
    unroll_length=UNROLL_LENGTH,
    threads=2,
    lag='1',  # unroll k acts with the parameters of update k - 1, while update k - 1 is learned
  )

  # The learning half knows no environment, only the shapes of a batch.
  learning = LearningProgram(
    agent=agent,
    mesh=mesh,
    replay=on_policy(),  # the newest trajectory is all that it remembers
    example=example_trajectory(agent, spec, NUM_ENVS, UNROLL_LENGTH),
    streams=acting.local_groups,
    keeps_previous=True,  # the parameters that `lag` 1 needs
  )

  # Between them: the source of the learner's batches.
  source = ActorSource(acting, mesh)

  learning.compile()
  source.open()
  key = jax.random.key(0)
  state = learning.init(jax.random.clone(key)[None])
  source.start(state, jax.random.split(key, 3)[1])
  try:
    state = learn(learning, source, state, updates - updates // 10)
    source.read()  # these episodes do not count
    learn(learning, source, state, updates)
    episodes, metrics = source.read()
  finally:
    source.close()
  mean = episodes.return_sum / episodes.count
  print(
    f'{episodes.count} episodes, return {mean:.2f}, policy lag {metrics["policy_lag_mean"]:.1f}'
  )
  return mean


def learn(learning: LearningProgram, source: ActorSource, state: State, until: int) -> State:
  """The learner's loop, up to update `until`; `SebulbaDriver.advance` is this."""
  for update in range(int(state.update), until):
    before = state.train.params
    batch = source.take(update, cancelled=lambda: False)
    assert batch is not None
    state, priority = learning.learn(state, batch)
    source.learned(batch, priority, state.train.params)
    state = learning.end_update(state, update + 1, before, batch)
    source.publish(update + 1, state.train.params)
  return state


if __name__ == '__main__':
  main()
