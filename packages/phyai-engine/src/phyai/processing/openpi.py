"""Finding the statistics of an openpi checkpoint."""

from pathlib import Path

from phyai.processing.errors import ProcessingError

NORM_STATS = "norm_stats.json"


def asset_files(checkpoint_dir: Path) -> dict[str, Path]:
    """Maps asset ids to their statistics files.

    Looks below `assets/` of the checkpoint and, because converters leave the assets there, of its
    parent; an id is the path below that folder, e.g. `trossen` or `physical-intelligence/libero`.
    """
    found: dict[str, Path] = {}
    for assets in (checkpoint_dir / "assets", checkpoint_dir / ".." / "assets"):
        for pattern in (f"*/{NORM_STATS}", f"*/*/{NORM_STATS}"):
            for file in sorted(assets.glob(pattern)):
                found.setdefault(file.parent.relative_to(assets).as_posix(), file)
    return found


def search_order(checkpoint_dir: Path) -> tuple[str, ...]:
    """Describes where statistics are looked for, in order."""
    places = (
        checkpoint_dir / NORM_STATS,
        checkpoint_dir / ".." / NORM_STATS,
        checkpoint_dir / "assets" / "*" / NORM_STATS,
        checkpoint_dir / "assets" / "*" / "*" / NORM_STATS,
        checkpoint_dir / ".." / "assets" / "*" / NORM_STATS,
        checkpoint_dir / ".." / "assets" / "*" / "*" / NORM_STATS,
    )
    return tuple(str(place) for place in places)


def find_norm_stats(checkpoint_dir: Path, asset_ids: tuple[str, ...] = ()) -> Path | None:
    """Finds `norm_stats.json` in the folder, its parent, or one of the `assets/*`.

    Args:
        checkpoint_dir: The checkpoint.
        asset_ids: Ids that fit the robot, tried in this order when there are several assets.

    Returns:
        The file, None when there is none.

    Raises:
        ProcessingError: Several assets exist and none, by its id, fits the robot.
    """
    for direct in (checkpoint_dir / NORM_STATS, checkpoint_dir / ".." / NORM_STATS):
        if direct.is_file():
            return direct
    assets = asset_files(checkpoint_dir)
    for asset_id in asset_ids:
        if asset_id in assets:
            return assets[asset_id]
    if len(assets) > 1:
        listed = "\n  ".join(f"{name}: {file}" for name, file in assets.items())
        raise ProcessingError(
            f"{checkpoint_dir} has statistics of {len(assets)} robots and the preset expects "
            f"{' or '.join(asset_ids) or 'none by name'}; pass the path of one:\n  {listed}"
        )
    return next(iter(assets.values()), None)
