import pytest

from phyai.processing.errors import ProcessingError
from phyai.processing.openpi import asset_files, find_norm_stats, search_order

PLACES = [
    "norm_stats.json",
    "../norm_stats.json",
    "assets/trossen/norm_stats.json",
    "assets/physical-intelligence/libero/norm_stats.json",
    "../assets/trossen/norm_stats.json",
    "../assets/physical-intelligence/libero/norm_stats.json",
]


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "run" / "checkpoint"
    folder.mkdir(parents=True)
    return folder


def put(checkpoint, place):
    file = checkpoint / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


@pytest.mark.parametrize("place", PLACES)
def test_every_place_is_searched(place, checkpoint):
    file = put(checkpoint, place)
    assert find_norm_stats(checkpoint) == file


def test_nearer_places_win(checkpoint):
    for place in reversed(PLACES[:3]):
        file = put(checkpoint, place)
        assert find_norm_stats(checkpoint) == file


def test_own_assets_hide_those_of_the_parent(checkpoint):
    put(checkpoint, PLACES[4])
    own = put(checkpoint, PLACES[2])
    assert asset_files(checkpoint) == {"trossen": own}


def test_the_robots_asset_is_picked_among_several(checkpoint):
    put(checkpoint, "assets/droid/norm_stats.json")
    trossen = put(checkpoint, PLACES[2])
    libero = put(checkpoint, PLACES[3])
    assert find_norm_stats(checkpoint, ("trossen",)) == trossen
    assert find_norm_stats(checkpoint, ("physical-intelligence/libero", "libero")) == libero


def test_several_assets_that_do_not_fit_are_listed(checkpoint):
    put(checkpoint, "assets/arx/norm_stats.json")
    put(checkpoint, "assets/franka/norm_stats.json")
    with pytest.raises(ProcessingError, match="statistics of 2 robots") as caught:
        find_norm_stats(checkpoint, ("droid",))
    for part in ("expects droid", "arx: ", "franka: ", "pass the path of one"):
        assert part in str(caught.value)


def test_a_single_foreign_asset_is_taken(checkpoint):
    file = put(checkpoint, "assets/my_robot/norm_stats.json")
    assert find_norm_stats(checkpoint, ("droid",)) == file


def test_nothing_found(checkpoint):
    assert find_norm_stats(checkpoint, ("droid",)) is None
    order = search_order(checkpoint)
    assert order[0] == str(checkpoint / "norm_stats.json")
    assert order[1] == str(checkpoint / ".." / "norm_stats.json")
    assert order[2] == str(checkpoint / "assets" / "*" / "norm_stats.json")
