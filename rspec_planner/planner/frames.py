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
One camera frame on its way to the model: a reference at first, pixels of the model's size later.

Decoding and resizing happen once, for the frames that a plan uses, on all processors: OpenCV
releases the interpreter's lock while it works. Afterwards only the pixels of the model's size
are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
import os
from threading import Lock

import cv2
import numpy as np
from numpy.typing import NDArray

from rspec_planner.model.config import CameraConfig
from rspec_planner.model.image_size import resize_bicubic, size_fault

Pixels = NDArray[np.uint8]
ImageSource = Pixels | Callable[[], Pixels]


class FrameFault(Exception):
    """Why a frame gives no pixels; `reason` is a skip reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass
class CameraFrame:
    """One frame; `decoded` is filled once and then replaces the source."""

    source: ImageSource | None
    size: int = 0  # bytes that the source keeps in memory
    decoded: Pixels | None = None
    task: Future[Pixels] | None = None  # the one decoding of this frame
    dropped: str = ''  # why the source was given up before anybody needed it

    @property
    def waiting(self) -> bool:
        """Return whether the frame is as it came: nobody has begun to decode it."""
        return self.source is not None and self.task is None

    @property
    def held(self) -> int:
        """Return the bytes of a source that nobody has begun to decode."""
        return self.size if self.waiting else 0

    def drop(self, why: str) -> None:
        """Give the source up; a selection that needs the frame then names the reason."""
        self.source, self.dropped = None, why


class FrameDecoder:
    """Decodes frames in threads of its own, each frame once; they start with the first frame."""

    def __init__(self, cameras: CameraConfig, aspect_tolerance: float) -> None:
        self._cameras = cameras
        self._aspect_tolerance = aspect_tolerance
        self.threads = min(len(cameras.names), os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix='decode')
        self._lock = Lock()

    def start(self, camera: str, frame: CameraFrame) -> Future[Pixels]:
        """Begin to decode a frame unless that has happened; any thread."""
        with self._lock:
            if frame.task is None:
                frame.task = self._pool.submit(self._decode, camera, frame)
            return frame.task

    def finish(self, chosen: Mapping[str, Sequence[CameraFrame]]) -> None:
        """
        Wait until all chosen frames are decoded.

        Raises FrameFault for the first camera, in their order, with a frame that cannot be used.
        """
        tasks = [self.start(camera, frame) for camera, frames in chosen.items()
                 for frame in frames if frame.decoded is None]
        for task in tasks:
            task.result()

    def stack(self, chosen: Mapping[str, Sequence[CameraFrame]]) -> Pixels:
        """
        Return the pixels of all chosen frames, (cameras, frames, H, W, 3) RGB.

        Raises FrameFault as `finish` does.
        """
        self.finish(chosen)
        first, *_ = chosen.values()
        images = np.empty((len(chosen), len(first), self._cameras.height, self._cameras.width, 3),
                          dtype=np.uint8)
        for row, frames in zip(images, chosen.values()):
            for place, frame in zip(row, frames):
                place[:] = frame.decoded
        return images

    def close(self) -> None:
        """End the threads; frames in work are finished, frames that wait are not begun."""
        self._pool.shutdown(cancel_futures=True)

    def _decode(self, camera: str, frame: CameraFrame) -> Pixels:
        """Return the frame at the model's size and keep it; its source is not needed again."""
        source, frame.source = frame.source, None
        if frame.dropped:
            raise FrameFault(frame.dropped, f'camera {camera}: the frame was dropped before it '
                             'was needed; see sync.image_buffer_mib')
        try:
            image = source() if callable(source) else source
        except Exception as error:  # any decoder, any fault: it becomes a named skip
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise FrameFault('image_decode_failed', f'camera {camera}: {reason}') from error
        frame.decoded = self._fit(camera, image)
        return frame.decoded

    def _fit(self, camera: str, image: Pixels | None) -> Pixels:
        """Resize to the model's size; another aspect ratio would change what angles mean."""
        height, width = self._cameras.height, self._cameras.width
        if image is None or image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            found = 'nothing' if image is None else f'{image.dtype} {image.shape}'
            raise FrameFault('image_decode_failed', f'camera {camera}: decoded to {found}, '
                             'expected uint8 (height, width, 3) RGB')
        if image.shape[:2] == (height, width):
            return image
        rows, cols = image.shape[:2]
        fault = size_fault(self._cameras, rows, cols, self._aspect_tolerance)
        if fault:
            raise FrameFault('image_wrong_size', f'camera {camera}: {fault}')
        resize = resize_bicubic if self._cameras.resize == 'bicubic' else averaged_down
        return resize(image, height, width)


def averaged_down(image: Pixels, height: int, width: int) -> Pixels:
    """
    Return (height, width, 3): pixel areas averaged (cv2.INTER_AREA), so nothing aliases.

    Where the factor is not whole, the image is halved first while that is not too small: 1080p
    to 576x320 then takes 5 instead of 17 ms, because OpenCV averages whole pixels much faster
    than parts of pixels. Below a factor of 4/3 two neighbours are weighed instead of areas: from
    480x270 to 384x216 that takes 0.2 instead of 0.9 ms, and differs less from the means over the
    areas of 1080p (0.6 instead of 1.1 in the bench's scene, 5.8 instead of 6.1 in 1/f noise).
    """
    rows, cols = image.shape[:2]
    while (rows % height or cols % width) and rows % 2 == 0 and cols % 2 == 0 \
            and rows // 2 >= height and cols // 2 >= width:
        rows, cols = rows // 2, cols // 2
        image = np.asarray(cv2.resize(image, (cols, rows), interpolation=cv2.INTER_AREA),
                           dtype=np.uint8)
    if (rows, cols) == (height, width):
        return image
    small = 3 * rows <= 4 * height and 3 * cols <= 4 * width
    resized = cv2.resize(image, (width, height),
                         interpolation=cv2.INTER_LINEAR if small else cv2.INTER_AREA)
    return np.asarray(resized, dtype=np.uint8)
