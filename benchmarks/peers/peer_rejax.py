"""The rejax side of ppo_cartpole.py and value_agents.py; runs in an environment of its own, without podrace.

Requests (JSON lines): `setup` compiles rejax's PPO, or the algorithm of `rejax`; `run` times calls of it, then saves the
actor after each call, or plays greedy episodes.

rejax's `train` evaluates once at least. `eval_callback`, its own switch for evaluation, is set to nothing, so neither
its time nor its compile time counts. States are donated, as ours.
"""

from __future__ import annotations

import time
from typing import Any

import common
import jax
import numpy as np
import rejax
import timing
from rejax.evaluate import evaluate

PPO = {  # ours in its words
  'env': 'env', 'num_envs': 'num_envs', 'unroll_length': 'num_steps', 'epochs': 'num_epochs',
  'minibatches': 'num_minibatches', 'learning_rate': 'learning_rate', 'max_grad_norm': 'max_grad_norm',
  'discount': 'gamma', 'lambda': 'gae_lambda', 'clip': 'clip_eps', 'entropy_cost': 'ent_coef', 'value_cost': 'vf_coef',
}  # fmt: skip


class Peer:
  """One compiled setting of rejax."""

  def setup(
    self, steps: int, config: Any = None, rejax_settings: Any = None, **_: Any
  ) -> dict[str, Any]:
    settings = dict(rejax_settings or {'algorithm': 'ppo'})
    if config:
      hidden = tuple(config['hidden'])
      settings |= {theirs: config[ours] for ours, theirs in PPO.items()}
      settings['agent_kwargs'] = dict(activation='tanh', hidden_layer_sizes=hidden)
    algo = rejax.get_algo(settings.pop('algorithm')).create(
      **settings, total_timesteps=steps, eval_freq=steps, skip_initial_evaluation=True
    )
    self.algo = algo.replace(eval_callback=lambda algo, ts, rng: ())
    key = jax.random.key(0)
    begin = time.perf_counter()
    self.init = jax.jit(self.algo.init_state).lower(key).compile()
    init_s = time.perf_counter() - begin
    self.state = jax.block_until_ready(self.init(key))
    begin = time.perf_counter()
    train = jax.jit(lambda ts: self.algo.train(train_state=ts)[0], donate_argnums=0)
    self.program = train.lower(self.state).compile()
    return dict(compile_s=init_s + time.perf_counter() - begin)

  def run(self, seed: int, calls: int, save: str = '', episodes: int = 0) -> dict[str, Any]:
    self.state = jax.block_until_ready(self.init(jax.random.key(seed)))
    seconds, actors = [], []
    for _ in range(calls):
      took, self.state = timing.timed(lambda: self.program(self.state))
      seconds.append(took)
      if save:
        actors.append(self.actor())
    if save:
      np.savez(save, *(np.stack(x) for x in zip(*actors, strict=True)))
    return dict(seconds=seconds, score=self.score(episodes) if episodes else None)

  def actor(self) -> list[np.ndarray]:
    """Returns kernel and bias of each layer of the policy, in order."""
    params = self.state.actor_ts.params['params']
    layers = [*(params['features'][k] for k in sorted(params['features'])), params['action_logits']]
    return [np.asarray(layer[part]) for layer in layers for part in ('kernel', 'bias')]

  def score(self, episodes: int) -> float:
    """Returns the mean greedy return."""
    act, env_params = self.algo.make_act(self.state), self.algo.env_params
    most = env_params.max_steps_in_episode
    key = jax.random.key(2**20)
    _, returns = evaluate(act, key, self.algo.env, env_params, episodes, most)
    return float(np.mean(returns))


if __name__ == '__main__':
  peer = Peer()
  packages = ('rejax', 'jax', 'jaxlib', 'flax', 'optax', 'gymnax')
  common.serve(packages, setup=peer.setup, run=peer.run)
