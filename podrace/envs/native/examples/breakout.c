/* Breakout on 10 x 10 fields, after MinAtar (Young and Tian 2019, arXiv 1903.03176).
 *
 * Four channels: paddle, ball, the ball's place one step before, bricks. Actions: stay, left, right.
 * A brick is worth 1. The episode ends when the ball is lost. With `sticky` an action is repeated with
 * that probability. */
#include "podrace_env.h"

#define SIDE 10
#define ROWS 3 /* of bricks */
#define SCALE 12

enum { PADDLE, BALL, TRAIL, BRICK, CHANNELS };

typedef struct {
  uint8_t obs[SIDE][SIDE][CHANNELS];
} observation;

typedef struct {
  podrace_rng rng;
  double sticky, max_steps;
  int32_t ball_x, ball_y, last_x, last_y, dx, dy, paddle, strike, last_action, steps;
  uint8_t bricks[SIDE][SIDE];
  uint8_t pad[4];
} breakout;

static int read_options(const char *options, breakout *b, char *error, size_t n) {
  podrace_option known[] = {{"sticky", &b->sticky, 0, 1}, {"max_steps", &b->max_steps, 1, 1e9}};
  b->sticky = 0.1;
  b->max_steps = 5000;
  return podrace_options(options, known, 2, error, n);
}

const podrace_spec *podrace_spec_of(const char *options, char *error, size_t n) {
  static const int32_t actions[] = {3};
  static const podrace_array obs = {
      .dtype = PODRACE_U8, .ndim = 3, .shape = {SIDE, SIDE, CHANNELS}, .low = 0, .high = 1};
  static const podrace_array act = {.dtype = PODRACE_I32, .ndim = 0, .choices = actions};
  static const char *const info[] = {"bricks_left"};
  static const podrace_spec spec = {
      .abi = PODRACE_ENV_ABI, .num_obs = 1, .num_info = 1, .obs = &obs, .act = &act, .info = info,
      .obs_bytes = sizeof(observation), .act_bytes = sizeof(int32_t),
      .state_bytes = sizeof(breakout), .render_height = SIDE * SCALE, .render_width = SIDE * SCALE};
  breakout unused;
  return read_options(options, &unused, error, n) ? NULL : &spec;
}

void *podrace_create(const char *options, char *error, size_t n) {
  breakout *b = calloc(1, sizeof *b);
  if (b && read_options(options, b, error, n)) free(b), b = NULL;
  return b;
}

static void observe(const breakout *b, observation *o) {
  memset(o, 0, sizeof *o);
  for (int y = 0; y < SIDE; y++)
    for (int x = 0; x < SIDE; x++) o->obs[y][x][BRICK] = b->bricks[y][x];
  o->obs[b->ball_y][b->ball_x][BALL] = 1;
  o->obs[b->last_y][b->last_x][TRAIL] = 1;
  o->obs[SIDE - 1][b->paddle][PADDLE] = 1;
}

static void build_wall(breakout *b) {
  for (int y = 1; y <= ROWS; y++) memset(b->bricks[y], 1, SIDE);
}

void podrace_reset(void *env, uint64_t seed, void *obs) {
  breakout *b = env;
  podrace_seed(&b->rng, seed);
  int right = (int)podrace_below(&b->rng, 2);
  memset(b->bricks, 0, sizeof b->bricks);
  build_wall(b);
  b->ball_x = b->last_x = right ? SIDE - 1 : 0;
  b->ball_y = b->last_y = ROWS;
  b->dx = right ? -1 : 1;
  b->dy = 1;
  b->paddle = 4;
  b->strike = b->last_action = b->steps = 0;
  observe(b, obs);
}

/* Moves the ball. Returns the reward; `lost` is set if it passes the paddle. */
static float move_ball(breakout *b, int *lost) {
  float reward = 0;
  int x = b->ball_x + b->dx, y = b->ball_y + b->dy;
  b->last_x = b->ball_x, b->last_y = b->ball_y;
  if (x < 0 || x >= SIDE) b->dx = -b->dx, x = x < 0 ? 0 : SIDE - 1;
  if (y >= SIDE) y = SIDE - 1; /* of a state after the end of its episode */
  int hit = 0;
  if (y < 0) {
    b->dy = 1, y = 0;
  } else if (b->bricks[y][x]) {
    hit = 1;
    if (!b->strike) reward = 1, b->strike = 1, b->bricks[y][x] = 0, y = b->last_y, b->dy = -b->dy;
  } else if (y == SIDE - 1) {
    int left = 0;
    for (int i = 0; i < SIDE * SIDE; i++) left += (&b->bricks[0][0])[i];
    if (!left) build_wall(b);
    if (b->ball_x == b->paddle) b->dy = -1, y = b->last_y;
    else if (x == b->paddle) b->dx = -b->dx, b->dy = -1, y = b->last_y;
    else *lost = 1;
  }
  if (!hit) b->strike = 0;
  b->ball_x = x, b->ball_y = y;
  return reward;
}

void podrace_step(void *env, const void *act, void *obs, podrace_result *result, float *info) {
  breakout *b = env;
  int action = *(const int32_t *)act, lost = 0;
  if (podrace_uniform(&b->rng, 0, 1) < b->sticky) action = b->last_action;
  b->last_action = action;
  if (action == 1 && b->paddle > 0) b->paddle--;
  if (action == 2 && b->paddle < SIDE - 1) b->paddle++;
  result->reward = move_ball(b, &lost);
  result->terminated = (uint8_t)lost;
  result->truncated = ++b->steps >= b->max_steps;
  if (lost || result->truncated) {
    info[0] = 0;
    for (int i = 0; i < SIDE * SIDE; i++) info[0] += (&b->bricks[0][0])[i];
  }
  observe(b, obs);
}

int64_t podrace_save(const void *env, void *bytes) {
  memcpy(bytes, env, sizeof(breakout));
  return sizeof(breakout);
}

int podrace_load(void *env, const void *bytes, int64_t n) {
  breakout *b = env, saved;
  if (n != sizeof saved) return 1;
  memcpy(&saved, bytes, sizeof saved);
  const int32_t places[] = {saved.ball_x, saved.ball_y, saved.last_x, saved.last_y, saved.paddle};
  for (int i = 0; i < 5; i++)
    if (places[i] < 0 || places[i] >= SIDE) return 1;
  if (abs(saved.dx) != 1 || abs(saved.dy) != 1 || saved.steps < 0 || saved.steps > b->max_steps ||
      saved.last_action < 0 || saved.last_action > 2)
    return 1;
  for (int i = 0; i < SIDE * SIDE; i++)
    if ((&saved.bricks[0][0])[i] > 1) return 1;
  if (saved.sticky != b->sticky || saved.max_steps != b->max_steps) return 1;
  *b = saved;
  return 0;
}

void podrace_render(const void *env, uint8_t *rgb) {
  static const uint8_t colors[CHANNELS][3] = {
      {60, 90, 200}, {220, 60, 60}, {240, 180, 180}, {120, 120, 120}};
  observation o;
  observe(env, &o);
  for (int y = 0; y < SIDE * SCALE; y++)
    for (int x = 0; x < SIDE * SCALE; x++) {
      uint8_t *p = rgb + 3 * (y * SIDE * SCALE + x);
      memset(p, 255, 3);
      for (int k = CHANNELS - 1; k >= 0; k--)
        if (o.obs[y / SCALE][x / SCALE][k]) memcpy(p, colors[k], 3);
    }
}

void podrace_close(void *env) { free(env); }
