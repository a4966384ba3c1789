"""The contract of the released DROID policies, number by number."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.droid import ActionSpace, PolicyContract
from phyai.models.cosmos3.noise import native_noise, start
from phyai.models.cosmos3.normalizers import ActionNormalizer
from phyai.models.cosmos3.plan_actions import plan_policy
from phyai.models.cosmos3.poses import rotation_from_quaternion, rotation_to_six, split_framewise
from phyai.models.cosmos3.positions import media_positions
from phyai.models.cosmos3.requests import PolicyRequest
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import ActionLayout, Layout
from phyai.processing.errors import ProcessingError

from .droid_requests import JOINTS, QUATERNION, setup, views


class TestPlan:
    """Appendix B of the model's specification."""

    @pytest.fixture(scope="class")
    def plan(self):
        return plan_policy(views(), setup())

    def test_grid_and_tokens(self, plan):
        layout = plan.layout
        assert plan.pixels.shape == (3, 1, 544, 736)
        assert plan.cells == (33, 40)
        assert (layout.frames, layout.height, layout.width) == (9, 33, 40)
        assert layout.grid(2) == (9, 17, 20)
        assert layout.tokens(2) == 3093
        per_frame = 17 * 20
        assert len(layout.clean_frames) * per_frame == 340
        assert len(layout.noisy_frames) * per_frame == 2720
        assert layout.clean_frames == (0,)
        assert layout.action == ActionLayout(33, 0, (0,), 8, 8)
        assert len(layout.noisy_rows) == 32
        assert layout.fps == 15.0
        assert layout.sound_frames == 0

    @pytest.mark.parametrize("length", [82, 10])
    def test_positions(self, plan, length):
        positions = media_positions(plan.layout, length, Cosmos3Config.nano())
        offset = length + 15000
        video, action = positions[:3060].view(9, 17, 20, 3), positions[3060:]
        times = torch.tensor([0, 1.6, 3.2, 4.8, 6.4, 8.0, 9.6, 11.2, 12.8])
        torch.testing.assert_close(video[:, 0, 0, 0] - offset, times, rtol=0, atol=2e-3)
        assert video[0, :, 0, 1].tolist() == list(range(17))
        assert video[0, 0, :, 2].tolist() == list(range(20))
        rows = 0.4 * torch.arange(33)
        torch.testing.assert_close(action[:, 0] - offset, rows, rtol=0, atol=2e-3)
        assert not action[:, 1:].any()

    def test_sampling_and_texts(self, plan):
        assert plan.sampling == Sampling(4, 3.0, 5.0)
        assert plan.sampling.noise_schedule().timesteps == (999, 937, 833, 624)
        assert plan.sampling.forwards == 8
        assert plan.negative == ""
        assert plan.system is None
        assert plan.prompt.endswith("This video is of 544x736 resolution.")
        assert "The video is 2.0 seconds long and is of 15 FPS." in plan.prompt

    def test_state_row_is_clean_and_has_an_inverted_gripper(self, plan):
        expected = torch.zeros(1, 64)
        expected[0, :7] = torch.from_numpy(JOINTS.astype(np.float32))
        expected[0, 7] = 0.75
        assert torch.equal(plan.rows, expected)
        noise = native_noise(0, 48, plan.layout, (64, 64))
        state = start(noise, plan.layout, frames=torch.ones(48, 1, 33, 40), rows=plan.rows)
        assert torch.equal(state.action[:1], expected)
        assert torch.equal(state.action[1:, :8], noise.action[1:, :8])
        assert not state.action[:, 8:].any()
        assert (state.video[:, 0] == 1).all()
        assert torch.equal(state.video[:, 1:], noise.video[:, 1:])

    def test_answer_inverts_the_gripper_and_clips_nothing(self, plan):
        rows = np.random.default_rng(0).normal(0, 3, (32, 8)).astype(np.float32)
        actions = plan.actions(rows)
        assert actions.dtype == np.float32
        assert np.array_equal(actions[:, :7], rows[:, :7])
        np.testing.assert_allclose(actions[:, 7], 1 - rows[:, 7], rtol=1e-6)

    def test_action_rows_meet_the_video_frames(self):
        """With a state row, row 4 f is at the time of latent frame f; without, start is 1."""
        config = Cosmos3Config.nano()
        layout = Layout(3, 1, 1, (0,), 15.0, ActionLayout(8, 1, (), 10, 8))
        times = media_positions(layout, 10, config)[:, 0] - 15010
        torch.testing.assert_close(times[3:], 0.4 * torch.arange(1.0, 9.0), rtol=0, atol=2e-3)

    def test_edge_guides_the_first_step_and_reads_json(self):
        plan = plan_policy(views(), setup(PolicyContract.edge()))
        assert plan.sampling.forwards == 5
        assert plan.prompt.startswith('{"cinematography": {"framing": "This video contains conc')
        assert '"resolution": {"H": 544, "W": 736}, "aspect_ratio": "4,3"}' in plan.prompt
        assert plan.negative == ""

    def test_request_overrides_sampling(self):
        sampling = Sampling(2, 1.0, 5.0)
        assert plan_policy(views(sampling=sampling), setup()).sampling is sampling

    def test_history_rows_come_first(self):
        history = np.arange(24.0).reshape(3, 8) / 100
        plan = plan_policy(views(history=history), setup())
        assert plan.layout.action == ActionLayout(36, -3, (0, 1, 2, 3), 8, 8)
        expected = np.vstack([history, [*JOINTS, 0.25]])
        expected[:, 7] = 1 - expected[:, 7]
        np.testing.assert_allclose(plan.rows[:, :8].numpy(), expected, rtol=1e-6)
        times = media_positions(plan.layout, 10, Cosmos3Config.nano())[3060:, 0] - 15010
        assert times[3] == 0
        assert times[4] > 0


class TestPoseSpace:
    CONTRACT = PolicyContract(space=ActionSpace.POSE)

    def request(self, **changes):
        return views(eef_position=[0.3, -0.1, 0.5], eef_quaternion=QUATERNION, **changes)

    def test_no_state_row_and_ten_columns(self):
        plan = plan_policy(self.request(), setup(self.CONTRACT))
        assert plan.layout.action == ActionLayout(32, 1, (), 10, 8)
        assert plan.rows is None

    def test_history_of_steps(self):
        plan = plan_policy(self.request(history=np.ones((2, 10))), setup(self.CONTRACT))
        assert plan.layout.action == ActionLayout(34, -1, (0, 1), 10, 8)
        assert plan.rows[:, :10].tolist() == [[1.0] * 9 + [0.0]] * 2

    def test_steps_are_followed_from_the_current_pose(self):
        random = np.random.default_rng(0)
        quaternions = random.standard_normal((33, 4))
        quaternions[0] = QUATERNION
        quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
        quaternions *= np.where(quaternions[:, 3:] < 0, -1, 1)
        rotations = rotation_from_quaternion(quaternions)
        positions = random.standard_normal((33, 3))
        positions[0] = 0.3, -0.1, 0.5
        gripper = random.random((32, 1))
        steps = np.hstack([split_framewise(positions, rotations), gripper])
        actions = self.CONTRACT.robot_actions(steps.astype(np.float32), self.request())
        assert actions.shape == (32, 8)
        np.testing.assert_allclose(actions[:, :3], positions[1:], atol=1e-5)
        np.testing.assert_allclose(actions[:, 3:7], quaternions[1:], atol=1e-5)
        np.testing.assert_allclose(actions[:, 7:], 1 - gripper, atol=1e-6)

    def test_normaliser_is_between_rows_and_poses(self):
        scale, offset = np.full(10, 0.5), np.arange(10) / 100
        contract = PolicyContract(
            space=ActionSpace.POSE, normalizer=ActionNormalizer(scale, offset)
        )
        steps = np.hstack([np.full((4, 3), 0.1), np.tile(rotation_to_six(np.eye(3)), (4, 1))])
        steps = np.hstack([steps, np.zeros((4, 1))])
        actions = contract.robot_actions((steps - offset) / scale, self.request())
        plain = self.CONTRACT.robot_actions(steps, self.request())
        np.testing.assert_allclose(actions, plain, atol=1e-6)
        rows = contract.clean_rows(self.request(history=np.ones((1, 10))))
        np.testing.assert_allclose(rows, [[*(1 - offset[:9]) / 0.5, (0 - offset[9]) / 0.5]])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"eef_position": None}, "'eef_position' is missing"),
            ({"eef_quaternion": [0, 0, 0, 0]}, "'eef_quaternion' is zero"),
            ({"eef_quaternion": [0, 0, 1]}, r"'eef_quaternion' has shape \(3,\)"),
            ({"history": np.ones((2, 8))}, r"'history' has shape \(2, 8\)"),
        ],
    )
    def test_bad_poses_are_named(self, changes, message):
        given = {"eef_position": [0, 0, 0], "eef_quaternion": [0, 0, 0, 1], **changes}
        with pytest.raises(ProcessingError, match=message):
            plan_policy(views(**given), setup(self.CONTRACT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"joint_position": None}, "'joint_position' is missing"),
        ({"joint_position": JOINTS[:6]}, r"'joint_position' has shape \(6,\)"),
        ({"joint_position": np.full(7, np.nan)}, "numbers that are not finite"),
        ({"joint_position": ["a"] * 7}, "'joint_position' has shape"),
        ({"gripper_position": None}, "'gripper_position' is missing; expected a finite number"),
        ({"gripper_position": [0.1, 0.2]}, "'gripper_position' has shape"),
        ({"gripper_position": 1e39}, "numbers that are not finite"),
        ({"joint_position": [[1], [2, 3]]}, "'joint_position' is no array"),
        ({"history": np.ones((2, 9))}, "expected nx8 finite numbers"),
    ],
)
def test_bad_states_are_named(changes, message):
    with pytest.raises(ProcessingError, match=message):
        plan_policy(views(**changes), setup())


NUMBERS = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.floats(),
    st.integers(),
    st.lists(st.floats(), max_size=9),
    st.lists(st.lists(st.floats(width=32), max_size=9), max_size=3),
    arrays(
        st.sampled_from([np.float16, np.float64, np.int8, np.bool_, np.complex64, "U2", object]),
        array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=8),
    ),
)
EDGES = np.zeros((540, 640, 3), np.uint8)
EDGES[::4, ::4] = 255
FRAMES = st.one_of(
    st.none(),
    arrays(
        st.sampled_from([np.uint8, np.float32, np.int64, np.bool_]),
        array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    ),
)


@given(
    joint_position=NUMBERS | st.just(JOINTS),
    gripper_position=NUMBERS | st.floats(0, 1),
    history=NUMBERS,
    eef_position=NUMBERS,
    eef_quaternion=NUMBERS,
    image=FRAMES | st.just(np.zeros((3, 8, 8), np.uint8)) | st.just(EDGES),
    space=st.sampled_from(ActionSpace),
)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_any_observation_is_planned_or_refused_by_name(image, space, **state):
    request = PolicyRequest(prompt="go", image=image, **state)
    contract = PolicyContract(space=space, chunk=4, tier="256")
    plan, refusal = None, ""
    try:
        plan = plan_policy(request, setup(contract))
    except ProcessingError as error:
        refusal = str(error)
    if plan is None:
        assert any(f"'{name}'" in refusal for name in (*state, "image", "wrist"))
        return
    assert plan.rows is None or plan.rows.isfinite().all()
    assert plan.pixels.isfinite().all()
    assert plan.pixels.abs().max() < 2, "bicubic scaling overshoots, but not by so much"


def test_gripper_may_be_a_vector_of_one():
    rows = PolicyContract().clean_rows(views(gripper_position=[0.25]))
    assert rows[0, 7] == np.float32(0.75)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_dim": 0, "domains": ()}, "served: none"),
        ({"domains": (7,)}, "id 8, which is not served; served: 7"),
        ({"action_dim": 7}, "raw_dim is 8; allowed: 1 to 7"),
    ],
)
def test_checkpoints_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ProcessingError, match=message):
        plan_policy(views(), setup(**changes))


class TestContract:
    def test_checkpoint_file_overrides(self):
        contract = PolicyContract.edge().updated(
            {"action_chunk_size": 16, "conditioning_fps": 10, "domain_name": "robomind-franka"}
        )
        assert (contract.chunk, contract.fps, contract.domain) == (16, 10.0, "robomind-franka")
        assert contract.json_prompt
        assert PolicyContract.nano().updated({}) == PolicyContract.nano()
        plan = plan_policy(views(), setup(contract))
        assert plan.layout.frames == 5
        assert plan.layout.action.rows == 17

    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            ({"action_chunk_size": 30}, "chunk is 30; allowed: multiples of 4, at least 4"),
            ({"action_chunk_size": 0}, "chunk is 0"),
            ({"action_chunk_size": "32"}, "policy.action_chunk_size is '32'"),
            ({"conditioning_fps": 0}, "fps is 0.0"),
            ({"domain_name": "droid"}, "domain is 'droid'; known: "),
        ],
    )
    def test_bad_values_are_named(self, policy, message):
        with pytest.raises(ProcessingError, match=message):
            PolicyContract.nano().updated(policy)
