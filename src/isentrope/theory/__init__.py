"""Theory of attention at lengths a model was never trained on, with exact values for every approximation.

`sphere`: entropy of one set of keys on the hypersphere and the paper's derivation of InfoScale. `key_sets`: shares
and entropies of several sets of keys with Gaussian scores. `far_keys`: laws for near and far keys, their derivation.
"""

from isentrope.theory.common import Step
from isentrope.theory.far_keys import (
    far_derivation,
    far_entropy,
    far_entropy_gaussian,
    far_share,
    far_share_gaussian,
    needle_limit,
    needle_tau,
    noise_bias,
    prior_bias,
    share_bias,
)
from isentrope.theory.key_sets import (
    MAX_SIGMA,
    KeySet,
    entropy_within,
    log_sum,
    log_sum_deviation,
    log_sum_gaussian,
    log_sum_limit,
    shares,
)
from isentrope.theory.sphere import (
    MAX_DIMENSION,
    concentration,
    concentration_eq10,
    concentration_eq12,
    derivation,
    entropy,
    entropy_eq10,
    entropy_eq12,
    entropy_laplace,
    invariant_scale,
    kl_from_uniform,
    log_mean_exp,
    mean_cosine,
    peak_cosine,
)

__all__ = [
    "MAX_DIMENSION",
    "MAX_SIGMA",
    "KeySet",
    "Step",
    "concentration",
    "concentration_eq10",
    "concentration_eq12",
    "derivation",
    "entropy",
    "entropy_eq10",
    "entropy_eq12",
    "entropy_laplace",
    "entropy_within",
    "far_derivation",
    "far_entropy",
    "far_entropy_gaussian",
    "far_share",
    "far_share_gaussian",
    "invariant_scale",
    "kl_from_uniform",
    "log_mean_exp",
    "log_sum",
    "log_sum_deviation",
    "log_sum_gaussian",
    "log_sum_limit",
    "mean_cosine",
    "needle_limit",
    "needle_tau",
    "noise_bias",
    "peak_cosine",
    "prior_bias",
    "share_bias",
    "shares",
]
