"""The rejax side of value_agents.py; runs in an environment of its own, without podrace."""

from __future__ import annotations

import time
from typing import Any

import common
import jax
import numpy as np
import rejax
from rejax.evaluate import evaluate


class Peer:
  """One compiled setting of rejax's DQN or SAC; evaluation in training is off, states are donated."""

  def __init__(self, config: dict[str, Any], steps: int) -> None:
    config = dict(config)
    algo = rejax.get_algo(config.pop('algorithm')).create(
      **config, total_timesteps=steps, eval_freq=steps, skip_initial_evaluation=True
    )
    self.algo = algo.replace(eval_callback=lambda algo, ts, rng: ())
    begin = time.perf_counter()
    self.init = jax.jit(self.algo.init_state).lower(jax.random.key(0)).compile()
    self.state = jax.block_until_ready(self.init(jax.random.key(0)))
    train = jax.jit(lambda ts: self.algo.train(train_state=ts)[0], donate_argnums=0)
    self.run = train.lower(self.state).compile()
    self.compile_s = time.perf_counter() - begin

  def train(self, seed: int, calls: int) -> list[float]:
    self.state = jax.block_until_ready(self.init(jax.random.key(seed)))
    seconds = []
    for _ in range(calls):
      took, self.state = common.timed(lambda: self.run(self.state))
      seconds.append(took)
    return seconds

  def score(self, episodes: int) -> float:
    act = self.algo.make_act(self.state)
    most = self.algo.env_params.max_steps_in_episode
    key = jax.random.key(2**20)
    _, returns = evaluate(act, key, self.algo.env, self.algo.env_params, episodes, most)
    return float(np.mean(returns))


def main() -> None:
  peer = None
  for request in common.requests():
    match request['do']:
      case 'versions':
        common.answer(**common.versions(('rejax', 'jax', 'jaxlib', 'flax', 'optax', 'gymnax')))
      case 'setup':
        peer = Peer(request['rejax'], request['steps'])
        common.answer(compile_s=peer.compile_s)
      case 'run':
        common.answer(
          seconds=peer.train(request['seed'], request['calls']),
          score=peer.score(request['episodes']),
        )


if __name__ == '__main__':
  main()
