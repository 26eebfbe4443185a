"""Charges of TensorNet2 on the CPU: equilibration over structures and its gradient, in float64; see triton/charges.py.

c, f = MLP(LN(I, ‖A‖², ‖S‖²));  q = c + u m,  u = f² + ε,  m = (Q − Σc)/U,  U = Σu. Backwards, with T = Σ (dE/dq) u:

    dE/dc = dE/dq − T/U,    dE/df = 2 f m dE/dc.

One thread does this, in the order of the atoms: it is a small part of a step.

Shapes: N atoms in B structures, C charge channels, of which K are real.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["equilibrate", "equilibrate_adjoint"]

_SOFTENING = 1e-6


@njit(cache=True, error_model="numpy")
def equilibrate(predicted, batch, total_charge, exact, real, weight, missing, charges):
    """From `predicted` [N, 2C], c beside f: weight [B, C] U, missing [B, C] m, charges [N, C] q in float32.

    Returns:
        [N] float64 e, the mean of q over the K = `real` channels.
    """
    n, num, channels = len(batch), len(total_charge), charges.shape[1]
    softening = _SOFTENING if exact else 0.0
    for b in range(num):
        for k in range(channels):
            weight[b, k], missing[b, k] = _SOFTENING - softening, total_charge[b]
    for i in range(n):
        b = batch[i]
        for k in range(channels):
            f = np.float64(predicted[i, channels + k])
            weight[b, k] += f * f + softening
            missing[b, k] -= np.float64(predicted[i, k])
    for b in range(num):
        for k in range(channels):
            weight[b, k] = max(weight[b, k], 1e-300)
            missing[b, k] /= weight[b, k]
    mean = np.zeros(n)
    for i in range(n):
        b = batch[i]
        for k in range(channels):
            f = np.float64(predicted[i, channels + k])
            q = np.float64(predicted[i, k]) + (f * f + softening) * missing[b, k]
            charges[i, k] = q
            if k < real:
                mean[i] += q / real
    return mean


@njit(cache=True, error_model="numpy")
def equilibrate_adjoint(predicted, batch, exact, weight, missing, slope, gradient):
    """gradient [N, 2C] float32 of `predicted` from slope = dE/dq [N, C] float64."""
    n, channels = len(batch), slope.shape[1]
    softening = _SOFTENING if exact else 0.0
    sums = np.zeros(weight.shape)
    for i in range(n):
        b = batch[i]
        for k in range(channels):
            f = np.float64(predicted[i, channels + k])
            sums[b, k] += slope[i, k] * (f * f + softening)
    for i in range(n):
        b = batch[i]
        for k in range(channels):
            dc = slope[i, k] - sums[b, k] / weight[b, k]
            gradient[i, k] = dc
            gradient[i, channels + k] = 2 * np.float64(predicted[i, channels + k]) * missing[b, k] * dc
