"""`podrace plan`: its one constant, its error on recorded runs, and published costs made again from assumptions.

`recorded` takes stages and whole runs of Sebulba that other benchmarks measured (results/sebulba.json, results/gpu.json:
two machines). HANDOVER is fitted on FITTED; all other runs are predicted from the rates of their stages alone.
`published` computes the cost of a paper's run from its rate and machines, and prices that are assumptions of ours, as
printed; and the figures of `podrace plan` for SEED with the rates measured here.

Writes benchmarks/results/plan.json. No run on several machines was predicted and then measured.
"""

from __future__ import annotations

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


def recorded_runs() -> dict[str, dict[str, Any]]:
  """Returns the runs of other benchmarks that have rates of their stages and of the whole."""
  return {
    f'{name}: {case.removeprefix("sebulba ")}': one
    for name in ('sebulba', 'gpu')
    for case, one in common.known(name).items()
    if 'combined' in one.get('rates', {})
  }


def rates_of(one: dict[str, Any]) -> Rates:
  """Returns the medians, as `podrace bench` prints rates."""
  args = one['args']
  sizes = dict(
    num_envs=int(args[len(args) - args[::-1].index('--num-envs')]),
    threads=len(one['actor_time_by_thread']), bytes=one['bytes'],
    unroll_length=int(args[args.index('--unroll-length') + 1])
    if '--unroll-length' in args else podrace.configure(args[0]).unroll_length,
  )  # fmt: skip
  return Rates.from_bench({k: v['median'] for k, v in one['rates'].items()} | sizes)


def handover(one: dict[str, Any]) -> float:
  """Returns the seconds of a batch that its stages do not explain."""
  r = rates_of(one)
  stages = 1 / r.environment + 1 / r.inference + 1 / r.learner
  return (1 / one['rates']['combined']['median'] - stages) * r.batch


def recorded() -> dict[str, Any]:
  """Returns the errors of predictions, relative to the measured rates."""
  runs, rows = recorded_runs(), {}
  fitted = statistics.mean(handover(runs[name]) for name in FITTED)
  for name, one in runs.items():
    measured = one['rates']['combined']['median']
    predicted = capacity.one_machine(rates_of(one)).steps_per_s
    rows[name] = dict(measured=measured, predicted=predicted, error=predicted / measured - 1, fitted=name in FITTED)  # fmt: skip
    print(f'{name:<52} {measured:>12,.0f} {predicted:>12,.0f} {predicted / measured - 1:+.0%}')
  errors = [abs(r['error']) for r in rows.values() if not r['fitted']]
  near = sum(error <= NEAR for error in errors)
  print(f'handover {fitted * 1e6:.0f} us; {near} of {len(errors)} within {NEAR:.0%}', flush=True)
  return dict(handover_s=fitted, runs=rows, within=near, of=len(errors))


def published() -> dict[str, Any]:
  """Returns the costs of papers' runs, and SEED's rates here."""
  rows = {}
  for name, (rate, tpus, cpus, price, frames, paper) in PUBLISHED.items():
    hours = frames / rate / 3600
    dollars = hours * (tpus * price + cpus * CPU_CORE)
    rows[name] = dict(frames_per_s=rate, tpu_cores=tpus, cpu_cores=cpus, frames=frames, hours=hours, dollars=dollars, paper=paper)  # fmt: skip
    print(f'{name:<40} {hours:8.2f} h  ${dollars:8.2f}  (paper: {paper})')
  prices = dict(tpu_core=TPU_CORE, preemptible_tpu_core=PREEMPTIBLE_TPU_CORE, cpu_core=CPU_CORE)
  return dict(prices=prices, runs=rows, seed=seed())


def seed() -> list[dict[str, Any]]:
  """Returns SEED's rates with Pong: all speeds from gpu.json; 16 cores a machine."""
  rates, rows = rates_of(recorded_runs()['gpu: pong']), []
  for n in (1, 4, 16, 64):
    for gbits in (10.0, 100.0):
      one = capacity.seed(rates, rates, Machines(n, gbits))
      rows.append(dict(machines=n, gbits=gbits, steps_per_s=one.steps_per_s, waits_for=one.waits_for, limits=dict(one.limits)))  # fmt: skip
      print(f'{n} machines, {gbits:.0f} Gbit/s: {one.steps_per_s:,.0f} steps/s, waits for {one.waits_for}')  # fmt: skip
  return rows


def main() -> None:
  cases = {'recorded': recorded, 'published': published}
  for case in common.arguments(__doc__, cases).cases:
    common.keep('plan', case, cases[case]())


if __name__ == '__main__':
  main()
