"""`podrace plan`: its one constant, its error on recorded runs, and published costs made again from printed assumptions.

    python benchmarks/plan.py [recorded] [published]

`recorded` takes stages and whole runs of Sebulba that other benchmarks measured (results/sebulba.json, results/gpu.json:
two machines). HANDOVER is fitted on FITTED; all others are predicted from the rates of their stages alone.
`published` computes what a run of a paper would have cost from that paper's rate and machines, and prices that are
assumptions of ours, as printed; and what `podrace plan` says of SEED with the rates measured here.

Writes benchmarks/results/plan.json. No run on several machines was predicted and then measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import common

import podrace
from podrace.launch import capacity
from podrace.launch.capacity import Machines, Rates

FITTED = ('sebulba: envpool-cartpole', 'sebulba: envpool-cartpole, 1 thread')
NEAR = 0.15
# Dollars an hour. Assumed, not looked up: of the time of the papers, on demand.
TPU_CORE, CPU_CORE = 1.0, 0.0475
PREEMPTIBLE_TPU_CORE = 0.36  # which makes Podracer's $2.88 an hour of 8 cores
# name: frames/s, cores of TPUs, cores of CPUs, dollars for an hour of a core of TPUs, frames, as the paper has it
PUBLISHED = {
  'Podracer, Sebulba V-trace on Atari': (200e6 / 3600, 8, 0, PREEMPTIBLE_TPU_CORE, 200e6, '$2.88, 1 h'),
  'Podracer, Sebulba MuZero on Atari': (200e6 / 9 / 3600, 16, 0, PREEMPTIBLE_TPU_CORE, 200e6, 'about $40, 9 h'),
  'Podracer, Anakin, meta-learning': (3e6, 16, 0, PREEMPTIBLE_TPU_CORE, 3e6 * 86400, 'about $100, 24 h'),
  'SEED, 64 cores of TPUs': (2.4e6, 64, 4160, TPU_CORE, 1e9, '$25 to $54'),
}  # fmt: skip


def recorded() -> dict[str, dict[str, Any]]:
  """The rates of stages, and the run itself, of what other benchmarks have measured."""
  found = {}
  for name in ('sebulba', 'gpu'):
    cases = json.loads((common.RESULTS / f'{name}.json').read_text())['results']
    for case, one in cases.items():
      if 'combined' in one.get('rates', {}):
        found[f'{name}: {case.removeprefix("sebulba ")}'] = one
  return found


def rates_of(one: dict[str, Any]) -> Rates:
  """As `podrace bench` prints them; medians."""
  args = one['args']
  num_envs = int(args[len(args) - 1 - args[::-1].index('--num-envs') + 1])
  threads = len(one['actor_time_by_thread'])
  medians = {k: v['median'] for k, v in one['rates'].items()}
  if '--unroll-length' in args:
    unroll = int(args[args.index('--unroll-length') + 1])
  else:
    unroll = podrace.configure(args[0]).unroll_length
  return Rates.from_bench(
    medians | dict(num_envs=num_envs, threads=threads, unroll_length=unroll, bytes=one['bytes'])
  )


def handover(one: dict[str, Any]) -> float:
  """Seconds of a batch that its stages do not explain."""
  r = rates_of(one)
  stages = 1 / r.environment + 1 / r.inference + 1 / r.learner
  return (1 / one['rates']['combined']['median'] - stages) * r.batch


def errors() -> dict[str, Any]:
  """Of predictions, relative to what was measured."""
  found = recorded()
  fitted = statistics.mean(handover(found[name]) for name in FITTED)
  rows = {}
  for name, one in found.items():
    measured = one['rates']['combined']['median']
    predicted = capacity.one_machine(rates_of(one)).steps_per_s
    rows[name] = dict(measured=measured, predicted=predicted, error=predicted / measured - 1, fitted=name in FITTED)  # fmt: skip
    print(f'{name:<52} {measured:>12,.0f} {predicted:>12,.0f} {predicted / measured - 1:+.0%}')
  others = [r for r in rows.values() if not r['fitted']]
  near = sum(abs(r['error']) <= NEAR for r in others)
  print(f'handover {fitted * 1e6:.0f} us; {near} of {len(others)} within {NEAR:.0%}', flush=True)
  return dict(handover_s=fitted, runs=rows, within=near, of=len(others))


def published() -> dict[str, Any]:
  """Costs of papers' runs, and of SEED here."""
  rows = {}
  for name, (rate, tpus, cpus, price, frames, said) in PUBLISHED.items():
    hours = frames / rate / 3600
    dollars = hours * (tpus * price + cpus * CPU_CORE)
    rows[name] = dict(frames_per_s=rate, tpu_cores=tpus, cpu_cores=cpus, frames=frames, hours=hours, dollars=dollars, paper=said)  # fmt: skip
    print(f'{name:<40} {hours:8.2f} h  ${dollars:8.2f}  (paper: {said})')
  return dict(
    prices=dict(tpu_core=TPU_CORE, preemptible_tpu_core=PREEMPTIBLE_TPU_CORE, cpu_core=CPU_CORE),
    runs=rows,
    seed=here(),
  )


def here() -> list[dict[str, Any]]:
  """SEED with Pong: the learner's rates from gpu.json, the environments' from there, too; 16 cores a machine."""
  rates = rates_of(recorded()['gpu: pong'])
  found = []
  for n in (1, 4, 16, 64):
    for gbits in (10.0, 100.0):
      one = capacity.seed(rates, rates, Machines(n, gbits))
      found.append(dict(machines=n, gbits=gbits, steps_per_s=one.steps_per_s, waits_for=one.waits_for, limits=dict(one.limits)))  # fmt: skip
      print(
        f'{n} machines, {gbits:.0f} Gbit/s: {one.steps_per_s:,.0f} steps/s, waits for {one.waits_for}'
      )
  return found


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('cases', nargs='*', help='recorded, published; none: both')
  cases = parser.parse_args().cases or ['recorded', 'published']
  path = common.RESULTS / 'plan.json'
  results = json.loads(path.read_text())['results'] if path.exists() else {}
  for case in cases:
    results[case] = {'recorded': errors, 'published': published}[case]()
  common.record('plan', results)


if __name__ == '__main__':
  main()
