#!/usr/bin/env python3
"""Coefficients of src/numeric/exponential.hpp: prints them, and their largest error.

e^r = 1 + r + r^2 * p(r) for |r| <= ln 2 / 2, where p of degree 4 has the least largest relative error of e^r. Found by
Remez exchange on a grid of Chebyshev nodes in long double, then rounded to f32. Needs numpy.
"""

from __future__ import annotations

import numpy as np

DEGREE = 4
NUM_NODES = 4000
# A little wider than ln 2 / 2: x / ln 2 is rounded before its nearest integer is taken.
HALF_WIDTH = np.log(np.longdouble(2)) / 2 * np.longdouble(1.0005)


def remainder(r: np.ndarray) -> np.ndarray:
    """(e^r - 1 - r) / r^2 by its series."""
    total, term = np.zeros_like(r), np.full_like(r, 0.5)
    for power in range(2, 30):
        total += term
        term = term * r / (power + 1)
    return total


def minimax(nodes: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Coefficients, lowest power first, of the polynomial with the least largest weights * |values - polynomial|."""
    count = DEGREE + 2
    powers = np.arange(DEGREE + 1)
    wanted = HALF_WIDTH * np.cos(np.pi * np.arange(count) / (count - 1))
    extrema = np.array([np.argmin(abs(nodes - at)) for at in wanted])
    while True:
        rows = weights[extrema, None] * nodes[extrema, None] ** powers
        signs = (-1.0) ** np.arange(count)
        system = np.column_stack([rows, signs]).astype(float)
        found = np.linalg.solve(system, (weights * values)[extrema].astype(float))[:-1]
        error = (weights * (values - nodes[:, None] ** powers @ found.astype(np.longdouble))).astype(float)
        changes = np.flatnonzero(np.diff(np.sign(error)))
        runs = np.split(np.arange(len(nodes)), changes + 1)
        peaks = [run[np.argmax(abs(error[run]))] for run in runs]
        while len(peaks) > count:
            peaks.pop(0 if abs(error[peaks[0]]) < abs(error[peaks[-1]]) else -1)
        if len(peaks) < count or list(peaks) == list(extrema):
            return found
        extrema = np.array(peaks)


def main() -> None:
    angles = np.pi * (np.arange(NUM_NODES, dtype=np.longdouble) + np.longdouble(0.5)) / NUM_NODES
    nodes = HALF_WIDTH * np.cos(angles)
    rounded = minimax(nodes, remainder(nodes), nodes**2 / np.exp(nodes)).astype(np.float32)
    for power, coefficient in enumerate(rounded, start=2):
        print(f"kTerm{power} = {float(coefficient).hex()}")
    polynomial = nodes[:, None] ** np.arange(DEGREE + 1) @ rounded.astype(np.longdouble)
    error = np.abs((1 + nodes + nodes**2 * polynomial) / np.exp(nodes) - 1).max()
    print(f"largest relative error {float(error):.2e}")


if __name__ == "__main__":
    main()
