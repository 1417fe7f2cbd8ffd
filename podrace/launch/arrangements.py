"""Ready-made programs: who acts, who remembers and who learns, for a run given as for `podrace train`.

  seed       a learner that infers for everybody, and processes of environments (SEED RL)
  impala     a queue of unrolls, acting processes that fill it, a learner that empties it (IMPALA)
  apex       a replay service, acting processes that write to it, a learner that samples (Ape-X, R2D2)
  reanalyse  as apex, and processes that search the past again (MuZero Reanalyse)
  learners   processes that learn as one, each with environments of its own (Podracer's replicated Sebulba)

An arrangement is a function from what was asked for to a Program. It adds nothing to an agent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from podrace.errors import UsageError
from podrace.hooks import learns_from_replay
from podrace.launch.program import Node, Program, literal
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.system.options import value_of

# The same for all processes.
SHARED = ('--agent', '--env', '--num-envs', '--unroll-length')
OF_ACTING = (
  '--actor-devices', '--actor-threads', '--env-batch-size', '--env-deadline', '--env-threads', '--max-lag',
)  # fmt: skip
NOWHERE = 'tcp://127.0.0.1:*'  # of a learner that does not listen
OF_ALL = ('--no-compile-cache', '--quiet')


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
  """A run, and how many processes are to share it."""

  config: Config  # what the arguments amount to
  preset: str | None
  arguments: tuple[str, ...]  # of `podrace train`, for that run
  run_dir: str
  actors: int = 2
  shards: int = 1  # of the replay service
  reanalysers: int = 1
  learners: int = 1  # processes that learn as one
  keyed: bool = False  # on several machines: what listens, and what connects, has keys
  learners_insecure: bool = False  # learners may be on several machines, though they have none

  def __post_init__(self) -> None:
    for name in ('actors', 'shards', 'reanalysers', 'learners'):
      if getattr(self, name) < 1:
        raise UsageError(f'--{name} must be at least 1, not {getattr(self, name)}')
    if self.config.num_envs % self.actors:
      raise UsageError(
        f'--num-envs {self.config.num_envs} does not divide over --actors {self.actors}'
      )

  def demand(self, arrangement: str, **needed: str) -> None:
    """Raises UsageError if other options are given than an arrangement has."""
    for name, value in needed.items():
      given = value_of(f'--{name}', self.arguments)
      if given not in (None, value):
        raise UsageError(f'--as {arrangement} is --{name} {value}, not {given}; leave it out')
    if self.config.seeds > 1:
      raise UsageError(f'--seeds {self.config.seeds}: several seeds are one program, without --as')

  @property
  def keys(self) -> tuple[str, ...]:
    """The options of a process that connects or listens."""
    return ('--keys', '{keys}') if self.keyed else ()

  def command(self, name: str, *more: str, only: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """podrace NAME [PRESET] and the arguments, or `only` some of them and those of the agent; and more."""
    preset = () if self.preset is None else (self.preset,)
    given = self.arguments if only is None else tuple(some(self.arguments, only))
    return ('podrace', name, *preset, *map(literal, given), *more)


def some(arguments: tuple[str, ...], names: tuple[str, ...], of_agent: bool = True) -> list[str]:
  """Those options with their values, and the agent's fields."""
  found: list[str] = []
  taken = False
  for argument in arguments:
    if argument.startswith('--'):
      name = argument.partition('=')[0].replace('_', '-')
      taken = name in names or (of_agent and name.startswith('--agent.'))
    if taken:
      found.append(argument)
  return found


def seed(asked: LaunchRequest) -> Program:
  """SEED RL (Espeholt et al. 2020, arXiv 1910.06591): other processes have environments only."""
  config = asked.config
  if not config.env.startswith(('ale:', 'envpool:', 'gymnasium:')):
    raise UsageError(
      f'--as seed: {config.env} is an environment in JAX, which stays with the learner; '
      'give one of ale, envpool or gymnasium'
    )
  asked.demand('seed', envs='remote', lag='async', architecture='sebulba')
  if learns_from_replay(config.agent) and config.replay != 'host':
    raise UsageError(f'--as seed: {agent_name(config.agent)} learns from replay; add --replay host')
  if (each := config.num_envs // asked.actors) % asked.learners:
    raise UsageError(
      f'--num-envs {config.num_envs}: the {each} of each of --actors {asked.actors} do not divide over '
      f'--learners {asked.learners}'
    )
  learners = tuple(_learners(asked, asked.command('train', '--envs', 'remote'), ('envs',), True))
  more = some(asked.arguments, ('--env-deadline', '--quiet'), of_agent=False)
  envs = (
    'podrace', 'envs', '--connect', ','.join(f'{{{node.name}}}' for node in learners), '--env', literal(config.env),
    *asked.keys, *map(literal, more), '--num-envs', str(each),
  )  # fmt: skip
  return Program((*learners, Node('envs', envs, asked.actors)))


def impala(asked: LaunchRequest) -> Program:
  """IMPALA (Espeholt et al. 2018, arXiv 1802.01561): unrolls in a queue, each learned from once."""
  if learns_from_replay(asked.config.agent):
    raise UsageError(
      f'--as impala: {agent_name(asked.config.agent)} learns from replay; take --as apex'
    )
  return Program(_over_service('impala', asked))


def apex(asked: LaunchRequest) -> Program:
  """Ape-X (Horgan et al. 2018, arXiv 1803.00933): windows in prioritised replay."""
  if not learns_from_replay(asked.config.agent):
    raise UsageError(
      f'--as apex: {agent_name(asked.config.agent)} learns from each unroll once; take --as impala'
    )
  return Program(_over_service('apex', asked))


def reanalyse(asked: LaunchRequest) -> Program:
  """MuZero Reanalyse (Schrittwieser et al. 2021, arXiv 2104.06294): as apex, with newer targets."""
  if agent_name(asked.config.agent) != 'muzero':
    raise UsageError(
      f'--as reanalyse: {agent_name(asked.config.agent)} has no search; take --agent muzero'
    )
  at = ('--connect-replay', '{replay:all}', '--params', '{learner}', *asked.keys)
  command = asked.command('reanalyse', *at, only=(*SHARED, *OF_ALL))
  return Program(
    (*_over_service('reanalyse', asked), Node('reanalyse', command, asked.reanalysers))
  )


def learners(asked: LaunchRequest) -> Program:
  """Anakin or Sebulba over several processes (Hessel et al. 2021, arXiv 2104.06272).

  One that fails takes the others with it. All start again, and resume from the newest checkpoint.
  """
  asked.demand('learners', envs='local')
  return Program(tuple(_learners(asked, asked.command('train'))))


def _over_service(arrangement: str, asked: LaunchRequest) -> tuple[Node, ...]:
  """Replay, the learner and acting processes."""
  asked.demand(arrangement, replay='service', lag='async', envs='local', architecture='sebulba')
  replay = (
    'podrace', 'replay', '--listen', '{listen}', '--announce', '{announce}',
    '--dir', '{dir}/replay-{replica}', '--checkpoint-every', '60',
    *asked.keys, *some(asked.arguments, ('--quiet',), of_agent=False),
  )  # fmt: skip
  at = ('--connect-replay', '{replay:all}')
  learner = asked.command('train', '--replay', 'service', '--lag', 'async', *at)
  actors = asked.command(
    'act', *at, *asked.keys, '--params', '{learner}',
    '--local-envs', str(asked.config.num_envs // asked.actors),
    only=(*SHARED, *OF_ACTING, *OF_ALL),
  )  # fmt: skip
  return (
    Node('replay', replay, asked.shards, listens=('replay',)),
    *_learners(asked, learner, ('params',)),
    Node('act', actors, asked.actors),
  )


def _learners(
  asked: LaunchRequest, command: tuple[str, ...], listens: tuple[str, ...] = (), each: bool = False
) -> Iterator[Node]:
  """Processes that learn as one, the first of which listens, or each."""
  several = asked.learners > 1
  if asked.learners_insecure and not several:
    raise UsageError('--learners-insecure: of --learners N, which is 1')
  if several and asked.keyed and not asked.learners_insecure:
    raise UsageError(
      f'--learners {asked.learners} on several machines: JAX connects learners without keys and in plain text, so all who '
      'reach their network can read and disturb it; give --learners-insecure if it is yours alone'
    )
  for i in range(asked.learners):
    more: tuple[str, ...] = ()
    if several:
      more = (
        '--coordinator', '{coordinator}', '--num-processes', str(asked.learners), '--process-id', str(i),
      )  # fmt: skip
    own = listens if i == 0 or each else ()
    if own:
      more += _listening(asked)
    elif listens:  # only the first one listens, but all connect
      more += ('--listen', NOWHERE, *asked.keys)
    elif several and i == 0:
      more += ('--announce', '{announce}')
    words = (*command, *more, '--run-dir', literal(asked.run_dir))
    yield Node(f'learner-{i}' if i else 'learner', words, listens=own, main=i == 0)


def _listening(asked: LaunchRequest) -> tuple[str, ...]:
  return ('--listen', '{listen}', '--announce', '{announce}', *asked.keys)


ARRANGEMENTS: dict[str, Callable[[LaunchRequest], Program]] = {
  'seed': seed,
  'impala': impala,
  'apex': apex,
  'reanalyse': reanalyse,
  'learners': learners,
}
