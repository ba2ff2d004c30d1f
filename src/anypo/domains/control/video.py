"""A GIF of one episode, drawn off-screen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anypo.domains.control.envs import Maker

if TYPE_CHECKING:
    from anypo.domains.control.policy import EnvironmentPolicy

FRAMES_KEPT = 250  # at most so many pictures go into a file; longer episodes are thinned out


def wanted(option: str | bool | None, name: str, folder: Path | None = None) -> Path | None:
    """Where the option `video` asks for a GIF: the name of a .gif file, "true" for one in the run's folder (here without a folder) that is named
    after the environment, None or "false" for none. Raises ValueError for another kind of file.
    """
    text = str(option or "false")
    if text.lower() == "false":
        return None
    if text.lower() == "true":
        return (folder or Path()) / f"{name.replace('/', '-')}.gif"
    if Path(text).suffix.lower() != ".gif":
        raise ValueError(f"the option video takes true or the name of a .gif file, not '{text}'")
    return Path(text)


def check(make: Maker, name: str) -> None:
    """Draw one picture, so that what is missing is said before the training and not after it.

    Raises ImportError with the command to run when the drawing packages are missing, ValueError when the environment cannot be drawn.
    """
    imageio()
    environment = _drawing(make, name)
    try:
        environment.reset(seed=0)
        picture(environment, name)
    finally:
        environment.close()


def record(policy: EnvironmentPolicy, make: Maker, path: Path, seed: int, frames: int = 1000) -> Path:
    """A GIF of one episode under the likeliest actions, from a start seed; at most `frames` steps. Raises as `check` does."""
    spaces, act = policy.spaces, policy.actor()
    environment = _drawing(make, spaces.name)
    observation, _ = environment.reset(seed=seed)
    images: list[NDArray[np.uint8]] = []
    ended = False
    while not ended and len(images) < frames:
        images.append(picture(environment, spaces.name))
        seen = np.eye(spaces.observation_size)[int(observation)] if spaces.discrete_observation else np.ravel(observation)
        action = policy.for_environment(act(seen.astype(np.float32)[None], None))[0]
        for piece in np.reshape(action, (spaces.chunk, -1)):
            taken = int(action) if spaces.actions is not None else piece.reshape(environment.action_space.shape)
            observation, _, terminated, truncated, _ = environment.step(taken)
            ended = terminated or truncated
            if ended:
                break
    rate = environment.metadata.get("render_fps", 30)
    environment.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    thin = images[:: -(-len(images) // FRAMES_KEPT)]
    imageio().imwrite(path, np.stack(thin), extension=".gif", duration=1000 / rate, loop=0)
    return path


def imageio() -> Any:
    """The module that writes the file. Raises ImportError with the command to run."""
    try:
        import imageio.v3 as found
    except ImportError as error:
        raise ImportError('a video needs imageio; pip install "anypo[control]"') from error
    return found


def picture(environment: Any, name: str) -> NDArray[np.uint8]:
    """What the environment looks like at this moment."""
    try:
        image = environment.render()
    except ImportError:
        raise
    except Exception as error:  # drawing libraries raise errors of their own, for example where there is no graphics driver
        raise ValueError(f"{name} cannot be drawn on this machine ({error}); leave the option video out") from error
    if not isinstance(image, np.ndarray):
        raise ValueError(f"{name} draws no pictures as arrays of pixels; leave the option video out")
    return image


def _drawing(make: Maker, name: str) -> Any:
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    plain = make()
    modes = plain.metadata.get("render_modes") or ()
    plain.close()
    if "rgb_array" not in modes:
        raise ValueError(
            f"{name} draws no pictures (it has no render mode rgb_array), so there is no video of it; leave the option video out"
        )
    return make(render_mode="rgb_array")
