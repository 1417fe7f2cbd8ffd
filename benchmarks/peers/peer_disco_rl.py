"""The released code of DiscoRL on Catch: its agent, network, rule, environment and settings, as in its notebook.

    VENV/bin/python benchmarks/peers/peer_disco_rl.py CHECKOUT RULE.npz [SEEDS]

VENV and the checkout are those of tests/data/disco_reference.py. The notebook's loop in a few lines: acting, a replay of
1,024 rollouts, 64 of them in an update. Its `pmap` over one device is a `vmap` over an axis of one. Prints a line of JSON
for each seed: the share of episodes that ended with a caught ball, of each 20 updates.
"""

from __future__ import annotations

import collections
import functools
import json
import sys
import time
from typing import Any

S = dict(updates=1000, batch=64, length=29, envs=2, capacity=1024, window=20)


def load_rule(path: str) -> dict[str, dict[str, Any]]:
  """Returns the parameters of the rule, as the release loads them."""
  import numpy as np

  flat = np.load(path, allow_pickle=False)
  params: dict[str, dict[str, Any]] = {}
  for name in flat.files:
    module, _, kind = name.rpartition('/')
    params.setdefault(module, {})[kind] = flat[name]
  return params


def make(rule: str) -> tuple[Any, Any, Any, Any]:
  """Returns the release's environment and agent, and functions that unroll and learn."""
  import jax
  from disco_rl import agent as agents
  from disco_rl import types
  from disco_rl.environments import jittable_envs

  params = load_rule(rule)
  config = jittable_envs.get_config_catch()
  env = jittable_envs.CatchJittableEnvironment(batch_size=S['envs'], env_settings=config)
  settings = agents.get_settings_disco()
  settings.learning_rate = 1e-2
  agent = agents.Agent(
    agent_settings=settings, single_observation_spec=env.single_observation_spec(),
    single_action_spec=env.single_action_spec(), batch_axis_name='i',
  )  # fmt: skip

  @jax.jit
  def unroll(learned: Any, actor: Any, ts: Any, state: Any, key: Any) -> Any:
    def step(carry: Any, key: Any) -> Any:
      state, ts, actor = carry
      output, actor = agent.actor_step(learned, key, ts, actor)
      return (*env.step(state, output.actions), actor), output

    carry, rollout = jax.lax.scan(step, (state, ts, actor), jax.random.split(key, S['length']))
    return carry, types.ActorRollout.from_timestep(rollout)

  def learn(key: Any, rollout: Any, learner: Any, actor: Any) -> Any:
    return agent.learner_step(key, rollout, learner, actor, params, False)[0]

  return env, agent, unroll, jax.jit(jax.vmap(learn, axis_name='i'))


def main(checkout: str, rule: str, seeds: int) -> None:
  sys.path.insert(0, checkout)
  import chex
  import jax
  import numpy as np

  chex.Array = jax.Array | np.ndarray  # as in disco_reference.py
  from disco_rl import utils

  env, agent, unroll, learn = make(rule)
  one = functools.partial(jax.tree.map, lambda x: x[None])
  for seed in range(seeds):
    key = jax.random.PRNGKey(seed)
    rng = np.random.default_rng(seed + 17)
    state, ts = env.reset(key)
    learner, actor = agent.initial_learner_state(key), agent.initial_actor_state(key)
    buffer: collections.deque[Any] = collections.deque(maxlen=S['capacity'])
    caught, ended, seconds, began = [], [], [], time.perf_counter()
    for update in range(S['updates']):
      key, act_key, learn_key = jax.random.split(key, 3)
      (state, ts, actor), rollout = unroll(learner.params, actor, ts, state, act_key)
      rollout = jax.device_get(rollout)
      buffer.extend(jax.tree.map(lambda x, i=i: x[:, i], rollout) for i in range(S['envs']))
      last = rollout.discounts == 0
      ended.append((np.sum(rollout.rewards[last] > 0), np.sum(last)))
      if len(buffer) >= S['batch']:
        rows = rng.integers(len(buffer), size=S['batch'])
        batch = utils.tree_stack([buffer[i] for i in rows], axis=1)
        learned = learn(learn_key[None], one(batch), one(learner), one(actor))
        learner = jax.tree.map(lambda x: x[0], learned)
      if (update + 1) % S['window'] == 0:
        good, total = np.sum(ended[-S['window'] :], axis=0)
        caught.append(round(float(good / total), 4))
        seconds.append(round(time.perf_counter() - began, 1))
    print(json.dumps(dict(seed=seed, caught=caught, seconds=seconds)), flush=True)


if __name__ == '__main__':
  main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 5)
