/* NAME: walk to the right end, as a start for an environment of your own in C.
 *
 * Its parts are explained in podrace_env.h and docs/own.md. podrace compiles this file on first use:
 *
 *     podrace train --env c:FILE.c --architecture sebulba
 *
 * By hand, for an editor or a debugger, with the directory of podrace_env.h:
 *
 *     cc -std=c99 -Wall -Wextra -g -shared -fPIC -I HEADER FILE.c -o FILE.so -lm
 */
#include "podrace_env.h"

typedef struct { /* all of the state; nothing is outside of it */
  podrace_rng rng;
  double length; /* an option */
  int32_t place, steps;
} walk;

static int read_options(const char *options, walk *w, char *error, size_t n) {
  podrace_option known[] = {{"length", &w->length, 2, 1000}};
  w->length = 8; /* the default */
  return podrace_options(options, known, 1, error, n);
}

const podrace_spec *podrace_spec_of(const char *options, char *error, size_t n) {
  static const int32_t actions[] = {2}; /* left, right */
  static const podrace_array obs = {
      .dtype = PODRACE_F32, .ndim = 1, .shape = {1}, .low = 0, .high = 1};
  static const podrace_array act = {.dtype = PODRACE_I32, .ndim = 0, .choices = actions};
  static const podrace_spec spec = {
      .abi = PODRACE_ENV_ABI, .num_obs = 1, .obs = &obs, .act = &act, .obs_bytes = sizeof(float),
      .act_bytes = sizeof(int32_t), .state_bytes = sizeof(walk)};
  walk unused;
  return read_options(options, &unused, error, n) ? NULL : &spec;
}

void *podrace_create(const char *options, char *error, size_t n) {
  walk *w = calloc(1, sizeof *w); /* calloc: the bytes between members are saved, too */
  if (w && read_options(options, w, error, n)) free(w), w = NULL;
  return w;
}

static void observe(const walk *w, float *obs) { obs[0] = (float)(w->place / w->length); }

void podrace_reset(void *env, uint64_t seed, void *obs) {
  walk *w = env;
  podrace_seed(&w->rng, seed);
  w->place = (int32_t)podrace_below(&w->rng, (uint32_t)(w->length / 2));
  w->steps = 0;
  observe(w, obs);
}

void podrace_step(void *env, const void *act, void *obs, podrace_result *result, float *info) {
  walk *w = env;
  (void)info; /* numbers for the log: num_info and info of the specification name them */
  w->place += *(const int32_t *)act == 1 ? 1 : -1;
  if (w->place < 0) w->place = 0;
  w->steps++;
  result->terminated = w->place >= w->length; /* there */
  result->truncated = w->steps >= 50;         /* late */
  result->reward = result->terminated ? 1 : 0;
  observe(w, obs);
}

int64_t podrace_save(const void *env, void *bytes) {
  memcpy(bytes, env, sizeof(walk));
  return sizeof(walk);
}

int podrace_load(void *env, const void *bytes, int64_t n) {
  walk *w = env, saved;
  if (n != sizeof saved) return 1;
  memcpy(&saved, bytes, sizeof saved); /* of a file that somebody else may have written */
  if (saved.length != w->length || saved.place < 0 || saved.steps < 0) return 1;
  *w = saved;
  return 0;
}

void podrace_close(void *env) { free(env); }
