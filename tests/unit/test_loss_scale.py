"""The loss scale: how it grows and falls, how far, and what it starts from."""

import pytest

from phalanx.errors import ConfigError
from phalanx.optim.scale import LossScale


def test_it_grows_after_an_interval_of_finite_steps_and_falls_at_once():
    scale, values = LossScale(value=8.0, growth_interval=2), []
    for finite in (True, True, True, False, True, True):
        scale.update(finite)
        values.append(scale.value)
    assert values == [8.0, 16.0, 16.0, 8.0, 8.0, 16.0]


def test_a_scale_for_sums_may_fall_below_one():
    scale = LossScale(value=65536.0)
    scale.fit(1e6)  # a batch of a million tokens
    assert scale.value == 2.0**-4
    scale.update(finite=False)
    assert scale.value == 2.0**-5
    for _ in range(100):
        scale.update(finite=False)
    assert scale.value == scale.minimum == 2.0**-44


@pytest.mark.parametrize(("count", "divisor"), [(0.0, 1), (1.0, 1), (3.0, 4), (4.0, 4), (5.0, 8)])
def test_start_and_minimum_are_divided_by_a_power_of_two(count, divisor):
    scale = LossScale(value=1024.0, minimum=2.0)
    scale.fit(count)
    assert (scale.value, scale.minimum) == (1024.0 / divisor, 2.0 / divisor)
    for _ in range(20):
        scale.update(finite=False)
    assert scale.value == 2.0 / divisor


def test_a_scale_that_starts_below_its_minimum_does_not_jump_up():
    scale = LossScale(value=0.5, minimum=1.0)
    scale.update(finite=False)
    assert scale.value == 0.5


def test_a_constant_scale_stays():
    scale = LossScale.constant()
    for finite in (True, False) * 1500:
        scale.update(finite)
    assert scale.value == 1.0


def test_all_of_it_is_saved():
    scale = LossScale(value=64.0, growth_interval=10)
    scale.fit(3)
    scale.update(finite=True)
    again = LossScale(value=1.0, growth_interval=10)
    again.load_state_dict(scale.state_dict())
    assert again == scale


@pytest.mark.parametrize(
    "settings", [{"value": 0}, {"minimum": 0}, {"growth": 0.5}, {"backoff": 0}, {"backoff": 1.5}, {"growth_interval": 0}]
)
def test_settings_without_sense_are_refused(settings):
    with pytest.raises(ConfigError, match="loss scale settings"):
        LossScale(**settings)
