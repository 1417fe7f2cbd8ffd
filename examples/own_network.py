"""Networks of one's own: IMPALA learns Catch with one from Equinox, then with one from Flax NNX.

An agent asks of a network the functions and the two descriptions in `podrace.networks.Network`,
over a plain pytree of arrays. A library's module is split once into arrays and static
parts, here in the constructor; nothing of the library is left inside the loop but its layers.

    python examples/own_network.py
"""

from __future__ import annotations

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

from podrace import distributions, topology
from podrace.agents.impala import Impala
from podrace.architectures.anakin import Anakin
from podrace.envs import make
from podrace.networks import PolicyValue, unroll_merged
from podrace.replay import on_policy
from podrace.types import Array, Environment, TimeStep


class FeedForward:
  """Common to both networks: no state, and the spaces of an environment."""

  def __init__(self, env: Environment):
    self.distribution = distributions.for_space(env.action_space)
    self.shape = env.observation_space.shape

  def example(self) -> TimeStep:
    zeros = jnp.zeros([1, *self.shape])
    return TimeStep(zeros, jnp.zeros([1]), jnp.ones([1]), jnp.zeros([1], jnp.int8))

  def initial_state(self, batch_size: int) -> Any:
    del batch_size
    return ()

  def unroll(self, params: Any, state: Any, timesteps: TimeStep) -> tuple[PolicyValue, Any]:
    return unroll_merged(self, params, state, timesteps)


class EquinoxNetwork(FeedForward):
  """A perceptron of one hidden layer: its parameters are the module's arrays."""

  def __init__(self, env: Environment):
    super().__init__(env)
    self.static = eqx.partition(self.module(jax.random.key(0)), eqx.is_array)[1]

  def module(self, key: Array) -> eqx.nn.MLP:
    return eqx.nn.MLP(
      math.prod(self.shape), self.distribution.size + 1, width_size=64, depth=1, key=key
    )

  def init(self, key: Array) -> Any:
    return eqx.filter(self.module(key), eqx.is_array)

  def step(self, params: Any, state: Any, timestep: TimeStep) -> tuple[PolicyValue, Any]:
    x = timestep.observation.reshape(timestep.reward.shape[0], -1)
    out = jax.vmap(eqx.combine(params, self.static))(x)
    return PolicyValue(out[:, :-1], out[:, -1]), state


class Model(nnx.Module):
  """A hidden layer and two heads, as one writes them in NNX."""

  def __init__(self, shape: tuple[int, ...], num_actions: int, rngs: nnx.Rngs):
    self.hidden = nnx.Linear(math.prod(shape), 64, rngs=rngs)
    self.policy = nnx.Linear(64, num_actions, rngs=rngs)
    self.value = nnx.Linear(64, 1, rngs=rngs)

  def __call__(self, x: Array) -> PolicyValue:
    x = nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))
    return PolicyValue(self.policy(x), self.value(x)[..., 0])


class NnxNetwork(FeedForward):
  """The same around an NNX module: its parameters are its state, as a plain dict."""

  def __init__(self, env: Environment):
    super().__init__(env)
    self.graph = nnx.graphdef(self.module(jax.random.key(0)))

  def module(self, key: Array) -> Model:
    return Model(self.shape, self.distribution.size, nnx.Rngs(key))

  def init(self, key: Array) -> Any:
    return nnx.to_pure_dict(nnx.state(self.module(key), nnx.Param))

  def step(self, params: Any, state: Any, timestep: TimeStep) -> tuple[PolicyValue, Any]:
    return nnx.merge(self.graph, params)(timestep.observation), state


def train(network_class: type[FeedForward], updates: int = 300) -> float:
  """The mean return of the last hundred updates' episodes."""
  env = make('podrace:catch')
  agent = Impala(network=network_class(env), learning_rate=3e-3)
  run = Anakin(agent, env, on_policy(), topology.learner_mesh(1), num_envs=64, unroll_length=10)
  state = run.init(jax.random.split(jax.random.key(0), 1))
  _, state = run.read_log(run.run(state, jnp.int32(updates - 100)))
  log, _ = run.read_log(run.run(state, jnp.int32(100)))
  return float(log['return_sum'] / log['episodes'])


def main() -> None:
  for network in (EquinoxNetwork, NnxNetwork):
    print(f'{network.__name__}: mean return {train(network):.2f}')


if __name__ == '__main__':
  main()
