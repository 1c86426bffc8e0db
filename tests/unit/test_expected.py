"""The speed-up that the panel expects before anything has run."""

import pytest

from cp_runtime.timing.expected import expected


@pytest.mark.parametrize("direct", [True, False])
def test_more_devices_gain_more_and_none_gains_more_than_itself(direct):
    found = [expected(count, direct) for count in (2, 3, 4, 8)]
    assert all(1 < picture < video < count for count, (picture, video) in zip((2, 3, 4, 8), found, strict=True))
    assert found == sorted(found)


def test_an_estimate_is_near_what_others_measured():
    """Flux on L20, by cache-dit: 23.56 s on one, 13.80 on two, 8.28 on four. Wan 14B in 480p on eight 4090D, without access to each
    other's memory, by LightX2V: 20.26 s and 4.75."""
    assert expected(2, True)[0] == pytest.approx(23.56 / 13.80, rel=0.2)
    assert expected(4, True)[0] == pytest.approx(23.56 / 8.28, rel=0.2)
    assert expected(8, False)[1] == pytest.approx(20.26 / 4.75, rel=0.2)
