/* An environment in C for podrace: the interface, and helpers for options and random numbers.
 *
 * C99, no dependencies. Include it in one .c file, define the functions below, and train:
 *
 *     podrace train --env c:my_env.c --architecture sebulba
 *
 * podrace compiles the file on first use by `cc -O3 -shared -fPIC -ffp-contract=off`. A library that
 * you compile yourself is `--env c:my_env.so`.
 *
 * Rules:
 *   - Environments share nothing. podrace steps different environments at the same time in several
 *     threads, so there are no variables outside of an environment, and no rand(). Only
 *     podrace_spec_of may use static memory.
 *   - All randomness is seeded by podrace_reset. Equal seeds and actions make equal bytes.
 *   - podrace resets. After a step with terminated or truncated set, podrace_reset comes next, and
 *     the observation of that step is the last one of its episode. If both flags are set, the episode
 *     has terminated.
 *   - podrace_reset and podrace_step write the whole observation. Its memory is another each time.
 *   - podrace_step and podrace_reset allocate no memory.
 */
#ifndef PODRACE_ENV_H
#define PODRACE_ENV_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PODRACE_ENV_ABI 1

#ifdef __cplusplus
#define PODRACE_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define PODRACE_EXPORT __attribute__((visibility("default")))
#endif

/* Types of elements. */
enum {
  PODRACE_U8 = 0,   /* uint8_t */
  PODRACE_I8 = 1,   /* int8_t */
  PODRACE_I32 = 2,  /* int32_t */
  PODRACE_F32 = 3,  /* float */
  PODRACE_BOOL = 4  /* uint8_t, 0 or 1 */
};

/* An array of an observation, or the action.
 *
 * A space is made of it: with `choices`, Discrete (ndim 0) or MultiDiscrete (ndim 1) of PODRACE_I32;
 * PODRACE_BOOL of ndim 1, MultiBinary; else Box. `low` and `high` are the bounds of a Box; if both
 * are 0, an integer has those of its type, and a float none. */
typedef struct {
  const char *name;       /* the entry of a Dict; NULL: the only array, which is no Dict */
  const int32_t *choices; /* the number of choices of each element; NULL: none */
  int64_t shape[8];
  double low, high;
  int32_t dtype, ndim;
} podrace_array;

/* An environment's spaces and sizes.
 *
 * Observations of several arrays are one C struct with the arrays as members, in order. So obs_bytes
 * is sizeof(that struct). An entry "action_mask" (PODRACE_BOOL or PODRACE_I8; 1: allowed) masks
 * actions. */
typedef struct {
  int32_t abi; /* PODRACE_ENV_ABI */
  int32_t num_obs, num_info;
  int32_t render_height, render_width; /* 0: there is no podrace_render */
  int32_t reserved;
  const podrace_array *obs;  /* [num_obs] */
  const podrace_array *act;  /* one */
  const char *const *info;   /* [num_info] names of the numbers for the log */
  int64_t obs_bytes, act_bytes;
  int64_t state_bytes; /* of podrace_save, at most; 0: no podrace_save and podrace_load */
} podrace_spec;

/* The result of a step. podrace sets all of it to 0, and score to NaN, before each step. */
typedef struct {
  float reward;       /* for learning */
  float score;        /* for reports, where rewards are clipped; NaN: the reward */
  uint8_t terminated; /* the episode is over, and there is nothing to come */
  uint8_t truncated;  /* the episode is cut, for example by a time limit */
  uint8_t pad[6];
} podrace_result;

/* --- functions of an environment ---------------------------------------------------------------- */

/* Returns the spaces with these options, valid until the next call; NULL with a text in `error` [n]
 * if an option is wrong. `options` is a JSON object, "{}" without options. */
PODRACE_EXPORT const podrace_spec *podrace_spec_of(const char *options, char *error, size_t n);

/* Makes an environment; NULL with a text in `error` [n] if that fails. Reset comes first. */
PODRACE_EXPORT void *podrace_create(const char *options, char *error, size_t n);

/* Begins an episode. Each episode has a seed of its own. */
PODRACE_EXPORT void podrace_reset(void *env, uint64_t seed, void *obs);

/* Takes an action. `info` [num_info] is NaN before; NaN is left out of the log. */
PODRACE_EXPORT void podrace_step(void *env, const void *act, void *obs, podrace_result *result,
                                 float *info);

/* Frees the environment. */
PODRACE_EXPORT void podrace_close(void *env);

/* Optional, if state_bytes > 0. Save writes the state and returns its bytes. Load makes an environment
 * go on exactly where that state was saved, and returns 0, or another number if it cannot. The bytes come
 * from a file that somebody else may have written: compare the options with the environment's own, and
 * check each number that indexes memory. */
PODRACE_EXPORT int64_t podrace_save(const void *env, void *bytes);
PODRACE_EXPORT int podrace_load(void *env, const void *bytes, int64_t n);

/* Optional, if render_height > 0. Draws rgb [render_height, render_width, 3]. */
PODRACE_EXPORT void podrace_render(const void *env, uint8_t *rgb);

/* --- random numbers: PCG32 (O'Neill 2014), seeded in podrace_reset ------------------------------- */

typedef struct {
  uint64_t state;
} podrace_rng;

static inline uint32_t podrace_random(podrace_rng *rng) {
  uint64_t old = rng->state;
  rng->state = old * 6364136223846793005ULL + 1442695040888963407ULL;
  uint32_t shifted = (uint32_t)(((old >> 18) ^ old) >> 27), turn = (uint32_t)(old >> 59);
  return (shifted >> turn) | (shifted << ((32 - turn) & 31));
}

static inline void podrace_seed(podrace_rng *rng, uint64_t seed) {
  rng->state = seed + 1442695040888963407ULL;
  podrace_random(rng);
}

/* Returns a number from low to below high. */
static inline double podrace_uniform(podrace_rng *rng, double low, double high) {
  return low + (high - low) * (podrace_random(rng) * (1.0 / 4294967296.0));
}

/* Returns a whole number from 0 to below n, of 2^32 at most. */
static inline uint32_t podrace_below(podrace_rng *rng, uint32_t n) {
  return (uint32_t)(((uint64_t)podrace_random(rng) * n) >> 32);
}

/* --- options ------------------------------------------------------------------------------------- */

/* An option that is a number; true and false are 1 and 0. `value` has its default. */
typedef struct {
  const char *name;
  double *value;
  double low, high; /* bounds */
} podrace_option;

static inline const char *podrace_skip(const char *s) {
  while (*s == ' ' || *s == '\t' || *s == '\n' || *s == ',') s++;
  return s;
}

/* Writes the known names to `error`, after what is there. */
static inline void podrace_known_options(const podrace_option *known, int count, char *error,
                                         size_t n) {
  for (int i = 0; i < count; i++) {
    size_t used = strlen(error);
    snprintf(error + used, n - used, "%s%s", i ? ", " : "", known[i].name);
  }
}

/* Reads a JSON object of numbers and booleans into the known options.
 * Returns 0, or 1 with a text in `error` [n]. */
static inline int podrace_options(const char *json, const podrace_option *known, int count,
                                  char *error, size_t n) {
  const char *s = podrace_skip(json);
  if (*s++ != '{') return snprintf(error, n, "the options are no JSON object: %.40s", json), 1;
  for (s = podrace_skip(s); *s == '"'; s = podrace_skip(s)) {
    const char *name = ++s, *end = strchr(s, '"');
    if (end == NULL) break;
    int length = (int)(end - name), at = -1;
    for (int i = 0; i < count; i++)
      if (strlen(known[i].name) == (size_t)length && !strncmp(known[i].name, name, (size_t)length))
        at = i;
    if (at < 0) {
      snprintf(error, n, "there is no option %.*s; it takes ", length, name);
      if (count) podrace_known_options(known, count, error, n);
      else snprintf(error, n, "there is no option %.*s; it takes none", length, name);
      return 1;
    }
    s = podrace_skip(end + 1);
    if (*s == ':') s = podrace_skip(s + 1);
    char *after = NULL;
    double x;
    if (!strncmp(s, "true", 4)) x = 1, after = (char *)s + 4;
    else if (!strncmp(s, "false", 5)) x = 0, after = (char *)s + 5;
    else x = strtod(s, &after);
    if (after == s) return snprintf(error, n, "option %.*s is no number", length, name), 1;
    if (!(x >= known[at].low && x <= known[at].high))
      return snprintf(error, n, "option %.*s must be %g to %g, not %g", length, name,
                      known[at].low, known[at].high, x), 1;
    *known[at].value = x;
    s = after;
  }
  if (*s != '}') return snprintf(error, n, "the options are no JSON object: %.40s", json), 1;
  return 0;
}

#endif
