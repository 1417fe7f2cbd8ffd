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

SETTINGS = dict(updates=1000, batch=64, length=29, envs=2, capacity=1024, window=20)


def main(checkout: str, rule: str, seeds: int) -> None:
  sys.path.insert(0, checkout)
  import chex
  import jax
  import numpy as np

  chex.Array = jax.Array | np.ndarray  # as in disco_reference.py
  from disco_rl import agent as agents
  from disco_rl import types, utils
  from disco_rl.environments import jittable_envs

  flat = np.load(rule, allow_pickle=False)
  params: dict[str, dict[str, np.ndarray]] = {}
  for name in flat.files:
    module, _, kind = name.rpartition('/')
    params.setdefault(module, {})[kind] = flat[name]

  s = SETTINGS
  env = jittable_envs.CatchJittableEnvironment(
    batch_size=s['envs'], env_settings=jittable_envs.get_config_catch()
  )
  settings = agents.get_settings_disco()
  settings.learning_rate = 1e-2
  agent = agents.Agent(
    agent_settings=settings, single_observation_spec=env.single_observation_spec(),
    single_action_spec=env.single_action_spec(), batch_axis_name='i',
  )  # fmt: skip

  @jax.jit
  def unroll(learned, actor, ts, state, key):  # type: ignore[no-untyped-def]
    def step(carry, key):  # type: ignore[no-untyped-def]
      state, ts, actor = carry
      found, actor = agent.actor_step(learned, key, ts, actor)
      return (*env.step(state, found.actions), actor), found

    carry, rollout = jax.lax.scan(step, (state, ts, actor), jax.random.split(key, s['length']))
    return carry, types.ActorRollout.from_timestep(rollout)

  def learn(key, rollout, learner, actor):  # type: ignore[no-untyped-def]
    return agent.learner_step(key, rollout, learner, actor, params, False)[0]

  one = functools.partial(jax.tree.map, lambda x: x[None])
  learn = jax.jit(jax.vmap(learn, axis_name='i'))
  for seed in range(seeds):
    key = jax.random.PRNGKey(seed)
    rng = np.random.default_rng(seed + 17)
    state, ts = env.reset(key)
    learner, actor = agent.initial_learner_state(key), agent.initial_actor_state(key)
    buffer: collections.deque[object] = collections.deque(maxlen=s['capacity'])
    caught, ended, seconds, began = [], [], [], time.perf_counter()
    for update in range(s['updates']):
      key, act_key, learn_key = jax.random.split(key, 3)
      (state, ts, actor), rollout = unroll(learner.params, actor, ts, state, act_key)
      rollout = jax.device_get(rollout)
      buffer.extend(jax.tree.map(lambda x, i=i: x[:, i], rollout) for i in range(s['envs']))
      last = rollout.discounts == 0
      ended.append((np.sum(rollout.rewards[last] > 0), np.sum(last)))
      if len(buffer) >= s['batch']:
        rows = rng.integers(len(buffer), size=s['batch'])
        batch = utils.tree_stack([buffer[i] for i in rows], axis=1)
        learner = jax.tree.map(
          lambda x: x[0], learn(learn_key[None], one(batch), one(learner), one(actor))
        )
      if (update + 1) % s['window'] == 0:
        good, all_ = np.sum(ended[-s['window'] :], axis=0)
        caught.append(round(float(good / all_), 4))
        seconds.append(round(time.perf_counter() - began, 1))
    print(json.dumps(dict(seed=seed, caught=caught, seconds=seconds)), flush=True)


if __name__ == '__main__':
  main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 5)
