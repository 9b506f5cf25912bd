"""Integrated gradients by arithmetic: polynomials, known integrals, a function that no steps suffice for."""

import numpy as np
import pytest

from rtrain.inference import integrated_gradients
from rtrain.inference.integrated_gradients import Doubles, integrate, quadrature_nodes, quadrature_weights


@pytest.mark.parametrize("steps", [2, 4, 16, 64])
def test_the_rule_is_exact_for_polynomials_of_its_degree(steps: int) -> None:
    assert quadrature_weights(steps).sum() == pytest.approx(1, abs=1e-14)
    assert (quadrature_weights(steps) > 0).all()
    for degree in range(steps + 2):  # one more than promised: the rule is symmetric
        assert quadrature_weights(steps) @ (quadrature_nodes(steps) ** degree) == pytest.approx(
            1 / (degree + 1), abs=1e-13
        )


@pytest.mark.parametrize("steps", [2, 8, 128])
def test_twice_the_steps_keep_every_point(steps: int) -> None:
    assert quadrature_nodes(2 * steps)[::2] == pytest.approx(quadrature_nodes(steps), abs=1e-15)
    assert (quadrature_nodes(steps)[0], quadrature_nodes(steps)[-1]) == (0, 1)


class Product:
    """f(x, y) = x y^2 from (0, 0) to (2, 3): along the path 18 a^3: a third is x's and two thirds are y's."""

    def __init__(self) -> None:
        self.points: list[float] = []

    def __call__(self, points: Doubles) -> tuple[Doubles, Doubles]:
        self.points += points.tolist()
        x, y = 2 * points, 3 * points
        slopes = np.stack([2 * y**2, 3 * 2 * x * y], axis=1)
        return (x * y**2)[:, None], slopes[:, None, :]


def test_a_product_is_shared_out_as_by_hand() -> None:
    result = integrate(Product())
    assert result.attributions == pytest.approx(np.array([[6.0, 12.0]]))
    assert (result.values.tolist(), result.baselines.tolist()) == ([18.0], [0.0])
    assert result.errors == [pytest.approx(0, abs=1e-12)]
    assert result.steps == integrated_gradients.INITIAL_STEPS


class Sharp:
    """f = tanh(k (a - c)): the larger k, the more steps."""

    def __init__(self, k: float) -> None:
        self.k, self.points = k, list[float]()

    def __call__(self, points: Doubles) -> tuple[Doubles, Doubles]:
        self.points += points.tolist()
        value = np.tanh(self.k * (points - 0.37))
        return value[:, None], (self.k * (1 - value**2))[:, None, None]


def test_steps_are_doubled_until_the_error_is_within_the_tolerance_and_no_point_is_computed_twice() -> None:
    function = Sharp(60.0)
    result = integrate(function)
    assert integrated_gradients.INITIAL_STEPS < result.steps < integrated_gradients.MAX_STEPS
    assert len(function.points) == len(set(function.points)) == result.steps + 1
    [error] = result.errors
    assert error is not None
    assert error < integrated_gradients.ERROR_TOLERANCE
    assert integrate(Sharp(60.0), steps=result.steps // 2).errors[0] > integrated_gradients.ERROR_TOLERANCE  # type: ignore[operator]
    # As if computed at once: old and new points are in their places.
    assert result.attributions == pytest.approx(integrate(Sharp(60.0), steps=result.steps).attributions, abs=1e-12)


def test_where_nothing_moves_there_is_no_relative_error() -> None:
    def still(points: Doubles) -> tuple[Doubles, Doubles]:
        return np.ones((len(points), 1)), np.zeros((len(points), 1, 2))

    result = integrate(still)
    assert (result.errors, result.attributions.tolist(), result.steps) == (
        [None],
        [[0.0, 0.0]],
        integrated_gradients.INITIAL_STEPS,
    )
