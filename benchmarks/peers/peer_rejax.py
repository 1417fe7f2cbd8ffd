"""The rejax side of ppo_cartpole.py; runs in an environment of its own, without podrace.

Requests (JSON lines): `setup` compiles rejax's PPO for some hyper-parameters, `train` times one
run with nothing but training in it, `curve` times a run in chunks and saves the actor after each.

rejax's `train` evaluates once at least; its own switch for what evaluation does, `eval_callback`,
is set to nothing, so neither its time nor its compile time counts. States are donated, as ours.
"""

from __future__ import annotations

import time
from typing import Any

import common
import jax
import numpy as np
import rejax


class Peer:
  """One compiled setting of rejax's PPO."""

  def __init__(self, config: dict[str, Any], steps_per_call: int):
    algo = rejax.get_algo('ppo').create(
      env=config['env'],
      agent_kwargs=dict(activation='tanh', hidden_layer_sizes=tuple(config['hidden'])),
      num_envs=config['num_envs'],
      num_steps=config['unroll_length'],
      num_epochs=config['epochs'],
      num_minibatches=config['minibatches'],
      learning_rate=config['learning_rate'],
      max_grad_norm=config['max_grad_norm'],
      gamma=config['discount'],
      gae_lambda=config['lambda'],
      clip_eps=config['clip'],
      ent_coef=config['entropy_cost'],
      vf_coef=config['value_cost'],
      total_timesteps=steps_per_call,
      eval_freq=steps_per_call,
      skip_initial_evaluation=True,
    )
    algo = algo.replace(eval_callback=lambda algo, ts, rng: ())
    key = jax.random.key(0)
    start = time.perf_counter()
    self.init = jax.jit(algo.init_state).lower(key).compile()
    init_s = time.perf_counter() - start
    self.state = jax.block_until_ready(self.init(key))
    start = time.perf_counter()
    train = jax.jit(lambda ts: algo.train(train_state=ts)[0], donate_argnums=0)
    self.run = train.lower(self.state).compile()
    self.compile_s = dict(init=init_s, train=time.perf_counter() - start)

  def reset(self, seed: int) -> None:
    self.state = jax.block_until_ready(self.init(jax.random.key(seed)))

  def seconds(self) -> float:
    took, self.state = common.timed(lambda: self.run(self.state))
    return took

  def actor(self) -> list[np.ndarray]:
    """Kernel and bias of each layer of the policy, in order."""
    params = self.state.actor_ts.params['params']
    layers = [*(params['features'][k] for k in sorted(params['features'])), params['action_logits']]
    return [np.asarray(layer[part]) for layer in layers for part in ('kernel', 'bias')]


def main() -> None:
  peer = None
  for request in common.requests():
    match request['do']:
      case 'versions':
        common.answer(**common.versions(('rejax', 'jax', 'jaxlib', 'flax', 'optax', 'gymnax')))
      case 'setup':
        peer = Peer(request['config'], request['steps'])
        common.answer(compile_s=peer.compile_s)
      case 'run':
        peer.reset(request['seed'])
        seconds = []
        actors = []
        for _ in range(request['calls']):
          seconds.append(peer.seconds())
          actors.append(peer.actor())
        np.savez(request['save'], *(np.stack(x) for x in zip(*actors, strict=True)))
        common.answer(seconds=seconds)


if __name__ == '__main__':
  main()
