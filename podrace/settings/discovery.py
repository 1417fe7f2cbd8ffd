"""The settings of a run of meta-training, and their checks."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax.numpy as jnp

from podrace.agents.rules import storage
from podrace.architectures.discovery.objective import ValueFunction
from podrace.envs.libraries import LIBRARIES
from podrace.errors import UsageError
from podrace.fields import EnvName, check_types
from podrace.hooks import learns_from_replay
from podrace.settings.agents import agent_name
from podrace.settings.config import Basics
from podrace.settings.validation import check_at_least, check_basics, check_numbers, library_of

RULES = {
  'disco': 'podrace.agents.rules.disco',
  'lpg': 'podrace.agents.rules.lpg',
}  # agent -> the rules it learns by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discovery(Basics):
  """All settings of one meta-training run, recorded as config.json. Updates are meta-steps."""

  env: EnvName = 'podrace:catch,rows=5,columns=5'
  # ^ LIB:NAME, with options after commas; more names after spaces, each for a group of agents
  num_envs: int = 32  # environments of each agent
  total_steps: int = 1_000_000  # environment steps of all agents together
  rule: Any  # the widths of the rule's layers; its fields are --rule.FIELD
  value: ValueFunction = ValueFunction()
  agents: int = 2  # agents of each group, over all devices
  widths: tuple[int, ...] = ()
  # ^ layer widths of agents' networks, each for a group; none: --agent.network.hidden
  agent_updates: int = 2  # updates of an agent that a meta-gradient passes through (K)
  lifetime: int = 1_000  # updates of an agent before it starts anew
  replayed: int = 0  # replayed windows in each batch, besides the num_envs newest
  capacity: int = 10_000  # environment steps in an agent's replay, if it has one
  meta_learning_rate: float = 1e-3  # learning rate of the rule
  meta_optimizer: Literal['each', 'mean'] = 'each'
  # ^ each: mean of Adam steps, one for each agent; mean: one Adam step of the mean meta-gradient
  max_meta_update: float = 1.0
  # ^ limit of each element of a meta-update, before the learning rate; 0: no limit
  entropy_cost: float = 0.01  # weight of the entropy of agents' policies in the meta-loss
  regularization: float = 1.0  # weight of the rule's regularisers, relative to its paper

  @property
  def groups(self) -> list[tuple[str, int | None]]:
    """The environment and the layer width of each group."""
    return [(env, width) for env in self.env.split() for width in self.widths or (None,)]

  @property
  def steps_per_update(self) -> int:
    """Environment steps of one meta-step."""
    agents = len(self.groups) * self.agents
    return agents * self.num_envs * self.unroll_length * (self.agent_updates + 1)


def rules_of(agent: Any) -> Any:
  """Return the module of an agent's rules, which has `Sizes`, `init` and `REGULARISERS`.

  Raises:
    UsageError: if the agent does not learn by a rule.
  """
  name = agent_name(agent)
  if name not in RULES:
    raise UsageError(
      f'{name} learns by no rule that can be trained: take --agent {" or ".join(RULES)}'
    )
  return importlib.import_module(RULES[name])


def validate(config: Discovery) -> None:
  """Raise UsageError for settings that are invalid, or contradict each other."""
  try:
    check_types(config)
  except ValueError as e:
    raise UsageError(str(e)) from e
  rules = rules_of(config.agent)
  if not isinstance(config.rule, rules.Sizes):
    raise UsageError(f'rule is {config.rule!r}, expected {rules.__name__}.Sizes(...)')
  for name in ('agent', 'rule', 'value'):
    check_numbers(getattr(config, name), name)
  check_at_least(config.rule, 1, *(f.name for f in dataclasses.fields(config.rule)))
  storage.check_fits('that is to be learned', config.agent.fits(config.rule))
  if not config.env.split():
    raise UsageError('--env needs the name of an environment, LIB:NAME')
  check_at_least(config, 1, 'agents', 'agent_updates', 'lifetime', 'capacity')
  check_basics(config)
  check_at_least(config, 0, 'replayed', 'max_meta_update')
  for complaint in _complaints(config):
    raise UsageError(complaint)


def _complaints(config: Discovery) -> Iterator[str]:
  for env in config.env.split():
    if library_of(env) not in LIBRARIES:
      yield f'{env} is not in JAX, and meta-training needs a library of {", ".join(LIBRARIES)}'
  if config.widths and min(config.widths) < 1:
    yield f'--widths must be at least 1, not {min(config.widths)}'
  if config.widths and not config.agent.network.hidden:
    yield '--widths are of the layers of --agent.network.hidden, of which there are none'
  if config.lifetime < config.agent_updates:
    yield f'--lifetime {config.lifetime} is less than --agent-updates {config.agent_updates}'
  if config.replayed and not learns_from_replay(config.agent):
    yield f'--replayed {config.replayed}: {agent_name(config.agent)} has no replay'
  if config.meta_learning_rate <= 0:
    yield f'--meta-learning-rate must be more than 0, not {config.meta_learning_rate:g}'
  if config.seed >= 2**32:
    yield f'--seed must be less than 2^32, not {config.seed}'
  for name in ('meta_learning_rate', 'max_meta_update', 'entropy_cost', 'regularization'):
    if not math.isfinite(getattr(config, name)):
      yield f'--{name.replace("_", "-")} must be a finite number, not {getattr(config, name)}'


def first_rule(config: Discovery) -> Callable[[Any], Any]:
  """Return a function from a PRNG key to the rule that meta-training starts with.

  The rule is untrained, or that of --agent.rule.

  Raises:
    UsageError: if the file's rule does not have the widths of --rule.
  """
  rules = rules_of(config.agent)
  if not config.agent.rule:
    return functools.partial(rules.init, sizes=config.rule)
  params = config.agent.params()
  if (widths := rules.Sizes.of(params)) != config.rule:
    raise UsageError(
      f'the rule {config.agent.rule} has the widths {widths}, not {config.rule} of --rule'
    )
  return lambda key: {name: jnp.asarray(x) for name, x in params.items()}
