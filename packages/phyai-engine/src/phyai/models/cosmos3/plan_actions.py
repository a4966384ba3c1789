"""Plans of the modes with actions: the DROID policy, and any embodiment's three modes."""

from functools import partial

import numpy as np
from torch import Tensor

from phyai.models.cosmos3.canvas import content_cells, fit_canvas, to_frames
from phyai.models.cosmos3.checks import check_array, check_count, check_kinds, check_rate
from phyai.models.cosmos3.domains import Viewpoint, find_domain
from phyai.models.cosmos3.droid import compose_views
from phyai.models.cosmos3.normalizers import ActionNormalizer
from phyai.models.cosmos3.plans import TEMPORAL, Plan, Setup, latent_frames, padded_rows
from phyai.models.cosmos3.prompts import (
    DROID_VIEWS,
    ClipFormat,
    PromptStyle,
    json_prompt,
    plain_prompt,
)
from phyai.models.cosmos3.requests import (
    ForwardDynamicsRequest,
    InverseDynamicsRequest,
    PolicyRequest,
    WorldActionRequest,
)
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import ActionLayout, Layout
from phyai.processing.errors import ProcessingError

EmbodimentRequest = WorldActionRequest | ForwardDynamicsRequest | InverseDynamicsRequest

SAMPLING = Sampling(30, 1.0, 10.0)
"""Of the modes of any embodiment."""


def plan_policy(request: PolicyRequest, setup: Setup) -> Plan:
    """Plans a step of a DROID policy; history and state are clean rows in front of the answer.

    Raises:
        ProcessingError: for a request that the contract does not allow.
    """
    check_kinds(request, "exteriors")
    contract = setup.contract
    contract.check(request)
    clean = contract.clean_rows(request)
    domain = _domain_id(contract.domain, setup)
    frames = compose_views(request, contract.rounding, setup.device)
    pixels, content = fit_canvas(frames, contract.tier)
    clip = ClipFormat(contract.chunk + 1, contract.fps, *_size(pixels))
    cells = content_cells(content)
    raw_dim = _raw_dim(contract.raw_dim, setup)
    action = ActionLayout(
        rows=len(clean) + contract.chunk,
        start=1 - len(clean),
        clean_rows=tuple(range(len(clean))),
        raw_dim=raw_dim,
        domain_id=domain,
    )
    return Plan(
        prompt=_prompt(
            request.prompt, clip, Viewpoint.CONCAT, DROID_VIEWS, setup, contract.json_prompt
        ),
        negative="",
        system=setup.system(clip),
        layout=Layout(latent_frames(clip.frames), *cells, (0,), contract.fps, action),
        sampling=request.sampling or contract.sampling,
        fps=contract.fps,
        pixels=pixels,
        cells=cells,
        rows=padded_rows(clean, setup.action_dim),
        actions=partial(contract.robot_actions, request=request),
        video=request.decode_video,
    )


def plan_embodiment(request: EmbodimentRequest, setup: Setup) -> Plan:
    """Plans joint denoising, forward dynamics or inverse dynamics of any embodiment.

    Raises:
        ProcessingError: for an unknown domain, a wrong width or length, or bad pictures.
    """
    check_kinds(request, "frames")
    domain = find_domain(request.domain)
    fps = check_rate("fps", domain.fps if request.fps is None else request.fps)
    raw_dim = _raw_dim(_width(request, domain.raw_dim), setup)
    _check_normalizer(request.normalizer, raw_dim)
    pixels, cells, chunk = _pixels(request, domain.chunk, request.tier or domain.tier, setup)
    clip = ClipFormat(chunk + 1, fps, *_size(pixels))
    forward = isinstance(request, ForwardDynamicsRequest)
    inverse = isinstance(request, InverseDynamicsRequest)
    action = ActionLayout(
        rows=chunk,
        start=1,
        clean_rows=tuple(range(chunk)) if forward else (),
        raw_dim=raw_dim,
        domain_id=_domain_id(request.domain, setup),
    )
    frames = latent_frames(clip.frames)
    clean_frames = tuple(range(frames)) if inverse else (0,)
    rows = None
    if forward:
        rows = padded_rows(_given_actions(request, raw_dim), setup.action_dim)
    return Plan(
        prompt=_prompt(
            request.prompt, clip, request.viewpoint, request.view_description, setup, False
        ),
        negative="",
        system=setup.system(clip),
        layout=Layout(frames, *cells, clean_frames, fps, action),
        sampling=request.sampling or SAMPLING,
        fps=fps,
        pixels=pixels,
        cells=cells,
        rows=rows,
        actions=None if forward else partial(_restored, normalizer=request.normalizer),
        video=not inverse if forward or inverse else request.decode_video,
    )


def _prompt(
    text: str,
    clip: ClipFormat,
    viewpoint: Viewpoint,
    views: str,
    setup: Setup,
    as_json: bool,
) -> str:
    if as_json or setup.contract.json_prompt or setup.style is PromptStyle.DIFFUSERS:
        return json_prompt(text, clip, viewpoint=viewpoint, views=views)
    return plain_prompt(text, clip, viewpoint=viewpoint, views=views)


def _pixels(
    request: EmbodimentRequest, preset: int, tier: str, setup: Setup
) -> tuple[Tensor, tuple[int, int], int]:
    """Returns the pixels to encode, the latent cells that are kept, and the number of actions."""
    if isinstance(request, InverseDynamicsRequest):
        frames = to_frames(request.frames, "frames")
        chunk = len(frames) - 1 if request.chunk is None else request.chunk
        if len(frames) != check_count("chunk", chunk) + 1:
            raise ProcessingError(
                f"'frames' has {len(frames)} pictures but chunk is {chunk}; {chunk} actions lie "
                f"between {chunk + 1} pictures"
            )
    else:
        frames = to_frames([request.image], "image")
        chunk = preset if request.chunk is None else request.chunk
        if isinstance(request, ForwardDynamicsRequest) and request.chunk is None:
            chunk = len(check_array("actions", request.actions, (None, None)))
    check_count("chunk", chunk, least=TEMPORAL, step=TEMPORAL)
    pixels, content = fit_canvas(frames.to(setup.device), tier)
    return pixels, content_cells(content), chunk


def _width(request: EmbodimentRequest, listed: int | None) -> int:
    if request.raw_dim is not None:
        return request.raw_dim
    if listed is None:
        raise ProcessingError(
            f"the action width of domain {request.domain!r} depends on the data set; set raw_dim"
        )
    return listed


def _raw_dim(raw_dim: int, setup: Setup) -> int:
    if check_count("raw_dim", raw_dim) > setup.action_dim:
        raise ProcessingError(
            f"raw_dim is {raw_dim}; allowed: 1 to {setup.action_dim}, the width of the model's rows"
            + ("" if setup.action_dim else "; this checkpoint has no action heads")
        )
    return raw_dim


def _domain_id(name: str, setup: Setup) -> int:
    number = find_domain(name).id
    if number not in setup.domains:
        served = ", ".join(map(str, setup.domains)) or "none"
        raise ProcessingError(
            f"domain {name!r} has id {number}, which is not served; served: {served}. Load the "
            "checkpoint with this domain, or one that was trained on it"
        )
    return number


def _check_normalizer(normalizer: ActionNormalizer | None, raw_dim: int) -> None:
    if normalizer is not None and normalizer.width != raw_dim:
        raise ProcessingError(
            f"the normalizer has {normalizer.width} columns but an action has {raw_dim}; use the "
            "statistics of this domain"
        )


def _given_actions(request: ForwardDynamicsRequest, raw_dim: int) -> np.ndarray:
    actions = check_array("actions", request.actions, (request.chunk, raw_dim))
    return actions if request.normalizer is None else request.normalizer.normalize(actions)


def _restored(rows: np.ndarray, normalizer: ActionNormalizer | None) -> np.ndarray:
    return np.array(rows) if normalizer is None else normalizer.restore(rows)


def _size(pixels: Tensor) -> tuple[int, int]:
    return pixels.shape[-2], pixels.shape[-1]
