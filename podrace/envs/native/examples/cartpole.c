/* CartPole, as Gymnasium's CartPole-v1 (Barto, Sutton and Anderson 1983): the same rules, constants,
 * double precision, and 500 steps at most. */
#include "podrace_env.h"

#define PI 3.14159265358979323846
#define GRAVITY 9.8
#define CART_MASS 1.0
#define POLE_MASS 0.1
#define MASS (CART_MASS + POLE_MASS)
#define LENGTH 0.5 /* half of the pole */
#define FORCE 10.0
#define TAU 0.02 /* seconds */
#define X_LIMIT 2.4
#define ANGLE_LIMIT (12 * 2 * PI / 360)
#define HEIGHT 120
#define WIDTH 180

typedef struct {
  double x, x_dot, angle, angle_dot;
  double max_steps;
  int64_t steps;
} cartpole;

static const int32_t actions[] = {2};

static int read_options(const char *options, double *max_steps, char *error, size_t n) {
  podrace_option known[] = {{"max_steps", max_steps, 1, 1e9}};
  *max_steps = 500;
  return podrace_options(options, known, 1, error, n);
}

const podrace_spec *podrace_spec_of(const char *options, char *error, size_t n) {
  static const podrace_array obs = {.dtype = PODRACE_F32, .ndim = 1, .shape = {4}};
  static const podrace_array act = {.dtype = PODRACE_I32, .ndim = 0, .choices = actions};
  static const podrace_spec spec = {
      .abi = PODRACE_ENV_ABI, .num_obs = 1, .obs = &obs, .act = &act, .obs_bytes = 4 * sizeof(float),
      .act_bytes = sizeof(int32_t), .state_bytes = sizeof(cartpole), .render_height = HEIGHT,
      .render_width = WIDTH};
  double max_steps;
  return read_options(options, &max_steps, error, n) ? NULL : &spec;
}

void *podrace_create(const char *options, char *error, size_t n) {
  cartpole *c = calloc(1, sizeof *c);
  if (c && read_options(options, &c->max_steps, error, n)) free(c), c = NULL;
  return c;
}

static void observe(const cartpole *c, float *obs) {
  obs[0] = (float)c->x, obs[1] = (float)c->x_dot;
  obs[2] = (float)c->angle, obs[3] = (float)c->angle_dot;
}

void podrace_reset(void *env, uint64_t seed, void *obs) {
  cartpole *c = env;
  podrace_rng rng;
  podrace_seed(&rng, seed);
  double *state[] = {&c->x, &c->x_dot, &c->angle, &c->angle_dot};
  for (int i = 0; i < 4; i++) *state[i] = podrace_uniform(&rng, -0.05, 0.05);
  c->steps = 0;
  observe(c, obs);
}

void podrace_step(void *env, const void *act, void *obs, podrace_result *result, float *info) {
  cartpole *c = env;
  (void)info;
  double force = *(const int32_t *)act == 1 ? FORCE : -FORCE;
  double cosine = cos(c->angle), sine = sin(c->angle);
  double push = (force + POLE_MASS * LENGTH * (c->angle_dot * c->angle_dot) * sine) / MASS;
  double angle_acc = (GRAVITY * sine - cosine * push) /
                     (LENGTH * (4.0 / 3.0 - POLE_MASS * (cosine * cosine) / MASS));
  double x_acc = push - POLE_MASS * LENGTH * angle_acc * cosine / MASS;
  c->x += TAU * c->x_dot;
  c->x_dot += TAU * x_acc;
  c->angle += TAU * c->angle_dot;
  c->angle_dot += TAU * angle_acc;
  c->steps++;
  result->reward = 1;
  result->terminated = fabs(c->x) > X_LIMIT || fabs(c->angle) > ANGLE_LIMIT;
  result->truncated = (double)c->steps >= c->max_steps;
  observe(c, obs);
}

int64_t podrace_save(const void *env, void *bytes) {
  memcpy(bytes, env, sizeof(cartpole));
  return sizeof(cartpole);
}

int podrace_load(void *env, const void *bytes, int64_t n) {
  cartpole *c = env, saved;
  if (n != sizeof saved) return 1;
  memcpy(&saved, bytes, sizeof saved);
  if (saved.max_steps != c->max_steps || saved.steps < 0 || (double)saved.steps > c->max_steps)
    return 1;
  if (!isfinite(saved.x + saved.x_dot + saved.angle + saved.angle_dot)) return 1;
  *c = saved;
  return 0;
}

static void dot(uint8_t *rgb, double x, double y, int red, int green, int blue) {
  int row = (int)y, column = (int)x;
  if (row < 0 || row >= HEIGHT || column < 0 || column >= WIDTH) return;
  uint8_t *p = rgb + 3 * (row * WIDTH + column);
  p[0] = (uint8_t)red, p[1] = (uint8_t)green, p[2] = (uint8_t)blue;
}

void podrace_render(const void *env, uint8_t *rgb) {
  const cartpole *c = env;
  double scale = WIDTH / (2 * X_LIMIT), middle = WIDTH / 2 + c->x * scale, ground = 0.8 * HEIGHT;
  memset(rgb, 255, HEIGHT * WIDTH * 3);
  for (int x = 0; x < WIDTH; x++) dot(rgb, x, ground, 0, 0, 0);
  for (int y = -5; y <= 5; y++)
    for (int x = -12; x <= 12; x++) dot(rgb, middle + x, ground + y, 40, 40, 40);
  for (double s = 0; s < 2 * LENGTH * scale; s += 0.5)
    for (int x = -1; x <= 1; x++)
      dot(rgb, middle + s * sin(c->angle) + x, ground - 5 - s * cos(c->angle), 200, 150, 100);
}

void podrace_close(void *env) { free(env); }
