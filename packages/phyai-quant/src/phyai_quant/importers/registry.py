"""The importers that are tried, in order, and the refusal of configs that none of them reads."""

from importlib.metadata import EntryPoint, entry_points

from phyai_quant.importers.base import ConfigSources, QuantImporter
from phyai_quant.importers.comfy import ComfyImporter
from phyai_quant.importers.compressed_tensors import CompressedTensorsImporter
from phyai_quant.importers.hf_fp8 import HfFp8Importer
from phyai_quant.importers.modelopt import ModelOptImporter
from phyai_quant.plan import QuantPlan
from phyai_quant.scheme import QuantConfigError

ENTRY_POINT_GROUP = "phyai_quant.importers"
"""Other packages add importers under this entry-point group: a class without arguments."""

_BUILTIN: tuple[type[QuantImporter], ...] = (
    HfFp8Importer,
    CompressedTensorsImporter,
    ModelOptImporter,
    ComfyImporter,
)


def importers() -> tuple[QuantImporter, ...]:
    """Returns the built-in importers and those of installed packages.

    Raises:
        QuantConfigError: An installed package's importer cannot be loaded.
    """
    plugins = entry_points(group=ENTRY_POINT_GROUP)
    return (*(cls() for cls in _BUILTIN), *(_load(plugin) for plugin in plugins))


def _load(plugin: EntryPoint) -> QuantImporter:
    try:
        return plugin.load()()
    except Exception as error:
        raise QuantConfigError(
            f"importer {plugin.name!r} of entry-point group {ENTRY_POINT_GROUP} cannot be loaded "
            f"from {plugin.value!r}: {error!r}; correct or uninstall the package that adds it"
        ) from error


def build_plan(sources: ConfigSources) -> QuantPlan | None:
    """Returns the plan of the configs, or None when there is no config.

    Raises:
        QuantConfigError: No importer reads the config, or two do, or its importer refuses it.
    """
    if sources.inline is None and sources.standalone is None and not sources.markers:
        return None
    available = importers()
    found = [importer for importer in available if importer.detect(sources)]
    if not found:
        section = sources.inline or sources.standalone
        method = sources.method
        seen = "names no quant_method" if method is None else f"quant_method {method!r} is unknown"
        names = ", ".join(importer.name for importer in available)
        raise QuantConfigError(
            f"{section.where() if section else ''}: {seen}; the importers read: {names}"
        )
    if len(found) > 1:
        places = " and ".join(sources.places())
        raise QuantConfigError(
            f"{places} are in different formats ({', '.join(i.name for i in found)}); keep the one "
            "that describes the tensors on disk"
        )
    standalone = sources.standalone
    if standalone is not None and standalone.data and not standalone.has("quantization"):
        standalone.fail("required key is missing", "quantization")
    plan = found[0].build_plan(sources)
    if not isinstance(plan, QuantPlan):
        raise QuantConfigError(
            f"importer {found[0].name!r} returned {type(plan).__name__} instead of a QuantPlan"
        )
    return plan
