"""nas.Architecture with a table in place of training: the share of the choices that are TARGET's."""

import nas
import numpy as np

TARGET = np.array([2, 1, 0, 3, 2, 1, 1, 3, 2, 4, 0, 3, 1])


def fit(choices: np.ndarray, *rest: object) -> float:
  return float(np.mean(choices == TARGET))


nas.fit = fit
