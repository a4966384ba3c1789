"""What the pipeline keeps between requests: texts, and the stream of seeds."""

import numpy as np
import pytest
import torch

from phyai.models.cosmos3.noise import native_noise
from phyai.models.cosmos3.prompt_cache import PromptCache
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import Conditions

from .pipelines import CPU, build, observation, pictures


class TestTexts:
    @pytest.fixture
    def reads(self, parts, monkeypatch):
        """Counts the texts the understanding tower reads."""
        inner, lengths = parts["transformer"].prefill, []

        def prefill(ids):
            lengths.append(len(ids))
            return inner(ids)

        monkeypatch.setattr(parts["transformer"], "prefill", prefill)
        return lengths

    def test_same_instruction_is_read_once_and_the_empty_text_once_ever(self, parts, reads):
        pipeline = build(parts)
        first = pipeline.run(observation(seed=1))
        assert len(reads) == 2
        assert reads[1] == 10
        again = pipeline.run(observation(seed=1))
        pipeline.run(observation(seed=1, image=pictures(540, 640, seed=9)))
        assert len(reads) == 2
        assert np.array_equal(first.actions, again.actions)
        pipeline.run(observation(seed=1, prompt="open the drawer"))
        assert len(reads) == 3

    def test_no_room_still_answers_the_same(self, parts, reads):
        expected = build(parts).run(observation(seed=1)).actions
        del reads[:]
        pipeline = build(parts, prompt_tokens=0)
        for _ in range(2):
            assert np.array_equal(pipeline.run(observation(seed=1)).actions, expected)
        assert len(reads) == 3, "the empty text is kept whatever the room"

    def test_single_branch_reads_no_second_text(self, parts, reads):
        build(parts).run(observation(sampling=Sampling(2, 1.0, 5.0)))
        assert len(reads) == 1

    def test_least_recently_used_text_goes_first(self):
        read = []

        def prefill(ids):
            read.append(tuple(ids.tolist()))
            return Conditions(torch.empty(1, len(ids), 1, 1), torch.empty(1, len(ids), 1, 1))

        cache = PromptCache(prefill, CPU, tokens=5)
        kept = cache.get((1, 2))
        cache.get((3, 4))
        assert cache.get((1, 2)) is kept
        cache.pin((9,) * 50)
        cache.get((5, 6))
        assert cache.tokens == 4
        assert cache.get((1, 2)) is kept
        cache.get((3, 4))
        assert read.count((3, 4)) == 2
        cache.get((7,) * 6)
        assert cache.tokens == 0, "a text that is too long is used and not kept"
        cache.pin((9,) * 50)
        assert read.count((9,) * 50) == 1
        cache.clear()
        cache.pin((9,) * 50)
        assert read.count((9,) * 50) == 2


class TestSeeds:
    def test_policy_requests_draw_from_one_stream(self, parts):
        seeds = [build(parts).run(observation()).seed for _ in range(2)]
        assert seeds[0] == seeds[1] == int(np.random.default_rng(0).integers(0, 2**31))
        pipeline = build(parts)
        stream = np.random.default_rng(0)
        drawn = [pipeline.run(observation()).seed for _ in range(3)]
        assert drawn == [int(stream.integers(0, 2**31)) for _ in range(3)]
        assert build(parts, seed=7).run(observation()).seed != seeds[0]

    def test_noise_drawn_ahead_is_what_the_next_request_would_draw(self, parts):
        plain, ahead = build(parts), build(parts)
        ahead._works_ahead = True
        for _ in range(3):
            one, two = (pipeline.run(observation()) for pipeline in (plain, ahead))
            assert one.seed == two.seed
            assert np.array_equal(one.actions, two.actions)

    def test_given_noise_is_the_starting_point(self, parts):
        pipeline = build(parts)
        request = observation(seed=3)
        noise = native_noise(3, 4, pipeline.plan(request).layout, (32, 8))
        assert np.array_equal(
            pipeline.run(request, noise=noise).actions, pipeline.run(request).actions
        )
