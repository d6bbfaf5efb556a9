"""Seeds: case R16."""

from vime.rollout.seeds import EVALUATION, seed_for


def test_every_place_has_its_own_seed():
    seeds = [seed_for(s, r, g, i) for s in (0, 1) for r in (EVALUATION, 0, 1) for g in range(20) for i in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**53 for s in seeds)


def test_a_seed_depends_on_its_place_alone():
    assert seed_for(1, 2, 3, 4) == seed_for(1, 2, 3, 4) == 1132556431835704
    assert seed_for(11, 1, 1, 1) != seed_for(1, 11, 1, 1) != seed_for(1, 1, 11, 1)
