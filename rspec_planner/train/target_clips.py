# Copyright 2026 rspec_planner authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""
What a target is asked about when its outputs are cached: bags, recorded clips, or noise.

Every source yields prompts and images in the order of the recording; which clips are held out for
validation follows from their ordinal alone, so that a run that is repeated gives the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rspec_planner.errors import ConfigurationError, InputError
from rspec_planner.model.config import ProfileConfig
from rspec_planner.planner.history import history_token_ids
from rspec_planner.planner.observation import Observation
from rspec_planner.planner.prompt import build_prompt, Prompt, Segment, segment_positions
from rspec_planner.planner.tokenizer import TextTokenizer

#: bag, profile, topic file and tokenizer -> observations in the order of the bag
BagSource = Callable[[Path, ProfileConfig, Path | None, TextTokenizer | None],
                     Iterator[Observation]]
#: observations of one bag within this time are one clip: they share what they see
CLIP_NS = 20_000_000_000
#: text tokens before the images and behind the history of a random prompt, R1's counts
RANDOM_BEFORE, RANDOM_BEHIND = 20, 24


@dataclass(frozen=True)
class TargetClip:
    """One prompt and its images, (V, H, W, 3) uint8 in prompt order."""

    name: str
    split: str  # 'train' or 'val'
    family: str  # where it comes from
    prompt: Prompt
    images: np.ndarray


def split_of(ordinal: int, val_share: float) -> str:
    """Return the split of the clip with this number; the first one is held out."""
    if not 0.0 < val_share < 1.0:
        raise ConfigurationError(f'val_share={val_share}: choose a share between 0 and 1, '
                                 'such as 0.1')
    return 'val' if ordinal % round(1.0 / val_share) == 0 else 'train'


def clip_of(profile: ProfileConfig, tokenizer: TextTokenizer, seen: Observation, name: str,
            split: str, family: str) -> TargetClip:
    """Return the clip of an observation."""
    prompt = build_prompt(profile, tokenizer, seen.ego_poses, seen.navigation_text)
    images = seen.images.reshape(-1, *seen.images.shape[2:])
    return TargetClip(name, split, family, prompt, images)


def bag_clips(bags: tuple[Path, ...], source: BagSource, profile: ProfileConfig,
              tokenizer: TextTokenizer, val_share: float,
              topics: Path | None = None) -> Iterator[TargetClip]:
    """
    Yield every trigger of bags; a clip is 20 s of one bag, and its triggers stay together.

    source: yields what a planner would see of one bag. topics: a file of topic names.
    """
    ordinal = -1
    for bag in bags:
        first, found = None, False
        for seen in source(bag, profile, topics, tokenizer):
            found = True
            if first is None or seen.t0_ns - first >= CLIP_NS:
                first, ordinal = seen.t0_ns, ordinal + 1
            yield clip_of(profile, tokenizer, seen, f'{bag.name}/{seen.t0_ns}',
                          split_of(ordinal, val_share), 'bag')
        if not found:
            raise InputError(f'bag {bag} gives no observation; see `rspec plan {bag}` for what '
                             'it lacks')


def random_clips(profile: ProfileConfig, count: int, val_share: float,
                 seed: int = 0) -> Iterator[TargetClip]:
    """Yield prompts of random words and images of noise, in the layout of the profile."""
    cameras = profile.cameras
    shape = (profile.num_images, cameras.height, cameras.width, 3)
    for ordinal in range(count):
        rng = np.random.default_rng([seed, 51, ordinal])
        yield TargetClip(f'random/{ordinal}', split_of(ordinal, val_share), 'random',
                         random_prompt(profile, rng),
                         rng.integers(0, 256, shape, dtype=np.uint8))


def random_prompt(profile: ProfileConfig, rng: np.random.Generator) -> Prompt:
    """Return a prompt of random words; the R1 profile's has 3,006 tokens."""
    t, merge = profile.tokens, profile.vision.spatial_merge_size
    rows, cols = (n // merge for n in profile.patch_grid)
    images, poses = profile.num_images, profile.history.num_poses
    words = rng.integers(0, min(t.pad or t.forbidden_start, t.forbidden_start),
                         RANDOM_BEFORE + RANDOM_BEHIND)
    words[words == t.image_pad] += 1
    positions = np.zeros((poses, 3))
    positions[:, 0] = rng.uniform(0.0, 20.0) * np.arange(1 - poses, 1) * 0.1
    history = history_token_ids(positions, profile.history, t.traj_token_start)
    image = [t.vision_start, *[t.image_pad] * profile.tokens_per_image, t.vision_end]
    ids = np.concatenate([words[:RANDOM_BEFORE], image * images, [t.traj_history_start],
                          history, [t.traj_history_end], words[RANDOM_BEFORE:-1],
                          [t.cot_start]]).astype(np.int64)
    marked: list[Segment] = [1, (rows, cols), 1]
    after = len(ids) - RANDOM_BEFORE - images * (profile.tokens_per_image + 2)
    places, delta = segment_positions([RANDOM_BEFORE, *marked * images, after])
    return Prompt(ids, places, delta, len(ids))


def new_clips(clips: Iterator[TargetClip], known: Collection[str],
              limit: int) -> Iterator[TargetClip]:
    """Yield the clips that are not known yet, among the first `limit` (0: among all)."""
    for count, clip in enumerate(clips):
        if limit and count >= limit:
            return
        if clip.name not in known:
            yield clip
