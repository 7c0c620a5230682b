"""An algorithm of one's own needs only passes and a loss."""

from diffusion_grpo.algorithms.base import Algorithm, PassOutput, RatioError


class Own(Algorithm):
    """Defines no check."""

    def passes(self, batch):
        return []

    def loss(self, policy, reference, part, step):
        return PassOutput(policy, {})


def test_the_defaults_of_an_algorithm():
    own = Own()
    assert own.needs == "trajectory" and own.check(batch=None, drift=1e9) == {}
    assert own.loss(0.5, None, None, 0) == PassOutput(loss=0.5, metrics={}, drift=0.0)
    assert issubclass(RatioError, RuntimeError)
