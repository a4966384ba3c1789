"""A small expert and what its layers read, for the tests of the persistent decoder."""

import torch

from phyai.layers import RotaryEmbedding
from phyai.models.pi05.decoder import Decoder
from phyai.models.pi05.sizes import DecoderSizes
from phyai.models.pi05.stream import LayerModulation, Place
from phyai.runtime.paged import PagedKVCache
from phyai.runtime.segments import SegmentPlan, segment_row

SMALL = DecoderSizes(512, layers=2, heads=4, kv_heads=1, head_dim=256, mlp=1024)
FULL = DecoderSizes(1024, layers=4, heads=8, kv_heads=1, head_dim=256, mlp=4096)


class Case:
    """Layers, rows and a cache whose unseen slots hold not-a-numbers.

    Args:
        sizes: of the body.
        groups: of each request its rows, the length of its prefix, and of a second run of it.
        device: where everything lives.
    """

    def __init__(self, sizes, groups, device="cpu"):
        self.device, generator = device, torch.Generator().manual_seed(len(groups))

        def normal(*shape, dtype=torch.float32):
            return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

        self.body = Decoder(
            sizes, prefix="body", role="expert", attention_role="expert", adaptive=True,
            params_dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        for weight in self.body.parameters():
            weight.data.copy_(normal(*weight.shape) * weight.shape[-1] ** -0.5)
        self.rows = sum(rows for rows, _ in groups)
        self.x = normal(self.rows, sizes.width, dtype=torch.bfloat16)
        prefixes = sum(prefix + 3 for _, prefix in groups)
        self.first_slot = prefixes + 2
        table, positions, row, slot = [], [], 0, 2
        for rows, prefix in groups:
            table.append(segment_row((row, rows), (slot, prefix), (self.first_slot + row, rows)))
            positions.append(torch.arange(rows) + prefix)
            row, slot = row + rows, slot + prefix + 3
        self.plan = SegmentPlan(
            torch.tensor(table, dtype=torch.int32, device=device),
            max(rows for rows, _ in groups),
            max(rows + prefix for rows, prefix in groups),
        )
        rotary = RotaryEmbedding(
            256, sizes.heads, 1, max_positions=self.plan.most_keys, device=device
        )
        self.cache = PagedKVCache.allocate(
            layers=sizes.layers, slots=self.first_slot + self.rows, kv_heads=1, head_dim=256,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        for stored in (self.cache.keys, self.cache.values):
            stored.fill_(torch.nan)
            for _, _, start, length, *_ in table:
                stored[:, start : start + length] = normal(
                    sizes.layers, length, 1, 1, 256, dtype=torch.bfloat16
                )
        positions = torch.cat(positions).to(device)
        self.place = Place(positions, rotary, self.cache, self.first_slot, self.plan)
        self.steps = [
            LayerModulation(*(normal(1, 3 * sizes.width) * 0.5 for _ in range(2)))
            for _ in range(sizes.layers)
        ]
        self.final = normal(1, 3 * sizes.width)

    def forget(self):
        """Clears what rows stored, and returns it."""
        stored = [one[:, self.first_slot :] for one in (self.cache.keys, self.cache.values)]
        kept = [one.clone() for one in stored]
        for one in stored:
            one.fill_(torch.nan)
        return kept

    def one_by_one(self):
        """Returns residual, keys and values of the layers as separate operations."""
        stream = self.body.run_layers(self.x, self.place, self.steps)
        return stream.residual + stream.gate * stream.update, *self.forget()


def error(found, expected):
    """Returns the size of the difference relative to that of ``expected``."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
