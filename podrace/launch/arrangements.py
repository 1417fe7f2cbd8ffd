"""Ready-made programs for a run that is described as for `podrace train`.

  seed       a learner that infers for all environments, which are in other processes (SEED RL)
  impala     a queue of unrolls, acting processes that fill it, a learner that empties it (IMPALA)
  apex       a replay service, acting processes that write to it, a learner that samples (Ape-X)
  reanalyse  as apex, and processes that search the past again (MuZero Reanalyse)
  qtopt      as apex, and processes that compute the targets (Bellman updaters of QT-Opt)
  learners   processes that learn as one, each with its own environments (replicated Sebulba)

An arrangement is a function from a LaunchRequest to a Program. It adds nothing to an agent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from podrace.envs.libraries import HOST_LIBRARIES
from podrace.errors import UsageError
from podrace.hooks import can_refresh, labels_elsewhere, learns_from_replay
from podrace.launch.program import Node, Program, literal
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.system.options import value_of

SHARED = (  # options of all processes
  '--agent', '--allow-code', '--env', '--num-envs', '--unroll-length', '--log', '--log-share',
)  # fmt: skip
OF_ACTING = (  # options of acting processes
  '--actor-devices', '--actor-groups', '--actor-threads', '--env-batch-size', '--env-deadline',
  '--env-threads', '--max-lag',
)  # fmt: skip
NOWHERE = 'tcp://127.0.0.1:*'  # the address of a learner to which no process connects
OF_ALL = ('--no-compile-cache', '--quiet')


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
  """A run, and the numbers of its processes.

  Attributes:
    config: the config of the run.
    preset: its preset, None for the default one.
    arguments: its arguments of `podrace train`.
    run_dir: its directory.
    actors: the number of processes that act, or have environments.
    shards: the number of shards of the replay service.
    reanalysers: the number of processes that search again.
    labellers: the number of processes that compute targets.
    learners: the number of processes that learn as one.
    keyed: whether connections have keys, as on several machines.
    learners_insecure: whether learners may be on several machines, although they have no keys.
  """

  config: Config
  preset: str | None
  arguments: tuple[str, ...]
  run_dir: str
  actors: int = 2
  shards: int = 1
  reanalysers: int = 1
  labellers: int = 1
  learners: int = 1
  keyed: bool = False
  learners_insecure: bool = False

  def __post_init__(self) -> None:
    for name in ('actors', 'shards', 'reanalysers', 'labellers', 'learners'):
      if getattr(self, name) < 1:
        raise UsageError(f'--{name} must be at least 1, not {getattr(self, name)}')
    if self.config.num_envs % self.actors:
      raise UsageError(
        f'--num-envs {self.config.num_envs} does not divide over --actors {self.actors}'
      )

  def demand(self, arrangement: str, **needed: str) -> None:
    """Raise UsageError for options with other values than an arrangement has."""
    for name, value in needed.items():
      argument = value_of(f'--{name}', self.arguments)
      if argument not in (None, value):
        raise UsageError(f'--as {arrangement} is --{name} {value}, not {argument}; leave it out')
    if self.config.seeds > 1:
      raise UsageError(f'--seeds {self.config.seeds}: several seeds are one program, without --as')

  @property
  def keys(self) -> tuple[str, ...]:
    """The options for the keys of a process that connects or listens."""
    return ('--keys', '{keys}') if self.keyed else ()

  def command(
    self,
    name: str,
    *more: str,
    only: tuple[str, ...] | None = None,
    without: tuple[str, ...] = (),
  ) -> tuple[str, ...]:
    """Return the command podrace NAME [PRESET] with the arguments of the run, then `more`.

    Args:
      name: the name of the command.
      more: further words.
      only: the options to pass, besides the fields of the agent. None: all arguments.
      without: options that the command does not take.
    """
    preset = () if self.preset is None else (self.preset,)
    arguments = select_options(self.arguments, only, without=without)
    return ('podrace', name, *preset, *map(literal, arguments), *more)


def select_options(
  arguments: tuple[str, ...],
  names: tuple[str, ...] | None,
  of_agent: bool = True,
  without: tuple[str, ...] = (),
) -> list[str]:
  """Return the options `names` with their values, and with `of_agent` the fields of the agent.

  With None for `names`, return all options except `without`.
  """
  selected: list[str] = []
  taken = names is None
  for argument in arguments:
    if argument.startswith('--'):
      name = argument.partition('=')[0].replace('_', '-')
      taken = names is None or name in names or (of_agent and name.startswith('--agent.'))
      taken = taken and name not in without
    if taken:
      selected.append(argument)
  return selected


def seed(request: LaunchRequest) -> Program:
  """Return SEED RL (Espeholt et al. 2020, arXiv 1910.06591): environments in other processes."""
  config = request.config
  if config.env.partition(':')[0] not in HOST_LIBRARIES:
    raise UsageError(
      f'--as seed: {config.env} is an environment in JAX, which stays with the learner; '
      f'give one of {", ".join(HOST_LIBRARIES)}'
    )
  request.demand('seed', envs='remote', lag='async', architecture='sebulba')
  if learns_from_replay(config.agent) and config.replay != 'host':
    raise UsageError(f'--as seed: {agent_name(config.agent)} learns from replay; add --replay host')
  if (each := config.num_envs // request.actors) % request.learners:
    raise UsageError(
      f'--num-envs {config.num_envs}: the {each} of each of --actors {request.actors} do not '
      f'divide over --learners {request.learners}'
    )
  learners = tuple(
    _learners(request, request.command('train', '--envs', 'remote'), ('envs',), True)
  )
  more = select_options(request.arguments, ('--env-deadline', '--quiet'), of_agent=False)
  envs = (
    'podrace', 'envs', '--connect', ','.join(f'{{{node.name}}}' for node in learners),
    '--env', literal(config.env),
    *request.keys, *map(literal, more), '--num-envs', str(each),
  )  # fmt: skip
  return Program((*learners, Node('envs', envs, request.actors)))


def impala(request: LaunchRequest) -> Program:
  """Return IMPALA (Espeholt et al. 2018, arXiv 1802.01561): unrolls are learned from once."""
  if learns_from_replay(request.config.agent):
    raise UsageError(
      f'--as impala: {agent_name(request.config.agent)} learns from replay; take --as apex'
    )
  return Program(_over_service('impala', request))


def apex(request: LaunchRequest) -> Program:
  """Return Ape-X (Horgan et al. 2018, arXiv 1803.00933): windows in prioritised replay."""
  if not learns_from_replay(request.config.agent):
    raise UsageError(
      f'--as apex: {agent_name(request.config.agent)} learns from each unroll once; take --as '
      'impala'
    )
  return Program(_over_service('apex', request))


def reanalyse(request: LaunchRequest) -> Program:
  """Return MuZero Reanalyse (Schrittwieser et al. 2021, arXiv 2104.06294): newer targets."""
  agent = request.config.agent
  if labels_elsewhere(agent) or not can_refresh(agent):
    raise UsageError(
      f'--as reanalyse: {agent_name(agent)} has no targets to refresh; take --agent muzero'
    )
  return Program(
    (*_over_service('reanalyse', request), _stage('reanalyse', request, request.reanalysers))
  )


def qtopt(request: LaunchRequest) -> Program:
  """Return QT-Opt (Kalashnikov et al. 2018, arXiv 1806.10293): the targets have a stage.

  Acting processes also replay a log, if there is one. Bellman updaters make labels, on which the
  learner regresses.
  """
  if not hasattr(request.config.agent, 'labels'):
    raise UsageError(
      f'--as qtopt: {agent_name(request.config.agent)} computes its own targets; take --agent qtopt'
    )
  request.demand('qtopt', **{'agent.labels': 'stage'})
  if value_of('--agent.labels', request.arguments) is None:
    arguments = (*request.arguments, '--agent.labels', 'stage')
    request = dataclasses.replace(request, arguments=arguments)
  return Program((*_over_service('qtopt', request), _stage('label', request, request.labellers)))


def _stage(name: str, request: LaunchRequest, count: int) -> Node:
  """Return the node of processes that compute targets for the learner."""
  at = ('--connect-replay', '{replay:all}', '--params', '{learner}', *request.keys)
  return Node(name, request.command(name, *at, only=(*SHARED, *OF_ALL)), count)


def learners(request: LaunchRequest) -> Program:
  """Return Anakin or Sebulba over several processes (Hessel et al. 2021, arXiv 2104.06272).

  If one of them fails, JAX aborts the rest. All start again, and resume from the newest checkpoint.
  """
  request.demand('learners', envs='local')
  return Program(tuple(_learners(request, request.command('train'))))


def _over_service(arrangement: str, request: LaunchRequest) -> tuple[Node, ...]:
  """Return the nodes of replay, the learner and acting processes."""
  request.demand(arrangement, replay='service', lag='async', envs='local', architecture='sebulba')
  agent = request.config.agent
  if learns_from_replay(agent) and select_options(
    request.arguments, ('--max-lag',), of_agent=False
  ):
    raise UsageError(
      f'--as {arrangement}: {agent_name(agent)} learns from replay, where --max-staleness bounds '
      'the lag; leave out --max-lag'
    )
  replay = (
    'podrace', 'replay', '--listen', '{listen}', '--announce', '{announce}',
    '--dir', '{dir}/replay-{replica}',
    *request.keys,
    *select_options(request.arguments, ('--peer-timeout', '--quiet'), of_agent=False),
  )  # fmt: skip
  at = ('--connect-replay', '{replay:all}')
  learner = request.command(
    'train', '--replay', 'service', '--lag', 'async', *at, without=('--actor-devices',)
  )
  actors = request.command(
    'act', *at, *request.keys, '--params', '{learner}',
    '--local-envs', str(request.config.num_envs // request.actors),
    only=(*SHARED, *OF_ACTING, *OF_ALL),
  )  # fmt: skip
  return (
    Node('replay', replay, request.shards, listens=('replay',)),
    *_learners(request, learner, ('params',)),
    Node('act', actors, request.actors),
  )


def _learners(
  request: LaunchRequest,
  command: tuple[str, ...],
  listens: tuple[str, ...] = (),
  each: bool = False,
) -> Iterator[Node]:
  """Yield the nodes of processes that learn as one.

  The first one listens, with `each` all of them.
  """
  several = request.learners > 1
  if request.learners_insecure and not several:
    raise UsageError('--learners-insecure: of --learners N, which is 1; leave it out')
  if several and request.keyed and not request.learners_insecure:
    raise UsageError(
      f'--learners {request.learners} on several machines: JAX connects learners without keys and '
      'in plain text, so everyone with access to their network can read and disturb it; give '
      '--learners-insecure if it is yours alone'
    )
  for i in range(request.learners):
    more: tuple[str, ...] = ()
    if several:
      more = (
        '--coordinator', '{coordinator}', '--num-processes', str(request.learners),
        '--process-id', str(i),
      )  # fmt: skip
    own = listens if i == 0 or each else ()
    if own:
      more += ('--listen', '{listen}', '--announce', '{announce}', *request.keys)
    elif listens:  # only the first one listens, but all connect
      more += ('--listen', NOWHERE, *request.keys)
    elif several and i == 0:
      more += ('--announce', '{announce}')
    words = (*command, *more, '--run-dir', literal(request.run_dir))
    yield Node(f'learner-{i}' if i else 'learner', words, listens=own, main=i == 0)


ARRANGEMENTS: dict[str, Callable[[LaunchRequest], Program]] = {
  'seed': seed,
  'impala': impala,
  'apex': apex,
  'reanalyse': reanalyse,
  'qtopt': qtopt,
  'learners': learners,
}
