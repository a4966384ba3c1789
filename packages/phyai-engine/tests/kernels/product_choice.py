"""Which row a product with an activation gets."""

from phyai.dispatch import KernelQuery, Selector, policy_from_mapping
from phyai.dispatch.catalog import build_catalog


def ask(op, sizes, policy, *, device="nvidia:sm90", format="bf16", kind, **changes):  # noqa: A002
    """Returns a selector and a query in bf16, but for the changed dtypes and sizes.

    Args:
        op: operation.
        sizes: M, K and hidden.
        policy: mapping of a policy; None for none.
        device: of the query.
        format: of the weight.
        kind: of the activation.
        changes: of ``input``, ``output`` and ``weight``, and of the sizes.
    """
    dtype = {"input": "bf16", "output": "bf16", "weight": "bf16"}
    dims = dict(sizes)
    for name, value in changes.items():
        (dtype if name in dtype else dims)[name] = value
    catalog = build_catalog()
    rules = policy_from_mapping(policy, catalog=catalog) if policy else None
    selector = Selector(catalog, device=device, **({"policy": rules} if rules else {}))
    query = KernelQuery.build(
        op,
        device=device,
        dtype=dtype,
        quant={"format": format},
        shape=dims,
        attrs={"activation": kind},
    )
    return selector, query
