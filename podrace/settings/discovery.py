"""What a run of meta-training is made of."""

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
from podrace.settings.validation import at_least, check_basics, check_numbers, library_of

RULES = {
  'disco': 'podrace.agents.rules.disco',
  'lpg': 'podrace.agents.rules.lpg',
}  # agent -> the rules it learns by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discovery(Basics):
  """One run of meta-training, exactly; recorded as config.json. Its updates are meta-steps."""

  env: EnvName = 'podrace:catch,rows=5,columns=5'
  # ^ LIB:NAME, and options after commas; of several, with spaces between them, each has a group of agents
  num_envs: int = 32  # of each agent
  total_steps: int = 1_000_000  # environment steps, of all agents together
  rule: Any  # the widths of the rule's layers; its fields are --rule.FIELD
  value: ValueFunction = ValueFunction()
  agents: int = 2  # in each group, over all devices
  widths: tuple[int, ...] = ()
  # ^ of the layers of agents' networks, for each width a group; none: as --agent.network.hidden says
  agent_updates: int = 2  # K: updates of an agent that a meta-gradient goes through
  lifetime: int = 1_000  # updates of an agent, which then begins anew
  replayed: int = 0  # windows of the past in each batch, besides the num_envs newest ones
  capacity: int = 10_000  # environment steps that an agent's replay keeps, if there is one
  meta_learning_rate: float = 1e-3
  meta_optimizer: Literal['each', 'mean'] = 'each'
  # ^ Adam of each agent's meta-gradient and then their mean, or Adam of their mean
  max_meta_update: float = 1.0  # of each number of a step, before the learning rate; 0: no limit
  entropy_cost: float = 0.01  # of agents' policies, in the meta-loss
  regularization: float = 1.0  # of the rule, as a multiple of its paper's

  @property
  def groups(self) -> list[tuple[str, int | None]]:
    """The environment of each group, and its width."""
    return [(env, width) for env in self.env.split() for width in self.widths or (None,)]

  @property
  def steps_per_update(self) -> int:
    agents = len(self.groups) * self.agents
    return agents * self.num_envs * self.unroll_length * (self.agent_updates + 1)


def rules_of(agent: Any) -> Any:
  """The module of the rules that an agent learns by: it has `Sizes`, `init` and `REGULARISERS`.

  Raises:
    UsageError: if it learns by none.
  """
  name = agent_name(agent)
  if name not in RULES:
    raise UsageError(
      f'{name} learns by no rule that can be trained: take --agent {" or ".join(RULES)}'
    )
  return importlib.import_module(RULES[name])


def validate(config: Discovery) -> None:
  """Raises UsageError for settings that can't be right."""
  try:
    check_types(config)
  except ValueError as e:
    raise UsageError(str(e)) from e
  rules = rules_of(config.agent)
  if not isinstance(config.rule, rules.Sizes):
    raise UsageError(f'rule is {config.rule!r}, expected {rules.__name__}.Sizes(...)')
  for name in ('agent', 'rule', 'value'):
    check_numbers(getattr(config, name), name)
  at_least(config.rule, 1, *(f.name for f in dataclasses.fields(config.rule)))
  storage.check_fits('that is to be learned', config.agent.fits(config.rule))
  if not config.env.split():
    raise UsageError('--env needs the name of an environment, LIB:NAME')
  check_basics(config)
  at_least(config, 1, 'agents', 'agent_updates', 'lifetime', 'capacity')
  at_least(config, 0, 'replayed', 'max_meta_update')
  for complaint in _complaints(config):
    raise UsageError(complaint)


def _complaints(config: Discovery) -> Iterator[str]:
  for env in config.env.split():
    if library_of(env) not in LIBRARIES:
      yield f'{env} is no environment in JAX, which meta-training needs: there are {", ".join(LIBRARIES)}'
  if config.widths and min(config.widths) < 1:
    yield f'--widths must be at least 1, not {min(config.widths)}'
  if config.lifetime < config.agent_updates:
    yield (
      f'--lifetime {config.lifetime} is less than the --agent-updates {config.agent_updates} of one meta-step'
    )
  if config.replayed and not learns_from_replay(config.agent):
    yield f'--replayed {config.replayed}: {agent_name(config.agent)} learns from the newest unrolls alone'
  if config.meta_learning_rate <= 0:
    yield f'--meta-learning-rate must be more than 0, not {config.meta_learning_rate:g}'
  if config.seed >= 2**32:
    yield f'--seed must be less than 2^32, not {config.seed}'
  for name in ('meta_learning_rate', 'max_meta_update', 'entropy_cost', 'regularization'):
    if not math.isfinite(getattr(config, name)):
      yield f'--{name.replace("_", "-")} must be a finite number, not {getattr(config, name)}'


def first_rule(config: Discovery) -> Callable[[Any], Any]:
  """key -> the rule that meta-training begins with: an untrained one, or that of --agent.rule.

  Raises:
    UsageError: if the file is no rule of the widths of --rule.
  """
  rules = rules_of(config.agent)
  if not config.agent.rule:
    return functools.partial(rules.init, sizes=config.rule)
  params = config.agent.params()
  if (found := rules.Sizes.of(params)) != config.rule:
    raise UsageError(
      f'the rule {config.agent.rule} has the widths {found}, not {config.rule} of --rule'
    )
  return lambda key: {name: jnp.asarray(x) for name, x in params.items()}
