"""Environments in C for tests: podrace's examples with one part replaced."""

from __future__ import annotations

from pathlib import Path

from podrace.envs.native.build import HERE

CARTPOLE = (HERE / 'examples' / 'cartpole.c').read_text(encoding='utf-8')

# Faults: the part of cartpole.c, and its replacement.
FAULTS = {
  'compiler': ('c->steps = 0;', 'c->steps = 0'),
  'symbol': ('void podrace_close(', 'static void closed('),
  'abi': ('.abi = PODRACE_ENV_ABI', '.abi = 2'),
  'obs_bytes': ('.obs_bytes = 4 *', '.obs_bytes = 3 *'),
  'act_bytes': ('.act_bytes = sizeof(int32_t)', '.act_bytes = sizeof(double)'),
  'dtype': ('.dtype = PODRACE_F32', '.dtype = 9'),
  'shape': ('.shape = {4}', '.shape = {0}'),
  'choices': ('actions[] = {2}', 'actions[] = {0}'),
  'no_save': ('int64_t podrace_save(', 'int64_t saved('),
  'save_size': ('  return sizeof(cartpole);', '  return 2 * sizeof(cartpole);'),
  'load': ('if (n != sizeof saved) return 1;', 'return 3;'),
  'half_saved': ('*c = saved;', 'memcpy(c, &saved, 24);'),
  'rand': ('c->steps++;', 'c->steps++, c->x += 1e-3 * rand() / RAND_MAX;'),
  'srand': ('c->steps = 0;', 'srand((unsigned)seed), c->steps = 0;'),  # with 'rand'
  'global': ('c->steps++;', 'static int calls; c->steps++, c->x += 1e-4 * calls++;'),
  'unwritten': ('obs[2] = (float)c->angle, ', ''),
  'left_over': ('  c->steps = 0;\n', ''),
  'crash': ('c->steps++;', 'if (++c->steps > 3) *(volatile int *)8 = 1;'),
  'late_crash': ('c->steps++;', 'c->steps++; static int calls; if (++calls > 2000) *(volatile int *)8 = 1;'),
  'exit': ('c->steps++;', 'if (++c->steps > 3) exit(5);'),
  'exit_0': ('c->steps++;', 'if (++c->steps > 3) exit(0);'),
  'bounds': ('.dtype = PODRACE_F32,', '.dtype = PODRACE_U8, .low = -1, .high = 1,'),
  'wide': ('.dtype = PODRACE_F32,', '.dtype = PODRACE_F32, .low = -1e300, .high = 1,'),
  'names': ('static const podrace_spec spec = {', f'static const char *const names[] = {{"{"a" * 9000}"}};'
            'static const podrace_spec spec = {.num_info = 1, .info = names,'),
  'late_exit_0': ('c->steps++;', 'c->steps++; static int calls; if (++calls > 2000) exit(0);'),
  'late_thread_exit_0': ('c->steps++;', 'c->steps++; static int calls; extern int pthread_create(unsigned long *, const void *, void *(*)(void *), void *); unsigned long thread; if (++calls == 2000) pthread_create(&thread, NULL, (void *(*)(void *))exit, NULL);'),
  'late_create': ('void *podrace_create(const char *options, char *error, size_t n) {', 'void *podrace_create(const char *options, char *error, size_t n) {\n  static int calls; if (++calls > 4) return snprintf(error, n, "no licence is left"), NULL;'),
  'load_exit_0': ('#include "podrace_env.h"', '#include "podrace_env.h"\n__attribute__((constructor)) static void run(void) { exit(0); }'),
  'load_crash': ('#include "podrace_env.h"', '#include "podrace_env.h"\n__attribute__((constructor)) static void run(void) { *(volatile int *)8 = 1; }'),
  'load_hang': ('#include "podrace_env.h"', '#include "podrace_env.h"\n__attribute__((constructor)) static void run(void) { for (volatile int i = 0;;) i++; }'),
  'spec_exit_0': ('  double max_steps;\n  return read_options', '  exit(0);\n  double max_steps;\n  return read_options'),
  'hang': ('c->steps++;', 'if (++c->steps > 3) { extern int pause(void); for (;;) pause(); }'),
  # A destructor waits in the child, as those of libraries do for threads that are not there.
  'destructor': ('#include "podrace_env.h"', '#include "podrace_env.h"\nstatic int is_child; extern int pause(void);\n__attribute__((destructor)) static void wait(void) { while (is_child) pause(); }'),
  'fork_exit': ('c->steps++;', 'c->steps++; extern int fork(void), waitpid(int, int *, int); extern unsigned alarm(unsigned); int status, child = fork(); if (!child) { is_child = 1; alarm(20); exit(0); } waitpid(child, &status, 0); if (status) c->x = 1000;'),
  'fork': ('c->steps++;', 'if (++c->steps > 3) { extern int fork(void), pause(void); fork(); for (;;) pause(); }'),
  'constructor': ('#include "podrace_env.h"', '#include "podrace_env.h"\n__attribute__((constructor)) static void run(void) { fclose(fopen("stranger.ran", "w")); }'),
}  # fmt: skip


def write(path: Path, *faults: str) -> str:
  """Writes cartpole.c with faults, and returns the name of the environment."""
  text = CARTPOLE
  for fault in faults:
    part, instead = FAULTS[fault]
    assert part in text, fault
    text = text.replace(part, instead)
  path.write_text(text, encoding='utf-8')
  return f'c:{path}'


# A tagged environment: its observation is [seed's low bits, step, last action, episode's
# length, flags at the end: 1 terminated, 2 truncated].
TAGGED = """
#include "podrace_env.h"
typedef struct { uint64_t seed; int32_t step, length, flags, pad; } tagged;
typedef struct { int8_t mask[5]; int32_t tag[5]; float copy[3]; } observation; /* with a gap */
static const int32_t choices[] = {5, 7};
const podrace_spec *podrace_spec_of(const char *options, char *error, size_t n) {
  static const podrace_array obs[3] = {
    {.name = "more", .dtype = PODRACE_I8, .ndim = 1, .shape = {5}},
    {.name = "tag", .dtype = PODRACE_I32, .ndim = 1, .shape = {5}},
    {.name = "copy", .dtype = PODRACE_F32, .ndim = 1, .shape = {3}}};
  static const podrace_array act = {.dtype = PODRACE_I32, .ndim = 1, .shape = {2}, .choices = choices};
  static const char *const info[] = {"length", "never"};
  static const podrace_spec spec = {.abi = PODRACE_ENV_ABI, .num_obs = 3, .num_info = 2, .obs = obs,
    .act = &act, .info = info, .obs_bytes = sizeof(observation), .act_bytes = 8,
    .state_bytes = sizeof(tagged)};
  return podrace_options(options, NULL, 0, error, n) ? NULL : &spec;
}
void *podrace_create(const char *options, char *error, size_t n) {
  return podrace_options(options, NULL, 0, error, n) ? NULL : calloc(1, sizeof(tagged));
}
static void show(const tagged *t, int32_t action, void *obs) {
  observation *o = obs;
  int32_t tag[5] = {(int32_t)(t->seed & 0x7FFFFFFF), t->step, action, t->length, t->flags};
  memcpy(o->tag, tag, sizeof tag);
  for (int i = 0; i < 3; i++) o->copy[i] = (float)(t->step * 10 + i);
  memset(o->mask, t->step % 100, 5);
}
void podrace_reset(void *env, uint64_t seed, void *obs) {
  tagged *t = env;
  t->seed = seed, t->step = 0, t->length = 3 + (int32_t)(seed % 60), t->flags = 1 + (int32_t)(seed / 60 % 3);
  show(t, -1, obs);
}
void podrace_step(void *env, const void *act, void *obs, podrace_result *r, float *info) {
  tagged *t = env;
  const int32_t *a = act;
  t->step++;
  r->reward = (float)t->step, r->score = (float)-t->step;
  r->terminated = t->step == t->length && t->flags & 1;
  r->truncated = t->step == t->length && t->flags & 2;
  if (t->step == t->length) info[0] = (float)t->length;
  show(t, 7 * a[0] + a[1], obs);
}
int64_t podrace_save(const void *env, void *bytes) { memcpy(bytes, env, sizeof(tagged)); return sizeof(tagged); }
int podrace_load(void *env, const void *bytes, int64_t n) { memcpy(env, bytes, (size_t)n); return n != sizeof(tagged); }
void podrace_close(void *env) { free(env); }
"""
