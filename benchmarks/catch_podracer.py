"""The Podracer notebook's setting: Catch, 128 environments, rollouts of 16, 2 x 256 ReLU, Adam 3e-4.

Steps/s of IMPALA (the notebook's kind of agent: one gradient per rollout) and of PPO with one
epoch of one minibatch; and what share of an update's time the same network's matrix products take
when they are all there is: the same products of the same shapes, in loops of the same lengths.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from typing import Any

import common

HIDDEN = (256, 256)
NUM_ENVS, UNROLL = 128, 16


def agents() -> dict[str, Any]:
  """The two variants, not bound yet."""
  from podrace.agents.impala import Impala
  from podrace.agents.ppo import PPO
  from podrace.networks import ActorCritic

  network = ActorCritic(
    torso='mlp', hidden=HIDDEN, activation='relu', initializer='lecun', shared=True
  )
  return dict(
    impala=Impala(network=network, learning_rate=3e-4),
    ppo=PPO(
      network=network, learning_rate=3e-4, anneal_learning_rate=False, epochs=1, minibatches=1
    ),
  )


@dataclasses.dataclass(frozen=True)
class Products:
  """The matrix products of one update, without biases, activations or anything else.

  Acting: `unroll` times forward on [B]. Learning: forward on [(T+1)*B] once and, for PPO, once
  more on [T*B]; backward on what the gradient is of: for each layer the weights' gradient, and
  for each but the first the inputs'.
  """

  sizes: tuple[int, ...]  # inputs, hidden layers, outputs (logits and value together)
  num_envs: int
  unroll: int
  separate_values: bool  # PPO: values first, the gradient without the last timestep

  @property
  def flops(self) -> int:
    forward = 2 * sum(i * o for i, o in zip(self.sizes, self.sizes[1:], strict=False))
    inputs = forward - 2 * self.sizes[0] * self.sizes[1]  # the gradients of layers' inputs
    steps, all_steps = self.unroll * self.num_envs, (self.unroll + 1) * self.num_envs
    learned = steps if self.separate_values else all_steps
    extra = forward * all_steps if self.separate_values else 0
    return forward * steps + extra + (2 * forward + inputs) * learned

  def program(self) -> Any:
    """(weights, observations, updates) -> weights, jitted; each product depends on the last."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    learned = self.num_envs * (self.unroll + (0 if self.separate_values else 1))
    tiny = 1e-12  # ties a product to the one before it; costs one pass over its input

    def forward(weights: list[Any], x: Any) -> list[Any]:
      layers = [x]
      for w in weights:
        layers.append(layers[-1] @ w)
      return layers

    def update(_: Any, carry: Any) -> Any:
      weights, x = carry

      def act(x: Any, _: Any) -> Any:
        y = forward(weights, x)[-1]
        return x + tiny * y[:, :1], None

      first, _ = lax.scan(act, x[: self.num_envs], None, length=self.unroll)
      x = lax.dynamic_update_slice(x, first, (0, 0))
      if self.separate_values:
        x = x + tiny * forward(weights, x)[-1][:, :1]
      layers = forward(weights, x[:learned])
      g = layers.pop()
      grads = []
      for i in reversed(range(len(weights))):
        grads.append(layers[i].T @ g)
        if i:
          g = g @ weights[i].T
      weights = [w + tiny * g for w, g in zip(weights, reversed(grads), strict=True)]
      return weights, x

    def run(weights: list[Any], x: Any, updates: Any) -> Any:
      return lax.fori_loop(0, updates, update, (weights, x))

    keys = jax.random.split(jax.random.key(0), len(self.sizes))
    shapes = zip(self.sizes, self.sizes[1:], strict=False)
    self_weights = [
      jax.random.normal(k, s) / math.sqrt(s[0]) for k, s in zip(keys[1:], shapes, strict=True)
    ]
    x = jax.random.normal(keys[0], ((self.unroll + 1) * self.num_envs, self.sizes[0]))
    compiled = jax.jit(run).lower(self_weights, x, jnp.int32(1)).compile()
    return lambda updates: compiled(self_weights, x, jnp.int32(updates))


def measure(
  name: str, agent: Any, num_envs: int, repeats: int, seconds: float = 2.0
) -> dict[str, Any]:
  """Steps/s of one variant, and the share of bare products in it, taken in turn."""
  from podrace import envs

  env = envs.make('podrace:catch')
  run = common.start(common.bind(agent, env, 0), env, num_envs, UNROLL)
  observation = math.prod(env.observation_space.shape)
  sizes = (observation, *HIDDEN, int(env.action_space.n) + 1)
  products = Products(sizes, num_envs, UNROLL, separate_values=name == 'ppo')
  bare = products.program()
  updates = common.updates_for(run.seconds, seconds)
  took: dict[str, list[float]] = {'podrace': [], 'products': []}
  common.timed(lambda: bare(updates))
  for _ in range(repeats):
    took['podrace'].append(run.seconds(updates))
    took['products'].append(common.timed(lambda: bare(updates))[0])
  ours, theirs = (statistics.median(v) / updates for v in took.values())
  return dict(
    num_envs=num_envs,
    steps_per_s=common.summary([updates * run.steps_per_update / s for s in took['podrace']]),
    update_ms=ours * 1e3,
    products_ms=theirs * 1e3,
    products_share=theirs / ours,
    mflop_per_update=products.flops / 1e6,
    products_gflop_per_s=products.flops / theirs / 1e9,
    update_gflop_per_s=products.flops / ours / 1e9,
    compile_s=run.compile_s,
    updates_per_call=updates,
  )


def measure_all(num_envs: int = NUM_ENVS, repeats: int = 5) -> dict[str, Any]:
  """Both variants."""
  results = {}
  for name, agent in agents().items():
    r = results[name] = measure(name, agent, num_envs, repeats)
    print(
      f'{name}, {num_envs} environments: {r["steps_per_s"]["median"]:,.0f} steps/s, '
      f'{r["update_ms"]:.2f} ms an update, bare products {r["products_ms"]:.2f} ms '
      f'({r["products_share"]:.0%}, {r["products_gflop_per_s"]:.0f} GFLOP/s)',
      flush=True,
    )
  return results


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=5)
  args = parser.parse_args()
  common.record('catch_podracer', measure_all(repeats=args.repeats))


if __name__ == '__main__':
  main()
